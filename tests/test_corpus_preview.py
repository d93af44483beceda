"""``dflash-offline show --corpus N``: a conversation with its supervised tokens marked, before and after preparing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_offline import keys
from dflash_offline.cli import main
from dflash_offline.config import RunConfig
from dflash_offline.corpus import prepare
from dflash_offline.layout import Layout
from dflash_offline.progress import Progress


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]}


@pytest.fixture
def path(run_file: Callable[..., Path]) -> Path:
    path = run_file()
    rows = [chat("no answer"), chat("Hi there", "Hello \N{GRINNING FACE}!", "more", "Bye"), chat("second", "row here")]
    (path.parent / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(path: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["show", "--config", str(path), *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_a_conversation_is_shown_before_and_after_preparing(path: Path) -> None:
    before = shown(path, "--corpus", "0")
    assert f"row 0 ({path.parent / 'corpus.jsonl'}:2), " in before and "not prepared yet" in before
    assert (
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n\u00abHello \N{GRINNING FACE}!<|im_end|>\u00bb\n<|im_start|>"
        in before
    )
    assert before.count("\u00ab") == 2 and "\u00abBye<|im_end|>\u00bb" in before
    config = RunConfig.load(path)
    key = keys.corpus_key(config)
    prepare(config, Layout(config.root_dir).corpus(key), key, Progress(None))
    after = shown(path, "--corpus", "0")
    assert after.split("\n\n", 1)[1] == before.split("\n\n", 1)[1] and "bucket 0" in after
    found = json.loads(shown(path, "--corpus", "1", "--json"))
    assert found["runs"][-1] == ["row here<|im_end|>", True] and found["origin"].endswith("corpus.jsonl:3")
    assert found["tokens"] > found["supervised"] > 1


def test_rows_that_are_not_there(path: Path) -> None:
    assert "error: --corpus 2: the files have 2 usable rows, numbered from 0\n" in shown(path, "--corpus", "2", status=1)
    config = RunConfig.load(path)
    key = keys.corpus_key(config)
    prepare(config, Layout(config.root_dir).corpus(key), key, Progress(None))
    assert "error: --corpus 2: the corpus has 2 rows, numbered from 0\n" in shown(path, "--corpus", "2", status=1)
    file = path.parent / "corpus.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    why = f"1 x no messages, the first in {file}:1 (keys are completion, prompt)"
    assert f"error: --corpus 0: the files have no usable row: {why}\n" in shown(path, "--corpus", "0", status=1)
    file.write_text("")
    assert f"error: --corpus 0: the files have no usable row: {file} is empty\n" in shown(path, "--corpus", "0", status=1)
    for arguments in ([], ["0", "--corpus", "0"]):
        assert "name a sample of the store, or a row of the corpus" in shown(path, *arguments, status=2)

"""Standard input and Hugging Face data sets as conversation files."""

import fcntl
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus import prepare
from dflash_offline.errors import ConfigError, CorpusError
from dflash_offline.inputs import is_dataset_name, stdin_file, take_stdin
from dflash_offline.layout import Layout
from dflash_offline.progress import Progress
from dflash_offline.tidy import prune_plan, remove

Piped = Callable[[bytes], None]


@pytest.fixture
def piped(tmp_path: Path) -> Iterator[Piped]:
    """``piped(content)``: the next reads of standard input give this."""
    kept = os.dup(0)

    def pipe(content: bytes) -> None:
        path = tmp_path / "piped"
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDONLY)
        os.dup2(descriptor, 0)
        os.close(descriptor)

    yield pipe
    os.dup2(kept, 0)
    os.close(kept)


@pytest.fixture
def from_stdin(run_file: Callable[..., Path]) -> RunConfig:
    path = run_file()
    text = path.read_text()
    path.write_text("\n".join('files = ["-"]' if line.startswith("files = ") else line for line in text.splitlines()))
    return RunConfig.load(path)


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_stream_is_known_by_its_content(from_stdin: RunConfig, piped: Piped, conversations: list[dict[str, Any]]) -> None:
    said: list[str] = []
    with pytest.raises(CorpusError, match=r"'-' is standard input, and nothing was piped in yet"):
        keys.corpus_key(from_stdin)
    piped(b"")
    with pytest.raises(CorpusError, match="nothing was piped in yet"):
        take_stdin(from_stdin, said.append)
    piped(gzip.compress(lines(conversations[:20]), mtime=0))
    take_stdin(from_stdin, said.append)
    first, key = stdin_file(from_stdin, where="files"), keys.corpus_key(from_stdin)
    stamp = first.stat()
    corpus = prepare(from_stdin, Layout(from_stdin.root_dir).corpus(key), key, Progress(None))
    assert corpus.manifest["counts"]["conversations"] == 20
    piped(gzip.compress(lines(conversations[:20]), mtime=0))
    take_stdin(from_stdin, said.append)
    assert first.stat() == stamp and keys.corpus_key(from_stdin) == key, "the same stream again changes nothing"
    assert said == []
    piped(b"")
    take_stdin(from_stdin, said.append)
    assert said[0].startswith("Standard input is empty: going on with the") and keys.corpus_key(from_stdin) == key
    piped(lines(conversations[:21]))
    take_stdin(from_stdin, said.append)
    assert keys.corpus_key(from_stdin) != key
    assert not list(first.parent.glob(".stdin-*")), "no temporary file is left"
    (older,) = (removal for removal in prune_plan([from_stdin]) if "standard input" in removal.what)
    remove([older])
    assert not first.exists() and stdin_file(from_stdin, where="files").is_file()


def test_a_terminal_or_no_stdin_is_never_waited_for(from_stdin: RunConfig) -> None:
    kept = os.dup(0)
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        take_stdin(from_stdin, print)
        os.close(0)
        take_stdin(from_stdin, print)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert not Layout(from_stdin.root_dir).inputs.exists()


def test_luigi_reads_what_is_piped_in_and_goes_on_without(from_stdin: RunConfig, conversations: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "luigi", "--module", "pipelines", "PrepareCorpus", "--config", str(from_stdin.source)]
    done = subprocess.run(command, input=lines(conversations[:12]), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert "12 used" in done.stdout.decode()
    assert "Standard input is empty" not in done.stdout.decode(), "it is read once"
    assert (Layout(from_stdin.root_dir).corpus(keys.corpus_key(from_stdin)) / "manifest.json").is_file()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0 and b"12 used" not in done.stdout, "the stream piped in before, and it is prepared already"


def test_a_loop_of_links_gives_each_file_once(run_file: Callable[..., Path], tmp_path: Path) -> None:
    config = RunConfig.load(run_file())
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for name in ("data/b.jsonl", "data/inner/a.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "data" / "inner" / "loop").symlink_to(tmp_path / "data")
    expected = [tmp_path / "data" / "b.jsonl", tmp_path / "data" / "inner" / "a.jsonl"]
    for pattern in ("data", "data/**/*.jsonl"):
        assert config.files([pattern], where="x") == expected
    assert config.files(["data/b.jsonl", "data/*"], where="x").count(expected[0]) == 2, "named twice counts twice"


def test_what_a_run_writes_is_none_of_its_inputs(run_file: Callable[..., Path], tmp_path: Path) -> None:
    config = RunConfig.load(run_file())
    (config.root_dir / "logs").mkdir(parents=True)
    (config.root_dir / "logs" / "notes.jsonl").write_text("{}")
    assert config.files(["."], where="x") == [tmp_path / "corpus.jsonl", tmp_path / "run.toml"]
    assert config.files(["out/logs"], where="x") == [config.root_dir / "logs" / "notes.jsonl"], "named by itself it is taken"


def test_a_copy_that_a_killed_command_left_is_removed(
    from_stdin: RunConfig, piped: Piped, conversations: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = Layout(from_stdin.root_dir).inputs
    folder.mkdir(parents=True)
    (folder / ".stdin-left").write_bytes(b"half")
    with (folder / ".stdin-held").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # of a command that is still reading
        piped(lines(conversations[:3]))
        take_stdin(from_stdin, print)
        assert [path.name for path in folder.glob(".stdin-*")] == [".stdin-held"]


def test_what_may_be_the_name_of_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()

    def may_be(name: str) -> bool:
        return is_dataset_name(name, tmp_path / name)

    assert may_be("owner/name") and may_be("owner/name@config:train_sft") and may_be("hf:data/name")
    assert not any(map(may_be, ["data/name", "owner/rows.jsonl", "owner/rows.json.gz", "name", "a/b/c", "../up", "owner/*", "./owner"]))


def test_a_data_set_without_the_package_is_one_line(run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    config = RunConfig.load(run_file())
    with pytest.raises(ConfigError, match=r"'owner/talks' matches no file; if it is a Hugging Face data set: `pip install datasets`"):
        config.files(["owner/talks"], where="[corpus] files")


def test_prompts_of_an_evaluation_are_files_only(run_file: Callable[..., Path]) -> None:
    for name in ("-", "owner/talks"):
        with pytest.raises(ConfigError, match=f"\\[evaluate\\] prompts: '{name}' matches no file \\(looked for "):
            RunConfig.load(run_file(evaluate={"prompts": [name]})).evaluation_prompts()


# In a process of its own: the package reads its settings when it is imported
DATASETS = """
import json, sys
from pathlib import Path
import datasets
from dflash_offline.config import RunConfig
from dflash_offline.errors import ConfigError
cache, rows = Path(sys.argv[1]), [json.loads(line) for line in Path("corpus.jsonl").read_text().splitlines()]
datasets.disable_progress_bars()
made = datasets.load_dataset("json", data_files={"train": "corpus.jsonl", "test": "corpus.jsonl"})
made["train"].save_to_disk("saved")
source = Path(made["train"].cache_files[0]["filename"]).parent
hub = cache / "owner___talks" / "default" / "0.0.0" / source.name  # as a data set of the hub lies in the cache
hub.mkdir(parents=True)
for path in source.glob("*.arrow"):
    path.rename(hub / path.name.replace("json-", "talks-"))
info = json.loads((source / "dataset_info.json").read_text()) | {"dataset_name": "talks", "config_name": "default"}
(hub / "dataset_info.json").write_text(json.dumps(info))
config = RunConfig.load("run.toml")
found = {}
for name in ("owner/talks", "hf:owner/talks@default:test", "owner/talks:dev", "owner/absent"):
    try:
        found[name] = [str(path) for path in config.files([name], where="[corpus] files")]
    except ConfigError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_data_sets_of_the_hub_and_of_a_folder(run_file: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = run_file()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", DATASETS, str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["owner/talks"][0].endswith("talks-train.arrow") and found["hf:owner/talks@default:test"][0].endswith("talks-test.arrow")
    assert found["owner/talks:dev"].endswith("its splits are train, test; name one: owner/talks:train")
    assert "is no file, and the data set cannot be loaded: " in found["owner/absent"] and "\n" not in found["owner/absent"]

    def hashes(name: str, folder: str) -> list[bytes]:
        text = path.read_text().splitlines()
        (tmp_path / "other.toml").write_text(
            "\n".join(f"files = {json.dumps([name])}" if line.startswith("files = ") else line for line in text)
        )
        config = RunConfig.load(tmp_path / "other.toml")
        corpus = prepare(config, tmp_path / folder, keys.corpus_key(config), Progress(None))
        return sorted(row.tobytes() for row in corpus.hashes)

    # remembered: neither the package's settings nor the hub are needed any more
    plain = hashes(str(tmp_path / "corpus.jsonl"), "plain")
    assert len(plain) == 24 and hashes("owner/talks", "hub") == plain and hashes("saved", "folder") == plain

"""Shared fixtures: a tiny real tokenizer and target, real conversations, run files."""

import fcntl
import gzip
import json
import os
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO_CORPUS = REPOSITORY / "data" / "demo-conversations.jsonl.gz"

# ChatML without {% generation %}: the assistant mask has to be found another way, as with most real templates
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read_conversations() -> list[dict[str, Any]]:
    with gzip.open(DEMO_CORPUS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="session")
def conversations() -> list[dict[str, Any]]:
    """The demo corpus: real conversations answered by SmolLM2, some cut by a length limit."""
    return read_conversations()


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, conversations: list[dict[str, Any]]) -> Path:
    """A byte-level BPE tokenizer with 500 tokens, trained on the demo corpus, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((message["content"] for row in conversations for message in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_level(conversations: list[dict[str, Any]]) -> Any:
    """A byte-level tokenizer with the control tokens of ``chat_templates``."""
    import chat_templates

    return chat_templates.make_byte_level(m["content"] for row in conversations for m in row["messages"])


@pytest.fixture(scope="session")
def metaspace(conversations: list[dict[str, Any]]) -> Any:
    """The same in the manner of sentencepiece."""
    import chat_templates

    return chat_templates.make_metaspace(m["content"] for row in conversations for m in row["messages"])


def make_tiny_target(folder: Path, tokenizer_dir: Path, **sizes: Any) -> Path:
    """A tiny random Llama with the given tokenizer. 512 embedding rows for 500 tokens, so a mask row is free."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,  # far from uniform, so that greedy text is decided by more than rounding
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(options | sizes)))
    model.save_pretrained(folder)
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """Folder of a tiny random Llama: 4 layers, hidden 64, untied head, float32."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny-target") / "model", tiny_tokenizer_dir)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    return json.dumps(value if not isinstance(value, Path) else str(value))


TINY_RUN: dict[str, dict[str, Any]] = {
    "target": {"dtype": "float32", "gpus": "cpu", "replicas": 1, "capture_layer_ids": [0, 1, 2]},
    "corpus": {"bucket_edges": [128, 256, 384, 512], "max_length": 511, "tokens_per_batch": 1024, "heldout_fraction": 0.1},
    "store": {"codec": "lossless"},
    "drafter": {"layers": 1, "block_size": 4},
    "train": {
        "gpus": "cpu",
        "ranks": 1,
        "dtype": "float32",
        "epochs": 1,
        "anchors": 8,
        "tokens_per_batch": 1024,
        "slots_per_batch": 256,
        "micro_batches_per_step": 2,
        "log_every": 1,
        "evaluate_every": 1000,
    },
    "evaluate": {"max_prompts": 2, "max_new_tokens": 16, "heldout_rows": 4},
    "export": {},
}


def write_run_file(folder: Path, *, model: Path, files: list[Path], **overrides: dict[str, Any]) -> Path:
    """Write FOLDER/run.toml for a tiny target; ``overrides`` holds sections, for example ``train={"lr": 1e-3}``."""
    sections = {name: dict(TINY_RUN.get(name, {})) | overrides.get(name, {}) for name in {**TINY_RUN, **overrides}}
    sections["target"]["model"] = model
    sections["corpus"]["files"] = [str(path) for path in files]
    text = 'root = "out"\n' + "".join(
        f"\n[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items()) for name, values in sections.items()
    )
    tomllib.loads(text)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def run_file(tmp_path: Path, tiny_target: Path, conversations: list[dict[str, Any]]) -> Callable[..., Path]:
    """``run_file(rows=24, **sections)`` writes a corpus and a run file into tmp_path and returns its path."""

    def make(rows: int = 24, **overrides: dict[str, Any]) -> Path:
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:rows]), encoding="utf-8")
        return write_run_file(tmp_path, model=tiny_target, files=[corpus], **overrides)

    return make


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    """A folder with run.toml, conversations, prompts and the finished run in dflash-run/, made by ``dflash-offline smoke``.

    The first worker of pytest-xdist that needs it makes it while the others wait; each has a copy of its own, since
    commands that only read keep caches in it. Copy it (``shutil.copytree``) before changing anything in it: keys do not
    depend on the place.
    """
    import shutil

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made = shared / "finished" / "run"
    with (shared / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "run.toml").is_file():
            make_finished_run(made, tiny_target, conversations)
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("finished-run") / "run"))


def make_finished_run(folder: Path, tiny_target: Path, conversations: list[dict[str, Any]]) -> None:
    import shutil
    import subprocess
    import sys

    base = folder.parent
    shutil.rmtree(base, ignore_errors=True)  # of a worker that failed in it
    base.mkdir()
    corpus, prompts = base / "corpus.jsonl", base / "sums.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:30]), encoding="utf-8")
    shutil.copy(REPOSITORY / "data" / "demo-prompts.jsonl", prompts)
    write_run_file(
        base, model=tiny_target, files=[corpus], evaluate={"prompts": ["sums.jsonl"], "max_new_tokens": 8, "heldout_loop_rows": 1}
    )
    command = [sys.executable, "-m", "dflash_offline.cli", "smoke", "--rows", "16", "--steps", "3", "--keep"]
    done = subprocess.run(command, cwd=base, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke run passed in" in done.stdout
    made = base / "out" / "smoke"
    folder.mkdir()
    (made / "run").rename(folder / "dflash-run")
    shutil.move(made / "conversations.jsonl", folder)
    shutil.copy(prompts, folder)
    text = (made / "run.toml").read_text(encoding="utf-8")
    for old, new in (
        (str(made / "run"), "dflash-run"),
        (str(made / "conversations.jsonl"), "conversations.jsonl"),
        (str(prompts), "sums.jsonl"),
    ):
        assert json.dumps(old) in text
        text = text.replace(json.dumps(old), json.dumps(new))
    (folder / "run.toml").write_text(text, encoding="utf-8")


def pytest_configure() -> None:
    """A shell gives its background jobs an ignored Ctrl-C, which would pass on to everything the tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from shutil import which

    if which("nvidia-smi") is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; none on this machine"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread meanwhile: two on shared cores run several times slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

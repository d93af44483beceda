"""Checkpoints: whole or not at all, the newest complete one wins."""

import json
from pathlib import Path

import pytest
import torch

from dflash_offline import checkpoint
from dflash_offline.errors import CheckpointError, StoreFullError


def save(folder: Path, step: int, *, keep: int = 2, key: str = "k") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(1000, generator=generator) for name in ("master", "first_moment", "second_moment")}
    checkpoint.save(folder, key=key, tensors=tensors, state={"step": step, "tokens": 10 * step}, keep=keep)
    return tensors


def test_what_was_saved_is_loaded_to_the_last_bit(tmp_path: Path) -> None:
    tensors = save(tmp_path, 7)
    found, passed_over = checkpoint.newest(tmp_path, key="k")
    assert found is not None and found.step == 7 and found.state["tokens"] == 70 and passed_over == []
    loaded = {name: torch.zeros(1000) for name in tensors}
    found.load_into(loaded, numel=1000)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    shares = {name: torch.full((334,), 7.0) for name in tensors}  # the last of three, filled up by two values
    found.load_into(shares, numel=1000, start=668)
    assert all(torch.equal(shares[name][:332], tensors[name][668:]) and shares[name][332:].eq(7).all() for name in tensors)


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent", key="k") == (None, [])


@pytest.mark.parametrize("damage", ["no manifest", "flipped bit", "cut", "missing file", "edited state", "empty manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_reason(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 500)
    save(tmp_path, 1000)
    folder = tmp_path / "step-001000"
    tensors = folder / "state.safetensors"
    if damage == "no manifest":
        (folder / "manifest.json").unlink()
    elif damage == "flipped bit":
        content = bytearray(tensors.read_bytes())
        content[5000] ^= 1
        tensors.write_bytes(content)
    elif damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif damage == "missing file":
        tensors.unlink()
    elif damage == "edited state":
        (folder / "state.json").write_text(json.dumps({"step": 1000, "tokens": 1}))
    else:
        (folder / "manifest.json").write_text("")
    found, passed_over = checkpoint.newest(tmp_path, key="k")
    assert found is not None and found.step == 500
    assert len(passed_over) == 1 and "step-001000" in passed_over[0]


def test_half_written_and_killed_is_never_read_and_goes_away(tmp_path: Path) -> None:
    save(tmp_path, 500)
    partial = tmp_path / "step-001000.partial"
    partial.mkdir()
    (partial / "state.safetensors").write_bytes(b"half")
    found, passed_over = checkpoint.newest(tmp_path, key="k")
    assert found is not None and found.step == 500 and passed_over == []
    save(tmp_path, 1500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000500", "step-001500"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 1_000_000, 4_000_000):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [1_000_000, 4_000_000]


def test_what_a_resumed_run_will_write_again_is_discarded(tmp_path: Path) -> None:
    save(tmp_path, 500, keep=5)
    save(tmp_path, 1000, keep=5)
    (tmp_path / "step-001000" / "manifest.json").unlink()
    found, _ = checkpoint.newest(tmp_path, key="k")
    assert found is not None
    checkpoint.discard_after(tmp_path, found.step)
    assert checkpoint.steps(tmp_path) == [500]


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 500, key="other")
    with pytest.raises(CheckpointError, match="belongs to key other, this run has k; remove"):
        checkpoint.newest(tmp_path, key="k")


def test_tensors_of_another_drafter_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 500)
    found, _ = checkpoint.newest(tmp_path, key="k")
    assert found is not None
    with pytest.raises(CheckpointError, match="master has 1,000 values, this drafter 999"):
        found.load_into({"master": torch.zeros(999), "first_moment": torch.zeros(1000), "second_moment": torch.zeros(1000)}, numel=999)
    with pytest.raises(CheckpointError, match="another version"):
        found.load_into({"master": torch.zeros(1000)}, numel=1000)


def test_a_full_disk_leaves_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 500)

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(StoreFullError, match="the disk is full; earlier checkpoints are intact"):
        save(tmp_path, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000500"]
    assert checkpoint.newest(tmp_path, key="k")[0].step == 500

"""Stores written by earlier releases are read, to the bit. See ``golden/make_store.py``."""

import hashlib
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from dflash_offline import store
from dflash_offline.codecs import CODECS
from dflash_offline.config import StoreConfig

FOLDER = Path(__file__).parent / "golden"
STORES = sorted(FOLDER.glob("v*.zarr"))


def golden():
    spec = importlib.util.spec_from_file_location("make_store", FOLDER / "make_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_of_each_codec_and_layout():
    assert {path.stem for path in STORES} == {f"v1-{codec}" for codec in CODECS} | {"v2-lossless"}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 400_000


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.stem)
def test_golden_store_is_read_to_the_bit(path):
    assert store.verify(path, values=True) == []
    opened, made = store.HiddenStateStore(path, verify="deep"), golden()
    assert len(opened) == 3 and opened.layer_ids == [4, 9]
    decoded = [opened[i].hidden_states() for i in range(3)]
    digest = hashlib.sha256(b"".join(hidden.view(torch.int16).numpy().tobytes() for hidden in decoded)).hexdigest()
    assert digest == path.with_suffix(".sha256").read_text().strip()
    for i, hidden in enumerate(decoded):
        ids, mask, original = made.row(i)
        assert np.array_equal(opened[i].input_ids, ids) and np.array_equal(opened[i].loss_mask, mask)
        error = (hidden.float() - original.float()).norm() / original.float().norm()
        assert error <= {"bf16": 0, "lossless": 0, "int8": 0.01, "int6": 0.04, "int4": 0.15}[path.stem.split("-")[1]]


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.stem)
def test_golden_store_opens_with_plain_zarr(path):
    group = zarr.open(path, mode="r")["part-00000"]
    names = {"v1-bf16": ["hidden_states"], "v1-lossless": ["high", "low"], "v2-lossless": ["exponents", "sign_mantissa"]}
    names = names.get(path.stem, ["codes", "scales"])
    for name in [*names, "input_ids", "loss_mask"]:
        assert group[name].shape[0] == 74 and group[name][...].any()


def test_a_store_of_an_older_format_goes_on_in_it(tmp_path):
    root, made = tmp_path / "s", golden()
    shutil.copytree(FOLDER / "v1-lossless.zarr", root)
    writer = store.PartWriter(
        root, "part-00001", store_settings=StoreConfig(codec="lossless"), num_taps=2, hidden_size=64, num_tokens=70, num_samples=1
    )
    with writer as part:
        ids, mask, hidden = made.row(1)
        part.append(3, bytes(32), 0, ids, mask, hidden)
        part.commit()
    assert store.verify(root, values=True) == []
    assert zarr.open(root, mode="r")["part-00001"].attrs["format_version"] == 1
    batch = store.HiddenStateStore(root).read_encoded([3, 1])  # of both parts
    assert sorted(batch.arrays) == ["high", "low"]
    assert torch.equal(batch.decode().view(torch.int16), torch.cat([hidden, hidden]).flatten(1).view(torch.int16))

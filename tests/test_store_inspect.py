"""What the store says of itself, and how fast."""

import json
import time

import numpy as np
import pytest
import torch
from small_store import LENGTHS, H, K, folder_in_memory, identity, make_store, rows, settings, write_part

from dflash_offline import store


@pytest.fixture(scope="module")
def made():
    with folder_in_memory() as folder:
        yield folder / "s", make_store(folder / "s", "lossless")


def test_summary_adds_up(made):
    root, everything = made
    found = store.summary(root)
    tokens = sum(len(row.input_ids) for row in everything)
    assert (found["samples"], found["tokens"], found["parts"], found["codec"]) == (20, tokens, 2, "lossless")
    on_disk = sum(
        path.stat().st_size for part in root.glob("part-*") for path in part.rglob("*") if path.is_file() and path.name != "manifest.json"
    )
    assert (
        found["bytes"]
        == on_disk
        == sum(array["bytes"] for array in found["arrays"]) + 2 * (root / "part-00000" / "zarr.json").stat().st_size
    )
    assert found["bf16_bytes"] == tokens * K * H * 2 and found["ratio"] == found["bytes"] / found["bf16_bytes"]
    assert found["tokens_per_sample"] == {"min": 1, "mean": tokens / 20, "max": 300}
    assert sum(bucket["tokens"] for bucket in found["buckets"].values()) == tokens and set(found["buckets"]) == {0, 1, 2, 3}
    rms = torch.cat([row.hidden for row in everything]).float().square().mean(-1).sqrt()
    for name, value in (("min", rms.amin(0)), ("mean", rms.mean(0)), ("max", rms.amax(0))):
        np.testing.assert_allclose(found["rms"][name], value.numpy(), rtol=1e-4)
    assert found["identity"]["codec"] == "lossless" and found["unfinished"] == [] and found["notes"] == []
    json.dumps(found)


def test_sample_table(made):
    root, everything = made
    table = store.samples(root, limit=None)
    assert [row["sha256"] for row in table] == [row.sha256.hex() for row in everything]
    assert table[7] | {"sha256": ""} == {
        "number": 7, "part": "part-00000", "index": 7, "sample_id": 107, "sha256": "", "bucket": 3, "tokens": 300, "supervised": 200,
    }  # fmt: skip
    assert [row["number"] for row in store.samples(root, bucket=1, min_tokens=100, max_tokens=250)] == [1, 11]
    assert [row["number"] for row in store.samples(root, part="part-00001", start=2, limit=3)] == [12, 13, 14]
    json.dumps(table)


def test_details_of_one_sample(made):
    root, everything = made
    found = store.details(root, 7, layers=[2], tokens=slice(10, 20), values=4)
    hidden = everything[7].hidden[10:20, 2].float()
    assert found["input_ids"] == everything[7].input_ids.tolist() and found["loss_mask"] == everything[7].loss_mask.tolist()
    (layer,) = found["layers"]
    assert layer["layer_id"] == 3 and layer["values"] == hidden[0, :4].tolist()
    np.testing.assert_allclose(layer["rms"]["mean"], hidden.square().mean(-1).sqrt().mean().item(), rtol=1e-5)
    json.dumps(found)


def test_stats_find_outlier_channels_and_similar_layers(made):
    found = store.stats(made[0], num_samples=20)
    assert found["tokens"] == 2 * sum(LENGTHS) and found["not_finite"] == 0 and len(found["layers"]) == K
    for i, layer in enumerate(found["layers"]):
        assert layer["outlier_channels"][0]["channel"] == 3 and layer["outlier_channels"][0]["share_of_energy"] > 0.5
        assert found["similarity"][i][i] == pytest.approx(1, abs=1e-3)
    json.dumps(found)


def test_diff(made):
    root, everything = made
    with folder_in_memory() as folder:
        store.create_or_open(folder / "t", identity("int8", target_weights="other"))
        samples = [*everything[:10], *rows([9, 4], seed=7)]
        write_part(folder / "t", "part-00000", samples, "int8")
        found = store.diff(root, folder / "t", num_samples=20)
        assert found["identity"] == {"codec": ["lossless", "int8"], "target_weights": ["abc", "other"]}
        assert (found["common"], found["num_only_in"], found["compared"], found["equal"]) == (10, [10, 2], 10, 0)
        assert found["only_in_second"] == sorted(row.sha256.hex() for row in samples[10:])
        assert all(0 < error < 0.02 for error in found["relative_l2"])
        json.dumps(found)
    same = store.diff(root, root, num_samples=20)
    assert same["identity"] == {} and same["equal"] == same["compared"] == 20 and same["relative_l2"] == [0.0] * K


def test_a_change_of_version_is_said_once(monkeypatch):
    from dflash_offline import manifest

    with folder_in_memory() as folder:
        store.create_or_open(folder, identity())
        for i, version in enumerate(["1.0", "1.0", "1.1", "1.1"]):
            monkeypatch.setattr(manifest, "environment", lambda version=version: {"torch": version, "git": str(time.time())})
            write_part(folder, f"part-{i:05d}", rows([3], seed=i))
        assert store.environment_notes(folder) == ["torch changed from 1.0 to 1.1 at part-00002"]
        assert store.verify(folder) == [] and len(store.HiddenStateStore(folder)) == 4


def test_an_empty_store_has_a_summary(tmp_path):
    store.create_or_open(tmp_path, identity())
    assert store.summary(tmp_path)["samples"] == 0 and store.samples(tmp_path) == [] and store.verify(tmp_path) == []


@pytest.mark.long
def test_a_hundred_thousand_samples_answer_in_two_seconds():
    with folder_in_memory() as folder:
        store.create_or_open(folder, identity("bf16", layer_ids=[1]))
        hidden = torch.ones(2, 1, 8, dtype=torch.bfloat16)
        for number in range(50):
            part = store.PartWriter(
                folder, f"part-{number:05d}", store_settings=settings("bf16"), num_taps=1, hidden_size=8, num_tokens=4000, num_samples=2000
            )
            with part:
                for i in range(2000):
                    part.append(i, (number * 2000 + i).to_bytes(32, "little"), 0, [1, 2], [0, 1], hidden)
                part.commit()
        for answer in (
            store.summary,
            store.samples,
            store.stats,
            lambda path: store.details(path, 99_999),
            lambda path: store.diff(path, path),
        ):
            begun = time.perf_counter()
            answer(folder)
            assert time.perf_counter() - begun < 2, answer

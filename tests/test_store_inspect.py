"""What the store says of itself, and how fast."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small_store import LENGTHS, H, K, folder_in_memory, identity, make_store, rows, settings, write_part

from dflash_offline import store
from dflash_offline.cli import main
from dflash_offline.errors import StoreError


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
    assert np.array_equal(store.HiddenStateStore(root)[7].hidden_states_numpy([2], slice(10, 20))[:, 0], hidden.numpy())
    assert layer["layer_id"] == 3 and layer["values"] == hidden[0, :4].tolist()
    np.testing.assert_allclose(layer["rms"]["mean"], hidden.square().mean(-1).sqrt().mean().item(), rtol=1e-5)
    json.dumps(found)


def test_stats_find_outlier_channels_and_similar_layers(made):
    found = store.stats(made[0], num_samples=20)
    assert found["tokens"] == 2 * sum(min(length, 256) for length in LENGTHS) and found["not_finite"] == 0 and len(found["layers"]) == K
    for i, layer in enumerate(found["layers"]):
        assert layer["outlier_channels"][0]["channel"] == 3 and layer["outlier_channels"][0]["share_of_energy"] > 0.5
        assert found["similarity"][i][i] == pytest.approx(1, abs=1e-3)
    json.dumps(found)


def test_stats_and_samples_tell_the_same_mean():
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity())
        write_part(folder / "s", "part-00000", rows([5, 200, 63]))
        opened = store.HiddenStateStore(folder / "s")
        rms = torch.cat([opened[number].hidden_states().float() for number in range(3)]).square().mean(-1).sqrt()  # [T, K]
        found = [layer["rms"]["mean"] for layer in store.stats(folder / "s")["layers"]]
        assert found == pytest.approx(rms.mean(0).tolist(), rel=1e-5) != rms.square().mean(0).sqrt().tolist()


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


def test_diff_names_the_layers(made):
    root, everything = made
    with folder_in_memory() as folder:
        for name, codec in (("a", "lossless"), ("b", "int8")):
            store.create_or_open(folder / name, identity(codec, layer_ids=[4, 8], store_last_hidden=True))
            write_part(folder / name, "part-00000", everything[:10], codec)
        found = store.diff(folder / "a", folder / "b")
        assert found["layer_ids"] == [4, 8, "last"] and len(found["relative_l2"]) == K
        said = CliRunner().invoke(main, ["diff", str(folder / "a"), str(folder / "b")]).stdout
        errors = "layer 4: {:.2g}, layer 8: {:.2g}, last: {:.2g}".format(*found["relative_l2"])
        assert said.endswith(f"10 of 10 shared samples compared, 0 equal; relative L2: {errors}\n")
        other = store.diff(root, folder / "a")  # as many taps, of other layers
        assert (other["common"], other["layer_ids"], other["relative_l2"]) == (10, None, None)


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


class Opened:
    """Counts the files below a folder that this process opens, and the bytes of hidden states it reads from them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        from dflash_offline.store import shards

        self.shards, self.files, self.bytes = set(), 0, 0
        real, read_small = shards._LocalShard, shards.read_small

        class Counted(real):
            def __init__(shard, path):
                self.shards.add(path)
                super().__init__(path)

            def read_to(shard, places, offset):
                done = super().read_to(places, offset)
                self.bytes += done
                return done

        def counted(folder):
            self.files += 1
            return read_small(folder)

        monkeypatch.setattr(shards, "_LocalShard", Counted)
        for module in ("parts", "reader"):
            monkeypatch.setattr(f"dflash_offline.store.{module}.read_small", counted)

    def by(self, action) -> tuple[int, int, int]:
        """Small arrays read, different shard files opened, bytes read from those, while ``action`` ran."""
        self.shards, self.files, self.bytes = set(), 0, 0
        action()
        return self.files, len(self.shards), self.bytes


@pytest.mark.parametrize("per_part", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_a_store_of_many_samples_is_inspected_without_its_hidden_states(per_part, monkeypatch):
    """50 parts; 100,000 samples with the mark ``long``. What is opened and read does not grow with the samples."""
    parts, tokens, width = 50, 2, 8
    with folder_in_memory() as folder:
        store.create_or_open(folder, identity("bf16", layer_ids=[1]))
        hidden = torch.ones(tokens, 1, width, dtype=torch.bfloat16)
        shape = {"num_taps": 1, "hidden_size": width, "num_tokens": tokens * per_part, "num_samples": per_part}
        for number in range(parts):
            with store.PartWriter(folder, f"part-{number:05d}", store_settings=settings("bf16"), **shape) as part:
                for i in range(per_part):
                    part.append(i, (number * per_part + i).to_bytes(32, "little"), 0, [1, 2], [0, 1], hidden)
                part.commit()
        opened, tables = Opened(monkeypatch), 4 * parts  # offsets, hashes, corpus rows, buckets
        last, chunk, seconds = parts * per_part - 1, 64 * width * 2 + 4, []
        # most small arrays, shard files and chunks of hidden states that each may read
        answers = {
            "summary": (lambda: store.summary(folder), tables, 0, 0),
            "samples": (lambda: store.samples(folder, part="part-00049", min_tokens=2), tables + 2, 0, 0),
            "details": (lambda: store.details(folder, last), tables + 2, 1, 1),
            "stats": (lambda: store.stats(folder, num_samples=16), tables + 2 * 16, 16, 16),
            "verify": (lambda: store.verify(folder, deep=False), 0, 0, 0),
            "diff": (lambda: store.diff(folder, folder, num_samples=16), 2 * tables + 4 * 16, 32, 32),
        }
        for name, (answer, most_tables, most_shards, most_chunks) in answers.items():
            begun = time.perf_counter()
            read_tables, shards, read = opened.by(answer)
            seconds.append(time.perf_counter() - begun)
            index = 16 * -(-tokens * per_part // 64) + 4
            assert read_tables <= most_tables and shards <= most_shards and read <= most_chunks * (chunk + index), name
        if per_part == 2000:
            assert max(seconds) < 2, dict(zip(answers, seconds, strict=True))


def test_stats_and_diff_read_no_more_than_a_window_of_a_sample(monkeypatch):
    with folder_in_memory() as folder:
        store.create_or_open(folder, identity("bf16"))
        write_part(folder, "part-00000", rows([5000, 4000, 6000]), "bf16", shard_bytes=10**8)
        opened = Opened(monkeypatch)
        window = (256 // 64 + 1) * K * (64 * H * 2 + 4)  # five chunks of each tap
        index = -(-15000 // 64) * K * 16 + 4
        found = {}
        *_, read = opened.by(lambda: found.update(store.stats(folder)))
        assert found["tokens"] == 3 * 256 and 0 < read <= 3 * window + index
        *_, read = opened.by(lambda: store.diff(folder, folder))
        assert 0 < read <= 2 * (3 * window + index)


@pytest.mark.parametrize("codec", ["lossless", pytest.param("int4", marks=pytest.mark.long)])
def test_a_look_into_a_store_imports_neither_torch_nor_transformers(codec, tmp_path, tiny_target):
    """Which take seconds each. A process for each command, as on a command line."""
    root, folder = tmp_path / "s", tmp_path / "run"
    everything = make_store(root, codec)
    folder.mkdir()
    (folder / "run.toml").write_text(f'[target]\nmodel = "{tiny_target}"\n[corpus]\nfiles = ["x"]\n')
    commands = {
        "inspect": ["--store", root, "--samples", 3],
        "stats": ["--store", root],
        "verify": ["--store", root],
        "diff": [root, root],
        "show": [7, "--store", root],
    }
    code = (
        "import sys\nfrom dflash_offline.cli import main\nmain(sys.argv[1:], standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'zarr') if name in sys.modules], file=sys.stderr)"
    )
    for name, options in commands.items():
        for form in ([], ["--json"]):
            arguments = [sys.executable, "-c", code, name, *map(str, options), *form]
            done = subprocess.run(arguments, cwd=folder, check=False, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "[]\n"), name
            if form:
                found = json.loads(done.stdout)
    from dflash_offline.target import load_tokenizer

    assert found["text"] == "".join(
        load_tokenizer(tiny_target).decode(everything[7].input_ids[part], skip_special_tokens=False)
        for part in (slice(0, 100), slice(100, 300))  # what is trained on begins after a third
    )


@pytest.mark.parametrize("changed", ["decoder", "ids", "damaged"])
def test_a_tokenizer_that_is_not_plainly_byte_level_is_left_to_transformers(changed, tmp_path, tiny_tokenizer_dir, monkeypatch):
    from dflash_offline.cli.showing import _tokenizer

    content = json.loads((tiny_tokenizer_dir / "tokenizer.json").read_text())
    if changed == "decoder":
        content["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text("{" if changed == "damaged" else json.dumps(content))
    monkeypatch.setattr("dflash_offline.target.load_tokenizer", lambda folder: f"by transformers: {folder}")
    ids = [5, 6, 500 if changed == "ids" else 7]  # 500 tokens: a tokenizer_config.json may add one
    assert _tokenizer(tmp_path, ids) == f"by transformers: {tmp_path}"
    assert _tokenizer(tiny_tokenizer_dir, [3, 4]).decode([3, 4]) == '!"'


def test_every_public_name_is_there_when_asked_for():
    code = "from dflash_offline import store; assert {*store.__all__} <= {*dir(store)}; [getattr(store, name) for name in store.__all__]"
    subprocess.run([sys.executable, "-c", code + "; from dflash_offline.store import *; PartWriter, verify.__call__"], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Partwriter'"):
        _ = store.Partwriter


def test_a_sample_as_a_safetensors_file(made, tmp_path):
    from safetensors import safe_open

    root, everything = made
    found = store.export_sample(root, 12, tmp_path / "one.safetensors", layers=[2, 0])
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == found["metadata"]
        assert found["metadata"]["layer_ids"] == "3,1" and found["metadata"]["sha256"] == everything[12].sha256.hex()
        assert torch.equal(file.get_tensor("hidden_states").view(torch.int16), everything[12].hidden[:, [2, 0]].view(torch.int16))
        assert file.get_tensor("input_ids").tolist() == everything[12].input_ids.tolist()
        assert file.get_tensor("loss_mask").tolist() == everything[12].loss_mask.tolist()
    with pytest.raises(StoreError, match="cannot be written"):
        store.export_sample(root, 0, tmp_path / "no" / "such.safetensors")

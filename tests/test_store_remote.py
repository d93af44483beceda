"""Hidden states in an object store: a real S3 server, real processes that are killed."""

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_run_file
from s3_server import s3_server
from small_store import append, content, folder_in_memory, identity, make_store, rows, same_bits, write_part, writer

from dflash_offline import store
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.errors import ConfigError, StoreDamagedError, StoreError, StoreIdentityError
from dflash_offline.keys import capture_key, store_identity
from dflash_offline.layout import Layout
from dflash_offline.plan import make_plan
from dflash_offline.sharing import refusal, shared
from dflash_offline.store import objects as objects_module
from dflash_offline.store.cache import BlockCache
from dflash_offline.store.objects import MissingObjectError, open_objects

FORKSERVER = multiprocessing.get_context("forkserver")
COUNT = iter(range(1000))


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def bucket(server, monkeypatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.bucket(f"bucket-{next(COUNT)}") + "/some/prefix"


@pytest.fixture
def folder():
    with folder_in_memory() as made:
        yield made


def make_remote(root: Path, url: str, codec: str = "lossless", parts: int = 2) -> list:
    store.create_or_open(root, identity(codec), url=url)
    return make_store_parts(root, codec, range(parts))


def make_store_parts(root: Path, codec: str, numbers) -> list:
    everything = []
    for i in numbers:
        samples = rows(seed=i)
        write_part(root, f"part-{i:05d}", samples, codec)
        everything += samples
    return everything


def shard_files(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob("c/*/0/0") if path.is_file()]


@pytest.mark.parametrize("codec", ["lossless", "int6"])
def test_what_goes_up_is_the_local_store_to_the_byte(codec, bucket, folder):
    store.create_or_open(folder / "here", identity(codec))
    everything = make_store_parts(folder / "here", codec, range(2))
    make_remote(folder / "run" / "there", bucket, codec)
    objects = open_objects(bucket)
    sizes = objects.sizes()
    local = {str(path.relative_to(folder / "here")) for path in (folder / "here").rglob("*") if path.is_file() and path.name != ".lock"}
    assert set(sizes) == local | {"writer.json"}
    for name, raw in content(folder / "here").items():
        if not name.startswith("."):
            assert objects.get(name) == raw, name
    assert shard_files(folder / "here") and not shard_files(folder / "run" / "there")
    opened, plain = store.HiddenStateStore(folder / "run" / "there", verify="deep"), store.HiddenStateStore(folder / "here")
    for i in range(len(everything)):
        assert same_bits(opened[i].hidden_states(), plain[i].hidden_states()) and opened[i].sha256 == everything[i].sha256
        assert same_bits(opened[i].hidden_states([2, 0], slice(1, 70)), plain[i].hidden_states([2, 0], slice(1, 70)))
    order = [7, 0, 13, 5]
    assert same_bits(opened.read_encoded(order, [1]).decode(), plain.read_encoded(order, [1]).decode())
    assert store.verify(folder / "run" / "there", values=True) == []
    assert store.summary(folder / "run" / "there")["url"] == bucket
    opened.close()


def test_plain_zarr_reads_the_url_and_never_fill_values_from_the_local_folder(bucket, folder):
    import zarr
    from obstore.store import from_url

    everything = make_remote(folder / "s", bucket, "bf16", parts=1)
    with contextlib.suppress(KeyError):  # no such array is what it shall say
        raise AssertionError(zarr.open(folder / "s", mode="r")["part-00000/hidden_states"])
    remote = from_url(bucket, client_options={"allow_http": True})
    stored = zarr.open(zarr.storage.ObjectStore(remote, read_only=True), mode="r")["part-00000/hidden_states"][
        : len(everything[0].input_ids)
    ]
    assert np.array_equal(stored.view(np.int16), everything[0].hidden.view(torch.int16).numpy())


def test_the_cache_is_bounded_shared_and_enough_by_itself(bucket, folder, server):
    everything = make_remote(folder / "s", bucket, "bf16", parts=3)
    shutil.rmtree(folder / "cache")
    total = sum(row.hidden.nbytes for row in everything)
    limit = total // 3
    opened = store.HiddenStateStore(folder / "s", cache_bytes=limit)
    cache = opened.remote.cache
    cache.block_bytes = 4096
    for number in np.random.default_rng(0).integers(0, len(opened), 60):
        assert same_bits(opened[int(number)].hidden_states(), everything[number].hidden)
        assert cache.num_bytes <= limit
    assert cache.num_bytes > limit // 2
    whole = store.HiddenStateStore(folder / "s", cache_bytes=2 * total)
    whole.read_encoded(list(range(len(whole))))
    other = store.HiddenStateStore(folder / "s", verify="off", cache_bytes=2 * total)
    other.remote.objects = None  # whoever asks it now fails
    assert same_bits(other[11].hidden_states(), everything[11].hidden)


def test_what_was_used_last_is_kept(tmp_path):
    cache = BlockCache(tmp_path, 1000)
    for block in range(10):
        cache.keep("part/file", block, bytes(100))
        time.sleep(0.002)
    buffer = memoryview(bytearray(100))
    assert cache.read("part/file", 0, [buffer], 0, 100)
    cache.keep("part/file", 10, bytes(100))
    assert cache.num_bytes <= 1000
    assert cache.read("part/file", 0, [buffer], 0, 100) and not cache.read("part/file", 1, [buffer], 0, 100)
    assert not cache.read("part/file", 0, [buffer], 0, 99), "a block of another size is not taken"
    cache.keep("part/file", 11, bytes(1001))
    assert not cache.read("part/file", 11, [buffer], 0, 1001)


def _fill(folder: Path, seed: int) -> None:
    cache, generator = BlockCache(folder, 50_000), np.random.default_rng(seed)
    while True:
        number = int(generator.integers(0, 200))
        cache.keep(f"part-{number % 7}", number, bytes([number]) * 1000)


def test_a_cache_that_cannot_be_written_says_so_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    cache = BlockCache(tmp_path / "file" / "cache", 1 << 20)
    for block in range(2):
        cache.keep("part/c/0", block, b"x" * 100)
        assert not cache.read("part/c/0", block, [memoryview(bytearray(100))], 0, 100)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("warning: ") and "cannot be kept (Not a directory)" in said[0]


def test_processes_that_share_a_cache_may_be_killed(tmp_path):
    children = [FORKSERVER.Process(target=_fill, args=(tmp_path, seed)) for seed in range(3)]
    for child in children:
        child.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "part-0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for child in children:
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    cache = BlockCache(tmp_path, 50_000)
    assert 0 < cache.num_bytes <= 50_000
    found = 0
    for number in range(200):
        buffer = bytearray(1000)
        if cache.read(f"part-{number % 7}", number, [memoryview(buffer)], 0, 1000):
            found += 1
            assert bytes(buffer) == bytes([number]) * 1000
    assert found
    for number in range(100):
        cache.keep("part-9", number, bytes(1000))
    assert 40_000 < cache.num_bytes <= 50_000


def test_a_damaged_block_is_fetched_again(bucket, folder):
    everything = make_remote(folder / "s", bucket, parts=1)
    blocks = [path for path in (folder / "cache").rglob("*") if path.is_file() and path.name.isdigit()]
    assert blocks, "what was just written is kept while there is room"
    for path in blocks:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        raw[3] ^= 1
        path.write_bytes(raw)
    opened = store.HiddenStateStore(folder / "s")
    for i, row in enumerate(everything):
        assert same_bits(opened[i].hidden_states(), row.hidden)


def test_a_missing_or_changed_object_is_named(bucket, folder):
    make_remote(folder / "s", bucket)
    objects, name = open_objects(bucket), "part-00001/sign_mantissa/c/0/0/0"
    raw = objects.get(name)
    opened = store.HiddenStateStore(folder / "s")
    objects.delete([name])
    shutil.rmtree(folder / "cache")
    with pytest.raises(StoreDamagedError, match=f"{bucket}/{name}: the object is missing"):
        opened[10].hidden_states()
    with pytest.raises(StoreDamagedError, match="part-00001.*sign_mantissa/c/0/0/0: the object is missing from s3://"):
        store.HiddenStateStore(folder / "s")
    (problem,) = store.verify(folder / "s", deep=False)
    assert (problem.part, problem.file, problem.samples) == ("part-00001", "sign_mantissa/c/0/0/0", (0, 1))
    objects.put(name, raw[:-1])
    assert "bytes, manifest says" in str(*store.verify(folder / "s", deep=False))
    objects.put(name, raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
    assert store.verify(folder / "s", deep=False) == []
    assert "content differs from its checksum" in str(*store.verify(folder / "s"))
    with pytest.raises(StoreDamagedError, match="sign_mantissa/c/0/0/0: the object's content differs"):
        store.HiddenStateStore(folder / "s", verify="deep")[10].hidden_states()
    with pytest.raises(StoreDamagedError, match=f"{name}: the chunk of tap 0"):
        store.HiddenStateStore(folder / "s", verify="off")[10].hidden_states()
    objects.put(name, raw)
    objects.put("part-00001/sign_mantissa/c/99/0/0", b"x")
    assert "not in the manifest" in str(*store.verify(folder / "s", deep=False))
    objects.delete(["part-00001/sign_mantissa/c/99/0/0"])
    objects.put("index.json", b"{}")
    assert "index.json" in str(*store.verify(folder / "s"))
    assert store.rebuild_index(folder / "s") == ["part-00000", "part-00001"] and store.verify(folder / "s") == []


def test_another_root_takes_over_what_is_there(bucket, folder):
    everything = make_remote(folder / "one" / "s", bucket, "int8")
    with pytest.raises(StoreError, match=r"is written from .*one/s on .*two roots must not write.*delete the object writer\.json"):
        store.create_or_open(folder / "two" / "s", identity("int8"), url=bucket)
    shutil.rmtree(folder / "one")
    open_objects(bucket).delete(["writer.json"])
    with pytest.raises(StoreIdentityError, match="dtype"):
        store.create_or_open(folder / "three" / "s", identity("int8", dtype="float32"), url=bucket)
    open_objects(bucket).delete(["writer.json"])
    store.create_or_open(folder / "two" / "s", identity("int8"), url=bucket)
    assert store.committed_hashes(folder / "two" / "s").keys() == {row.sha256 for row in everything}
    everything += make_store_parts(folder / "two" / "s", "int8", [2])
    assert store.verify(folder / "two" / "s") == [] and len(store.HiddenStateStore(folder / "two" / "s")) == len(everything)


def test_the_url_of_a_store_does_not_change(bucket, folder):
    make_remote(folder / "s", bucket, parts=1)
    with pytest.raises(StoreError, match="is kept at s3://"):
        store.create_or_open(folder / "s", identity())
    with pytest.raises(StoreError, match="the run file says s3://other"):
        store.create_or_open(folder / "s", identity(), url="s3://other/x")
    make_store(folder / "local", parts=1)
    with pytest.raises(StoreError, match="was begun in the local folder"):
        store.create_or_open(folder / "local", identity(), url=bucket)
    (folder / "s" / "remote.json").write_text((folder / "s" / "remote.json").read_text().replace("bucket", "basket"))
    with pytest.raises(StoreDamagedError, match=r"remote\.json: its digest"):
        store.HiddenStateStore(folder / "s")
    assert "remote.json" in "".join(map(str, store.verify(folder / "s")))


def test_errors_are_one_line(bucket, folder, monkeypatch):
    def failure(url: str) -> str:
        with pytest.raises(StoreError) as caught:
            store.create_or_open(folder / url.replace("/", "-"), identity(), url=url)
        assert "\n" not in str(caught.value) and "test-secret-key" not in str(caught.value)
        return str(caught.value)

    assert failure("s3://no-such-bucket/x") == "s3://no-such-bucket/x: there is no such bucket; create it, or mend [store] url"
    assert "pip install" in failure("sftp://host/x") or "cannot be used" in failure("sftp://host/x")
    assert "Protocol not known" in failure("nosuchscheme://x/y")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "obstore", None)
        assert failure(bucket).endswith("needs obstore, which is not installed; `pip install 'dflash_offline[objectstore]'`")
    monkeypatch.setattr("dflash_offline.store.objects._RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "check [store] url, credentials and endpoint" in failure(bucket)


@pytest.mark.parametrize("endpoint", ["nonsense", "http://user:hunter2@127.0.0.1:9", "http://", "http://h o", "ftp://host"])
def test_endpoints_that_are_refused(endpoint, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StoreError, match=r"endpoint in this environment must be http://HOST") as caught:
        open_objects(bucket)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["no such bucket", "of another root"])
def test_a_url_that_could_not_be_used_is_mended_in_the_run_file(wrong, bucket, folder):
    other = "s3://no-such-bucket/x" if wrong == "no such bucket" else bucket + "/taken"
    if wrong == "of another root":
        make_remote(folder / "first" / "s", other, parts=1)
    for root in (folder / "a" / "s", folder / "b" / "s"):
        with pytest.raises(StoreError, match=wrong if wrong == "no such bucket" else "two roots must not"):
            store.create_or_open(root, identity(), url=other)
    everything = make_remote(folder / "a" / "s", bucket + "/free", parts=1)
    store.create_or_open(folder / "b" / "s", identity())
    make_store_parts(folder / "b" / "s", "lossless", [0])
    assert store.summary(folder / "a" / "s")["url"] == bucket + "/free" and store.summary(folder / "b" / "s")["url"] is None
    assert all(len(store.HiddenStateStore(folder / name / "s")) == len(everything) for name in "ab")


@pytest.mark.parametrize("url", ["s3://key:password@bucket/x", "https://user@host/x", "az://box/x?sig=password", "bucket/x", "s3:/x"])
def test_urls_that_are_refused(url, run_file):
    with pytest.raises(ConfigError, match=r"\[store\].*url") as caught:
        RunConfig.load(run_file(4, store={"url": url}))
    assert "password" not in str(caught.value)


def test_a_store_is_opened_by_its_url(bucket, folder, monkeypatch):
    from click.testing import CliRunner

    from dflash_offline.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "user"))
    everything = make_remote(folder / "s", bucket, "int8")
    opened = store.HiddenStateStore(bucket)
    assert same_bits(opened[12].hidden_states(), store.HiddenStateStore(folder / "s")[12].hidden_states()) and opened.path != folder / "s"
    everything += make_store_parts(folder / "s", "int8", [2])
    assert len(store.HiddenStateStore(bucket)) == len(everything), "a part that came since"
    shutil.rmtree(folder / "s" / "part-00001")
    with writer(folder / "s", "part-00001", samples := rows([20, 30], seed=9), "int8") as part:
        for row in samples:
            append(part, row)
        part.commit()
    again = store.HiddenStateStore(bucket)
    assert again[10].sha256 == samples[0].sha256 and len(again) == 22, "one that was made anew"
    assert store.verify(folder / "s") == []
    found = CliRunner().invoke(main, ["inspect", "--json", "--store", bucket])
    assert found.exit_code == 0 and json.loads(found.stdout)["samples"] == 22 and json.loads(found.stdout)["url"] == bucket
    found = CliRunner().invoke(main, ["verify", "--store", bucket + "/nothing"])
    assert found.exit_code == 1 and "no hidden-state store here" in found.stderr


@pytest.mark.parametrize("scheme", ["s3", "local"])  # obstore; fsspec
def test_what_a_run_shares_with_others_is_said(scheme, bucket, run_file, folder):
    from click.testing import CliRunner

    from dflash_offline.cli import main

    url = bucket if scheme == "s3" else f"local://{folder}/there"
    config = RunConfig.load(run_file(4, store={"url": url}))
    assert shared(config) == []
    key, identity_here = capture_key(config), store_identity(config)
    root = Layout(config.root_dir).store(key)
    store.create_or_open(root, identity_here, url=config.store.location(key))
    assert shared(config) == [] and refusal(config) is None, "its own store"
    other = RunConfig.load(run_file(4, store={"url": url, "codec": "bf16"}))
    (line,) = shared(other)
    assert line.startswith(f"{config.root_dir} also holds 1 store with another key") and f"{key} (codec); that is fine" in line
    root.parent.rename(config.root_dir.parent / "lost")
    (line,) = shared(other)
    assert line == f"{url} also holds 1 store of other roots, with other keys: that is fine, each has a folder of its own"
    assert refusal(other) is None and shared(config) == []
    refused = CliRunner().invoke(main, ["plan", "--config", str(run_file(4, store={"url": url}))])
    assert refused.exit_code == 1 and "conversations" in refused.stdout
    assert refused.stderr.startswith(f"error: {config.store.location(key)} is written from {root} on ")
    assert refused.stderr.strip() == f"error: {refusal(config)}"
    with pytest.raises(StoreError, match="two roots must not write"):
        store.create_or_open(root, identity_here, url=config.store.location(key))


@pytest.mark.parametrize("scheme", ["file", "local"])  # obstore; fsspec
def test_plan_only_looks(scheme, run_file, folder):
    config = RunConfig.load(run_file(4, store={"url": f"{scheme}://{folder}/not/yet"}))
    assert shared(config) == [] and list(folder.iterdir()) == []
    objects = open_objects(config.store.url)
    assert objects.sizes() == {} and objects.folders() == [] and objects.sizes("part-00000") == {}
    objects.delete(["nothing"])
    with pytest.raises(MissingObjectError, match=f"{folder}/not/yet/nothing: the object is missing"):
        objects.ranges("nothing", [(0, 1)])
    assert list(folder.iterdir()) == []
    assert objects.put("a b%20/ü~", b"it", create=True) and not objects.put("a b%20/ü~", b"other", create=True)
    assert objects.get("a b%20/ü~") == b"it" and objects.sizes() == {"a b%20/ü~": 2} and objects.folders() == ["a b%20"]


def test_a_url_of_a_folder_has_no_host():
    with pytest.raises(StoreError, match="^file://data/x: a folder's URL has three slashes"):
        open_objects("file://data/x")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://127.0.0.1:{port}/x", "the object store cannot be used ([Errno 111] Connection refused); check [store] url"),
        ("zip://x", "the object store cannot be used ("),
        ("http://127.0.0.1/x", "needs aiohttp, which is not installed (HTTPFileSystem requires "),
    ],
)
def test_plan_goes_on_without_a_store_that_cannot_be_opened(url, reason, run_file, monkeypatch):
    """fsspec connects to some kinds, and looks for the packages of all, as soon as the URL is opened."""
    from click.testing import CliRunner

    from dflash_offline.cli import main

    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "http", raising=False)
    with socket.socket() as bound:  # nothing listens there
        bound.bind(("127.0.0.1", 0))
        url = url.format(port=bound.getsockname()[1])
        found = CliRunner().invoke(main, ["plan", "--config", str(run_file(4, store={"url": url}))])
    assert found.exit_code == 0, found.output
    said = " ".join(found.stdout.split())
    assert f"note: what else is below [store] url cannot be told: {url}" in said and reason in said, said
    if url.startswith("http"):
        assert "`pip install 'fsspec[http]'`" in said


@pytest.mark.parametrize("attributes", [[1], {"identity": None}])
def test_a_store_beside_it_that_cannot_be_read_is_left_out(attributes, run_file):
    from click.testing import CliRunner

    from dflash_offline.cli import main

    path = run_file(4)
    for key, codec in (("a" * 16, "bf16"), ("b" * 16, "int8")):
        store.create_or_open(Layout(RunConfig.load(path).root_dir).store(key), identity(codec))
    group = Layout(RunConfig.load(path).root_dir).store("b" * 16) / "zarr.json"
    raw = json.loads(group.read_text())
    raw["attributes"] = raw["attributes"] | attributes if isinstance(attributes, dict) else attributes
    group.write_text(json.dumps(raw))
    found = CliRunner().invoke(main, ["plan", "--config", str(path)])
    assert found.exit_code == 0, found.output
    said = " ".join(found.stdout.split())
    assert "also holds 1 store with another key, in brackets what differs: aaaaaaaaaaaaaaaa (" in said
    assert f"cannot be read and is left out here: {group}: not valid (attribute" in said


def test_fields_that_only_one_of_two_stores_has_are_named(run_file):
    config = RunConfig.load(run_file(4))
    mine = store_identity(config)
    others = {"a": mine | {"of_later": None}, "b": {name: mine[name] for name in mine if name != "zstd"}, "c": mine}
    for letter, other in others.items():
        store.create_or_open(Layout(config.root_dir).store(letter * 16), other)
    (line,) = shared(config)
    assert f": {'a' * 16} (of_later), {'b' * 16} (zstd), {'c' * 16} (nothing); that is fine" in line


def test_plan_says_what_is_shared_and_that_a_bucket_is_missing(bucket, run_file):
    from click.testing import CliRunner

    from dflash_offline.cli import main

    found = CliRunner().invoke(main, ["plan", "--config", str(run_file(4, store={"url": "s3://no-such-bucket/x"}))])
    assert found.exit_code == 0 and "note: what else is below [store] url cannot be told: s3://no-such-bucket/x" in found.stdout


def test_a_store_in_a_folder_is_read_in_place(folder, monkeypatch):
    from click.testing import CliRunner

    from dflash_offline.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "user"))
    url = f"file://{folder}/re mote"
    everything = make_remote(folder / "run" / "s", f"file://{folder}/re%20mote", "int8")
    opened = store.HiddenStateStore(url)
    local = store.HiddenStateStore(folder / "run" / "s")
    assert opened.path == folder / "re mote" and len(opened) == len(everything)
    assert same_bits(opened[12].hidden_states(), local[12].hidden_states()) and store.verify(opened.path) == []
    for command in ("inspect", "verify"):
        found = CliRunner().invoke(main, [command, "--json", "--store", url])
        assert found.exit_code == 0, found.output
    found = CliRunner().invoke(main, ["inspect", "--store", url + "/nothing"])
    assert found.exit_code == 1 and "no hidden-state store here" in found.stderr
    assert not (folder / "user").exists() and not (folder / "re mote" / "nothing").exists()


def test_doctor_tries_the_object_store(bucket, run_file, tmp_path):
    from dflash_offline.doctor.storage import object_store

    (check,) = object_store(RunConfig.load(run_file(4, store={"url": bucket})))
    assert check.level == "ok" and "MB/s" in check.found and open_objects(bucket).sizes() == {}
    (check,) = object_store(RunConfig.load(run_file(4, store={"url": "s3://no-such-bucket/x"})))
    assert check.level == "fail" and "there is no such bucket" in check.found and check.advice
    assert list(object_store(RunConfig.load(run_file(4)))) == []
    (tmp_path / "file").touch()
    kept, _ = object_store(RunConfig.load(run_file(4, store={"url": bucket, "cache_folder": str(tmp_path / "file" / "cache")})))
    assert kept.level == "warn" and "file/cache cannot be written: every epoch would fetch" in kept.found
    (check,) = object_store(RunConfig.load(run_file(4, store={"url": bucket, "cache_folder": str(tmp_path / "cache")})))
    assert check.level == "ok" and not (tmp_path / "cache").exists()


def test_pruning_a_store_deletes_its_objects_and_no_others(bucket, folder):
    from dflash_offline import tidy

    root = folder / "captures" / "0123456789abcdef" / "hidden_states.zarr"
    make_remote(root, bucket, "int8")
    objects = open_objects(bucket)
    stored = sum(entry["bytes"] for entry in json.loads(objects.get("index.json"))["parts"].values())
    objects.put("part-00000/notes.txt", b"foreign")
    assert tidy._size(root.parent) > stored > 0
    assert tidy.Removal("store", [root.parent], 0).urls == [bucket]
    tidy.remove([tidy.Removal("store", [root.parent], 0)])
    assert list(objects.sizes()) == ["part-00000/notes.txt"] and not root.parent.exists()


def test_what_goes_from_the_bucket_is_named_before_the_question(bucket, run_file):
    from click.testing import CliRunner

    from dflash_offline.cli import main

    config = RunConfig.load(path := run_file(4, store={"url": bucket}))
    key = capture_key(config)
    store.create_or_open(Layout(config.root_dir).store(key), store_identity(config), url=config.store.location(key))
    named = f"the objects of this store below {config.store.location(key)}"
    asked = CliRunner().invoke(main, ["reset", "capture", "--config", str(path)], input="n\n")
    assert f"remove {named}\nRemove these (" in asked.output and asked.exit_code == 1
    path = run_file(4, store={"url": bucket, "codec": "bf16"})
    asked = CliRunner().invoke(main, ["prune", "--config", str(path)], input="n\n")
    assert f"with them go {named}\nDelete 1 of these" in asked.output and asked.exit_code == 1


def test_pruning_leaves_what_another_root_wrote(bucket, folder):
    from dflash_offline import tidy

    make_remote(folder / "one" / "s", bucket, parts=1)
    with pytest.raises(StoreError, match="two roots must not"):
        store.create_or_open(folder / "two" / "s", identity(), url=bucket)
    assert tidy._size(folder / "two" / "s") < 1000
    shutil.copytree(folder / "one", folder / "old")
    objects = open_objects(bucket)
    objects.delete(["writer.json"])
    shutil.rmtree(folder / "one")
    store.create_or_open(folder / "three" / "s", identity(), url=bucket)  # took over what the first one wrote
    for name in ("two", "old"):
        tidy.remove([tidy.Removal("store", [folder / name / "s"], 0)])
        assert not (folder / name / "s").exists()
    assert store.verify(folder / "three" / "s") == [] and len(objects.sizes()) > 10


@pytest.mark.parametrize("scheme", ["file", "local"])  # obstore; fsspec
def test_other_urls(scheme, folder):
    url = f"{scheme}://{folder}/remote"
    everything = make_remote(folder / "run" / "s", url)
    opened = store.HiddenStateStore(folder / "run" / "s")
    shutil.rmtree(folder / "run" / "cache")
    assert all(same_bits(opened[i].hidden_states(), row.hidden) for i, row in enumerate(everything))
    assert store.verify(folder / "run" / "s") == []
    objects = open_objects(url)
    objects.put("part-00000/mine.txt", b"foreign")
    opened.remote.delete()
    assert list(objects.sizes()) == ["part-00000/mine.txt"]
    with pytest.raises(MissingObjectError, match="the object is missing"):
        objects.get("index.json")


@pytest.mark.parametrize("scheme", ["s3", "file", "local"])
def test_a_file_here_that_cannot_be_put_is_named(scheme, bucket, folder):
    objects = open_objects(bucket if scheme == "s3" else f"{scheme}://{folder}/there")
    for create in (False, True):
        with pytest.raises(StoreError, match=rf"^{folder}/gone: cannot be read \(No such file .*\), so {objects.url}/a/b is not written"):
            objects.put("a/b", folder / "gone", create=create)
    (folder / "here").write_bytes(b"it")
    assert objects.put("a/b", folder / "here") and objects.sizes() == {"a/b": 2}


def test_that_an_object_is_missing_is_an_answer(server, bucket, monkeypatch):
    """A store that has said so is asked again through an outage, as one that gave something."""
    for name, value in {"_RETRIES": 0, "FIRST_PAUSE_S": 0.1, "PATIENCE_S": 0.3}.items():
        monkeypatch.setattr(objects_module, name, value)
    objects = open_objects(bucket)
    with pytest.raises(MissingObjectError):
        objects.get("writer.json")
    server.toggle()
    try:
        with pytest.raises(StoreError, match=r"it has not answered for \d+ s: run the same command"):
            objects.get("writer.json")
    finally:
        server.toggle()


def test_a_short_outage_is_waited_for(server, bucket, folder, monkeypatch, capsys):
    """The server goes away while samples are read, and comes again; then it stays away."""
    monkeypatch.setattr(objects_module, "FIRST_PAUSE_S", 0.2)
    everything = make_remote(folder / "s", bucket, "bf16", parts=1)
    opened = store.HiddenStateStore(folder / "s", cache_bytes=1)  # nothing is kept: every read asks the server
    shutil.rmtree(folder / "cache")
    assert same_bits(opened[0].hidden_states(), everything[0].hidden)
    server.toggle()
    try:
        capsys.readouterr()
        with ThreadPoolExecutor(2) as pool:
            reads = {i: pool.submit(opened[i].hidden_states) for i in (3, 5)}
            time.sleep(2.5)
            assert not any(read.done() for read in reads.values())
            server.toggle()
            assert all(same_bits(read.result(60), everything[i].hidden) for i, read in reads.items())
            server.toggle()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 and lines[0].startswith(f"{bucket}/part-00000/"), lines
        assert "error sending request" in lines[0] and lines[0].endswith("asked again for 120 s")
        assert lines[1].startswith(f"{bucket}: the object store answers again, after ")
        monkeypatch.setattr(objects_module, "PATIENCE_S", 1.0)
        with pytest.raises(StoreError, match=r"^s3://.*cannot be used .*it has not answered for \d+ s: run the same command"):
            opened[1].hidden_states()
        begun = time.monotonic()
        with pytest.raises(StoreError, match="cannot be used") as caught:  # a store that never answered is not waited for
            open_objects(bucket).get("index.json")
        assert "has not answered" not in str(caught.value) and "\n" not in str(caught.value) and time.monotonic() - begun < 30
    finally:
        server.toggle()
    assert same_bits(opened[1].hidden_states(), everything[1].hidden)


def _write(root: Path, environment: dict[str, str], begun) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    parts = [rows(seed=i) for i in range(3)]
    begun.set()
    for i, samples in enumerate(parts):
        with writer(root, f"part-{i:05d}", samples) as part:
            for row in samples[part.resume_sample :]:
                append(part, row)
            part.commit({"replica": 0})


def _run_writer(root: Path, environment: dict[str, str], kill_after: float | None) -> tuple[bool, float]:
    """Whether it came to its end, and the seconds it wrote."""
    begun = FORKSERVER.Event()
    child = FORKSERVER.Process(target=_write, args=(root, environment, begun))
    child.start()
    assert begun.wait(120)
    start = time.monotonic()
    child.join(120 if kill_after is None else kill_after)
    seconds = time.monotonic() - start
    if child.exitcode is None:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == 0, seconds


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_a_killed_writer_loses_nothing(kills, bucket, folder, server):
    FORKSERVER.set_forkserver_preload(["torch", "dflash_offline.store", "obstore"])
    make_store(folder / "here", parts=3)
    store.create_or_open(folder / "undisturbed", identity(), url=f"{bucket}/undisturbed")
    ended, seconds = _run_writer(folder / "undisturbed", server.environment, None)
    generator, found, kill = np.random.default_rng(kills), set(), 0
    while kill < kills:
        root, url = folder / f"run-{kill}" / "s", f"{bucket}/{kill}"
        objects = open_objects(url)
        store.create_or_open(root, identity(), url=url)
        ended, took = _run_writer(root, server.environment, float(generator.random()) * seconds)
        kill += 1
        if ended:
            seconds = min(seconds, took)
        else:
            committed = store.committed_parts(root)
            found.add((len(committed), len(objects.sizes())))
            for part in committed:  # what counts as committed is whole in the object store
                assert objects.get(f"{part}/manifest.json") == (root / part / "manifest.json").read_bytes()
            ended, _ = _run_writer(root, server.environment, None)
        assert ended and store.verify(root, values=True) == [] and not shard_files(root)
        for name, raw in content(folder / "here").items():
            if not name.startswith("."):
                assert objects.get(name) == raw, name
    assert len(found) > kills // 5, f"the kills came at the same places: {found}"


def _cli(folder: Path, *arguments: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and everything said by ``python -m ARGUMENTS``."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, timeout=300, check=False, **streams)
    return done.returncode, done.stdout


def test_capture_and_training_through_s3(tmp_path, server, bucket, tiny_target, conversations):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:12]), encoding="utf-8")
    sections = {"train": {"epochs": 1, "max_steps": 2}, "store": {"codec": "int8", "url": bucket, "cache_bytes": 100_000_000}}
    path = write_run_file(tmp_path, model=tiny_target, files=[corpus], **sections)

    command = ["luigi", "--module", "pipelines", "TrainDrafter", "--log-level", "WARNING"]
    status, said = _cli(tmp_path, *command, environment=server.environment)
    assert status == 0, said
    (root,) = (tmp_path / "out").glob("captures/*/hidden_states.zarr")
    objects = open_objects(f"{bucket}/{root.parent.name}/hidden_states.zarr")
    assert not shard_files(root) and len(objects.sizes()) > 20
    secret = server.environment["AWS_SECRET_ACCESS_KEY"]
    assert secret not in said and not any(p.is_file() and secret.encode() in p.read_bytes() for p in (tmp_path / "out").rglob("*"))
    (metrics,) = (tmp_path / "out").glob("drafters/*/metrics.jsonl")
    assert sum('"lr"' in line for line in metrics.read_text().splitlines()) == 2
    assert store.verify(root, values=True) == []
    there = store.HiddenStateStore(root)
    expected = {there[i].sha256: there[i].hidden_states() for i in range(len(there))}
    # the captures are lost: planning takes over what is in the object store, and leaves nothing to capture
    shutil.rmtree(tmp_path / "out" / "captures")
    objects.delete(["writer.json"])
    (prepared,) = (tmp_path / "out").glob("corpora/*/manifest.json")
    corpus = Corpus.open(prepared.parent)
    plan = make_plan(RunConfig.load(path), corpus, root, root.parent / "plans" / "plan.json")
    assert plan.parts == [] and plan.reused == store.committed_parts(root) != []
    there = store.HiddenStateStore(root, verify="deep")
    assert all(same_bits(there[there.find(sha256)].hidden_states(), hidden) for sha256, hidden in expected.items()) and len(expected) == 12
    # a bucket that is not there is said when the capture is planned, before a model is loaded
    path.write_text(path.read_text().replace(bucket, "s3://nowhere/x"))
    with pytest.raises(StoreError, match=r"^s3://nowhere/x/\w+/hidden_states\.zarr: there is no such bucket") as caught:
        make_plan(RunConfig.load(path), corpus, tmp_path / "other" / "s", tmp_path / "other" / "plans" / "plan.json")
    assert "\n" not in str(caught.value)


def test_a_forked_process_is_told_why_it_cannot_read(tmp_path):
    """The library's threads stay in the parent: a call would wait for ever, of a store opened anew as well."""
    code = f"""
import os, signal
from dflash_offline.errors import StoreError
from dflash_offline.store.objects import open_objects
objects = open_objects("file://{tmp_path}/x")
objects.put("a", b"hello")
assert [bytes(piece) for piece in objects.ranges("a", [(0, 2)])] == [b"he"]
if os.fork() == 0:
    signal.alarm(20)
    for each in (objects, open_objects("file://{tmp_path}/x")):
        try:
            each.ranges("a", [(0, 2)])
        except StoreError as error:
            print(error, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
print(bytes(objects.get("a")))
"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    *told, read = found.stdout.splitlines()
    assert read == "b'hello'" and len(told) == 2 and all("forked from one that had used an object store already" in line for line in told)

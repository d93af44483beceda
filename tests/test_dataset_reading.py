"""The processes that read micro-batches: the same batches, clear errors, and never left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_runs as runs
from test_dataset import BLOCK, settings

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.dataset import BatchLoader, Job, MicroBatch, TrainingOrder, processes_for, stored_indices
from dflash_offline.errors import StoreDamagedError, TrainError
from dflash_offline.layout import Layout
from dflash_offline.store import HiddenStateStore
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.setup import peers_on_host

Source = tuple[Corpus, HiddenStateStore]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Source:
    folder = runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations)
    config = RunConfig.load(folder / "run.toml")
    layout = Layout(config.root_dir)
    return Corpus.open(layout.corpus(keys.corpus_key(config))), HiddenStateStore(layout.store(keys.capture_key(config)))


@pytest.fixture(scope="module")
def order(source: Source) -> TrainingOrder:
    return TrainingOrder(source[0], settings(), block_size=BLOCK)


def make(source: Source, *, processes: int, store: HiddenStateStore | None = None) -> BatchLoader:
    corpus, usual = source
    stored = stored_indices(corpus, usual)
    return BatchLoader(corpus, store or usual, stored, settings(), taps=[2, 0], block_size=BLOCK, pin=False, processes=processes)


def jobs(order: TrainingOrder, count: int) -> list[Job]:
    steps = [order.step(number) for number in range(count)]
    return [Job(step.number, 0, step.epoch, step.micro_batches[0], order.shapes[step.bucket]) for step in steps]


def content(batch: MicroBatch) -> dict[str, Any]:
    own = ("anchor_tokens", "labels", "supervised", "spans", "noise_seeds", "num_tokens", "nbytes")
    encoded = ("taps", "offsets", "input_ids", "loss_mask", "num_bytes")
    found = {name: getattr(batch, name) for name in own} | {name: getattr(batch.encoded, name) for name in encoded}
    return found | vars(batch.blocks) | {"hidden": batch.encoded.decode().view(torch.int16)}


def same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


def test_batches_are_those_of_the_loader_itself(source: Source, order: TrainingOrder) -> None:
    here, apart = make(source, processes=0), make(source, processes=2)
    wanted_jobs = jobs(order, 9)
    with apart.prefetch(wanted_jobs) as reader:  # two at a time; several are held while the next ones are made
        found = [reader.take() for _ in range(9)]
    for job, batch in zip(wanted_jobs, found, strict=True):
        wanted, got = content(here.load(job)), content(batch)
        assert [name for name in wanted if not same(wanted[name], got[name])] == []
        assert batch.job is job and batch.read_s > 0
    assert len({batch.nbytes for batch in found}) > 1, "batches of several sizes went through the shared memory"
    apart.close()


def test_threads_share_the_processes(source: Source, order: TrainingOrder) -> None:
    here, apart = make(source, processes=0), make(source, processes=2)
    wanted = [content(here.load(job))["hidden"] for job in jobs(order, 6)]
    wrong: list[int] = []

    def check(numbers: list[int]) -> None:
        wrong.extend(n for n in numbers if not same(content(apart.load(jobs(order, 6)[n]))["hidden"], wanted[n]))

    threads = [threading.Thread(target=check, args=(numbers,)) for numbers in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5, 1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    apart.close()


def test_errors_come_as_they_are_and_the_process_goes_on(source: Source, order: TrainingOrder) -> None:
    apart = make(source, processes=1)
    first, *_ = jobs(order, 1)
    with pytest.raises(IndexError):
        apart.load(Job(0, 0, 0, [10**6], first.shape))
    assert apart.load(first).num_tokens > 0
    apart.close()


def test_damage_found_there_is_said_here(source: Source, order: TrainingOrder, tmp_path: Path) -> None:
    copy = tmp_path / "hidden_states.zarr"
    subprocess.run(["cp", "-r", source[1].path, copy], check=True)
    apart = make(source, processes=1, store=HiddenStateStore(copy))
    for shard in copy.glob("part-*/**/c/*/0/0"):
        size = shard.stat().st_size
        shard.write_bytes(bytes(size))
    with pytest.raises(StoreDamagedError, match="part-"):
        for job in jobs(order, 3):
            apart.load(job)
    apart.close()


def test_damage_done_while_processes_start_is_said(source: Source, order: TrainingOrder, tmp_path: Path, capfd: Any) -> None:
    copy = tmp_path / "hidden_states.zarr"
    subprocess.run(["cp", "-r", source[1].path, copy], check=True)
    apart = make(source, processes=1, store=HiddenStateStore(copy))
    next(copy.glob("part-*/sample_offsets/c/0")).unlink()
    with pytest.raises(StoreDamagedError, match=r"part-\d+: sample_offsets/c/0: missing"):
        apart.load(jobs(order, 1)[0])
    apart.close()
    assert "Traceback" not in capfd.readouterr().err


def test_checksums_are_compared_by_the_parent_alone(source: Source, order: TrainingOrder, tmp_path: Path) -> None:
    copy = tmp_path / "hidden_states.zarr"
    subprocess.run(["cp", "-r", source[1].path, copy], check=True)
    shard = next(copy.glob("part-00000/*/c/0/0/0"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    store = HiddenStateStore(copy, "deep")
    assert store.opening(checked=True)().verify == "sizes" and store.opening()().verify == "deep"
    apart = make(source, processes=1, store=store)
    with pytest.raises(StoreDamagedError, match=r"part-00000: .*checksum"):
        for job in jobs(order, 3):
            apart.load(job)
    assert not apart._processes._all[0]._described, "no child was asked for anything"  # type: ignore[union-attr]
    apart.close()


def test_signals_while_processes_start_are_left_to_the_parent(source: Source, order: TrainingOrder) -> None:
    apart = make(source, processes=1)
    assert apart._processes is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(apart._processes.pids[0], number)
    assert apart.load(jobs(order, 1)[0]).num_tokens > 0
    apart.close()


def test_modules_of_the_current_folder_are_not_imported(
    source: Source, order: TrainingOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    apart = make(source, processes=1)
    assert apart.load(jobs(order, 1)[0]).num_tokens > 0
    apart.close()


def test_a_process_that_cannot_be_started_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TrainError, match=r"cannot be started \(Resource temporarily unavailable\); raise the limits"):
        make(source, processes=2)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("environment", "count"), [({"DFLASH_PEERS": "8"}, 8), ({"LOCAL_WORLD_SIZE": "4"}, 4), ({}, 2), ({"DFLASH_PEERS": "x"}, 2)]
)
def test_cores_are_shared_by_the_training_processes_of_this_host(
    environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DFLASH_PEERS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert peers_on_host(Ranks(0, 2)) == count
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert processes_for(count) == {8: 2, 4: 4, 2: 4}[count]


def test_a_process_that_is_killed_is_said(source: Source, order: TrainingOrder) -> None:
    apart = make(source, processes=1)
    first, *_ = jobs(order, 1)
    apart.load(first)
    assert apart._processes is not None
    os.kill(apart._processes.pids[0], signal.SIGKILL)
    with pytest.raises(TrainError, match=r"reads batches .* was killed by signal 9; memory may have run out; run the same command again"):
        apart.load(first)
    apart.close()


PARENT = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from dflash_offline.corpus import Corpus
from dflash_offline.dataset import BatchLoader, stored_indices
from dflash_offline.store import HiddenStateStore
from test_dataset import settings

corpus, store = Corpus.open(sys.argv[2]), HiddenStateStore(sys.argv[3])
loader = BatchLoader(corpus, store, stored_indices(corpus, store), settings(), taps=[0], block_size=4, pin=False, processes=1)
print(loader._processes.pids[0], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_it_ends_with_its_parent(source: Source, number: signal.Signals) -> None:
    corpus, store = source
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent), str(corpus.folder), str(store.path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    if number == signal.SIGTERM:  # a terminal's Ctrl-C and a supervisor's stop go to the whole group: the child leaves them to its parent
        time.sleep(5)  # it has to be there to do so
        os.kill(child, number)
        os.kill(child, signal.SIGINT)
        time.sleep(0.3)
        os.kill(child, 0)
    os.kill(parent.pid, number)
    parent.wait(20)
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < deadline, "the reading process outlived its parent"
        time.sleep(0.05)

"""A rank that dies is noticed and named: by the others without a collective, and by the supervisor."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import training_runs as runs

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import ProcessError, TrainError
from dflash_offline.processes import Job, run_jobs
from dflash_offline.train import peers
from dflash_offline.train.peers import Peers


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Peers], list[str]]]:
    """Three connected ranks, and what would have been the last words of their processes."""
    monkeypatch.setattr(peers, "GRACE_S", 0.3)
    ended: list[str] = []
    group = [Peers(rank, 3, end=ended.append) for rank in range(3)]
    port = group[0].listen()
    for peer in group[1:]:
        peer.connect("127.0.0.1", port)
    for peer in group:
        peer.start(timeout_s=10)
    yield group, ended
    for peer in group:
        peer.close(in_order=True)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_all_learn_who_died(three: tuple[list[Peers], list[str]], dead: int) -> None:
    group, ended = three
    group[dead].close(in_order=False)  # as the kernel does for a process that was killed
    others = [peer for peer in group if peer.rank != dead]
    assert [peer.who_died(wait_s=10) for peer in others] == [dead, dead]
    until = time.monotonic() + 10
    while len(ended) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(ended) == [
        f"error: rank {peer.rank} of 3: rank {dead} ended before its time; its log says why" for peer in others
    ]  # none of them failed by itself


def test_a_rank_that_fails_by_itself_is_left_in_peace(three: tuple[list[Peers], list[str]]) -> None:
    group, ended = three
    group[1].close(in_order=False)
    for peer in (group[0], group[2]):
        assert peer.who_died(wait_s=10) == 1
        peer.close(in_order=False)
    time.sleep(0.5)
    assert ended == []


def test_leaving_in_order_is_no_death(three: tuple[list[Peers], list[str]]) -> None:
    group, ended = three
    closing = [threading.Thread(target=peer.close, kwargs={"in_order": True}) for peer in (group[1], group[0], group[2])]
    for thread in closing:
        thread.start()
        time.sleep(0.05)
    for thread in closing:
        thread.join(10)
    assert [peer.dead for peer in group] == [None] * 3 and ended == []


def test_ranks_of_other_hosts_are_named_with_their_host() -> None:
    peer = Peers(0, 3)
    assert peer.name(2) == "rank 2"
    peer.hosts, peer.dead = ["a", "a", "b"], 2
    assert peer.name(1) == "rank 1" and peer.obituary() == "rank 0 of 3: rank 2 on b ended before its time; its log says why"


def test_a_rank_that_does_not_come_is_named() -> None:
    first, second = Peers(0, 3), Peers(1, 3)
    second.connect("127.0.0.1", first.listen())
    with pytest.raises(TrainError, match="rank 0 of 3: rank 2 did not connect in 0s"):
        first.start(timeout_s=0.3)
    second.close(in_order=False)
    first.close(in_order=False)


def test_strangers_are_closed_and_delay_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GREETING_S", 0.5)
    first, ranks = Peers(0, 3), [Peers(rank, 3) for rank in (1, 2)]
    port = first.listen()

    def come(said: bytes) -> socket.socket:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
        stranger.sendall(said)
        return stranger

    ranks[0].connect("127.0.0.1", port)
    greetings = [b"", b"rank ", b"rank 999\n", b"rank 0\n", b"rank 1\n", b"rank -2\n", b"rank 2", b"GET / HTTP/1.1\r\n\r\n", b"x" * 33]
    strangers = [come(said) for said in greetings]
    starting = threading.Thread(target=first.start, kwargs={"timeout_s": 20})
    starting.start()
    drip = come(b"r")
    begun = time.monotonic()
    try:
        for stranger in [*strangers, drip]:  # the end of the connection, or a reset where something was left unread
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert time.monotonic() - begun < 5 and starting.is_alive()
        ranks[1].connect("127.0.0.1", port)
        starting.join(10)
        assert not starting.is_alive() and sorted(first._sockets) == [1, 2]
        for rank in ranks:
            rank.start()
        ranks[1].close(in_order=False)
        assert first.who_died(wait_s=10) == 2, "the ranks' own connections are the ones watched"
    finally:
        for peer in (*ranks, first):
            peer.close(in_order=False)
        for stranger in (*strangers, drip):
            stranger.close()


def test_a_stranger_that_talks_slowly_does_not_hold_rank_0_past_its_time() -> None:
    first = Peers(0, 2)
    stranger = socket.create_connection(("127.0.0.1", first.listen()))
    over = threading.Event()

    def talk() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                stranger.sendall(b"r")

    talking = threading.Thread(target=talk)
    talking.start()
    begun = time.monotonic()
    try:
        with pytest.raises(TrainError, match="rank 0 of 2: rank 1 did not connect in 1s"):
            first.start(timeout_s=0.8)
        assert time.monotonic() - begun < 2.5
    finally:
        over.set()
        talking.join()
        stranger.close()
        first.close(in_order=False)


def test_the_supervisor_names_the_dead_rank_and_leaves_none(tmp_path: Path, tiny_target: Path, conversations: list[dict[str, Any]]) -> None:
    inputs = runs.make_inputs(tmp_path / "inputs", model=tiny_target, conversations=conversations)
    run_file = runs.make_run(tmp_path / "run", inputs, model=tiny_target, train={"epochs": 3000, "ranks": 2})
    key = keys.train_key(RunConfig.load(run_file))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.free_port()), "OMP_NUM_THREADS": "1"}
    options = ["--config", str(run_file), "--key", key]
    jobs = [Job(f"train-{rank}", "dflash_offline.train", options, environment=world | {"RANK": str(rank)}) for rank in range(2)]
    killed_at = []

    def kill(states: dict[str, dict[str, Any]]) -> None:
        if not killed_at and all((state.get("done") or 0) > 2 for state in states.values()) and len(states) == 2:
            os.kill(states["train-1"]["pid"], signal.SIGKILL)
            killed_at.append(time.monotonic())

    with pytest.raises(ProcessError, match=r"train-1 was killed by signal 9 \(out of memory\?\); its log is "):
        run_jobs(jobs, log_dir=tmp_path / "logs", say=lambda line: None, on_progress=kill)
    assert time.monotonic() - killed_at[0] < 10
    left = [child for child in psutil.Process().children(recursive=True) if "dflash_offline.train" in " ".join(child.cmdline())]
    assert left == []

"""Worker processes: order, bounded read-ahead, failures, kills."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflash_offline.corpus.workers import run_ordered
from dflash_offline.errors import CorpusError, ProcessError


def make_square(base: int) -> Callable[[int], int]:
    def square(number: int) -> int:
        time.sleep(0.02 if number % 3 == 0 else 0)
        return base + number * number

    return square


def make_failing(how: str) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 5:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(3)
            raise CorpusError("file:5: bad")
        return number

    return work


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order(workers: int) -> None:
    assert list(run_ordered(make_square, 10, range(40), workers=workers)) == [10 + i * i for i in range(40)]
    assert list(run_ordered(make_square, 10, [], workers=workers)) == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_counting(path: str) -> Callable[[int], tuple[int, int]]:
    with Path(path).open("a") as file:
        file.write("made\n")
    return lambda number: (os.getpid(), os.getppid())


def test_the_work_is_made_once_and_no_process_is_left(tmp_path: Path) -> None:
    found = list(run_ordered(make_counting, str(tmp_path / "made"), range(300), workers=3))
    assert (tmp_path / "made").read_text() == "made\n"
    workers, parents = {worker for worker, _ in found}, {parent for _, parent in found}
    assert 1 < len(workers) <= 3 and len(parents) == 1 and os.getpid() not in parents
    deadline = time.monotonic() + 20  # they are told to end; the system may be busy
    while left := [pid for pid in workers | parents if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def make_impossible(argument: str) -> Callable[[int], int]:
    raise CorpusError(argument)


def test_work_that_cannot_be_made_is_said() -> None:
    with pytest.raises(CorpusError, match="no tokenizer"):
        list(run_ordered(make_impossible, "no tokenizer", [b"x" * 10_000_000] * 9, workers=2))


def test_tasks_are_read_only_a_few_ahead() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for i in range(200):
            taken = i
            yield i

    for given, _ in enumerate(run_ordered(make_square, 0, tasks(), workers=2)):
        assert taken - given <= 8


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("kill", ProcessError, r"killed by signal 9 \(SIGKILL, out of memory\?\)"),
        ("exit", ProcessError, "ended with exit status 3"),
        ("raise", CorpusError, "file:5: bad"),
    ],
)
def test_a_worker_that_fails_is_noticed_at_once(how: str, error: type[Exception], message: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=message):
        list(run_ordered(make_failing, how, range(1000), workers=2))
    assert time.monotonic() - started < 60
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """A parent that is killed takes its workers with it: their pipe closes."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from test_corpus_workers import make_square
        from dflash_offline.corpus.workers import run_ordered
        def tasks():
            for i in range(1000):
                yield i
                if i == 20:
                    print("ready", flush=True)
                    time.sleep(600)
        if __name__ == "__main__":
            list(run_ordered(make_square, 0, tasks(), workers=2))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline().strip() == "ready"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()

"""The threads that read: all is read once, nothing runs on after a failure, batches beside each other do not wait for each other."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_offline.store.threads import ReadingThreads


@pytest.mark.parametrize("count", [1, 2, 7])
def test_each_read_is_called_once_and_the_bytes_are_added(count: int) -> None:
    called: list[int] = []
    threads = ReadingThreads(count)

    def read(number: int) -> int:
        called.append(number)
        return number

    assert threads.run([lambda number=number: read(number) for number in range(100)]) == sum(range(100))
    assert sorted(called) == list(range(100)) and threads.run([]) == 0
    threads.close()


def test_nothing_runs_on_when_one_has_failed() -> None:
    threads, running, most = ReadingThreads(4), [], []
    barrier = threading.Barrier(4)

    def slow() -> int:
        running.append(1)
        barrier.wait()
        time.sleep(0.1)
        running.pop()
        return 1

    def failing() -> int:
        barrier.wait()
        raise IndexError("a read's own")  # not the end of the list

    def late() -> int:
        most.append(1)
        return 1

    with pytest.raises(IndexError, match="a read's own"):
        threads.run([slow, slow, slow, failing, *[late] * 50])
    assert not running and len(most) < 50
    threads.close()


def test_a_batch_is_read_by_its_caller_while_the_threads_are_busy() -> None:
    threads, go = ReadingThreads(3), threading.Event()

    def blocked() -> int:
        assert go.wait(20)
        return 1

    with ThreadPoolExecutor(1) as caller:
        first = caller.submit(threads.run, [blocked] * 3)
        time.sleep(0.1)
        assert threads.run([lambda: 1] * 10) == 10 and not first.done()
        go.set()
        assert first.result() == 3
    threads.close()

"""Work on every core, results in order, and a killed worker noticed at once.

One process is spawned, imports what the work needs and builds it (``make``); the workers are forked from it, so that
imports, tokenizer and templates are in memory once and are loaded once, however many cores there are. It computes
nothing and holds no threads that a fork could lose. It also waits for the workers, and reports how one ended.

``multiprocessing.Pool`` waits for ever when a worker is killed (out of memory); here each worker has a pipe, which ends
with it. Workers end when the other end of their pipe closes, for whatever reason.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from dflash_offline.errors import DFlashError, ProcessError

# No threads before the fork, and none in the workers: there is one of them for each core
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")} | {"TOKENIZERS_PARALLELISM": "false"}
_REPORT_S = 5.0  # to wait for the news of a worker whose pipe has ended


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ordered(make: Callable[[Any], Callable[[Any], Any]], argument: Any, tasks: Iterable[Any], *, workers: int) -> Iterator[Any]:
    """Yield ``make(argument)(task)`` for every task, in order, computed by ``workers`` processes.

    ``make`` is called once and must be importable. With one worker everything runs in this process. Tasks are taken
    from the iterable only a few ahead of the results, so memory is bounded.

    Raises:
        ProcessError: a worker was killed or failed.
        DFlashError: one raised by the work itself.
    """
    if workers <= 1:
        work = make(argument)
        for task in tasks:
            yield work(task)
        return
    with contextlib.closing(_Crew(make, argument, workers)) as crew:
        yield from _feed(crew, iter(tasks))


class _Crew:
    """The workers, seen from outside: a connection to each, and the process they come from."""

    def __init__(self, make: Callable[[Any], Callable[[Any], Any]], argument: Any, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(workers)]
        self.connections = [ours for ours, _ in pipes]
        theirs = [theirs for _, theirs in pipes]
        self._news, report = context.Pipe(duplex=False)
        self._process = context.Process(target=_fork_workers, args=(make, argument, theirs, report), daemon=True)
        with _environment(_ONE_THREAD):
            self._process.start()
        for connection in (*theirs, report):
            connection.close()

    def died(self, worker: int) -> Exception:
        """What became of a worker whose pipe has ended."""
        code = None
        with contextlib.suppress(EOFError, OSError):
            while self._news.poll(_REPORT_S):
                number, news = self._news.recv()
                if isinstance(news, Exception):
                    return news
                if number == worker or news != 0:  # the first that failed is the one to tell of
                    code = news
                    break
        if code is None:
            self._process.join(_REPORT_S)
            code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return ProcessError(
                f"a corpus worker was killed by signal {-code} ({name}{', out of memory?' if code == -9 else ''}); nothing was written"
            )
        return ProcessError(f"a corpus worker ended with exit status {code}; its traceback is above")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._process.terminate()
        self._process.join()
        self._process.close()
        self._news.close()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that a process started meanwhile finds set."""
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _feed(crew: _Crew, tasks: Iterator[Any]) -> Iterator[Any]:
    connections = crew.connections
    idle, busy, done = list(range(len(connections))), {}, {}
    taken = given = 0
    ahead = 2 * len(connections) + 2
    exhausted = False
    while True:
        while idle and not exhausted and taken - given < ahead:
            try:
                task = next(tasks)
            except StopIteration:
                exhausted = True
                break
            worker = idle.pop()
            try:
                connections[worker].send(task)
            except (BrokenPipeError, ConnectionResetError):
                raise crew.died(worker) from None
            busy[worker] = taken
            taken += 1
        while given in done:
            yield done.pop(given)
            given += 1
        if not busy:
            if exhausted:
                return
            continue
        ready = wait([connections[worker] for worker in busy])
        for worker in [worker for worker in busy if connections[worker] in ready]:
            try:
                error, result = connections[worker].recv()
            except (EOFError, ConnectionResetError):
                raise crew.died(worker) from None
            if error is not None:
                raise error
            done[busy.pop(worker)] = result
            idle.append(worker)


def _fork_workers(make: Callable[[Any], Callable[[Any], Any]], argument: Any, connections: list[Connection], report: Connection) -> None:
    """Build the work, fork a worker for each connection, tell how each ends. Ends after the last of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    running: dict[int, int] = {}
    try:
        try:
            work = make(argument)
        except DFlashError as error:
            report.send((0, error))
            return
        gc.collect()
        gc.freeze()  # the collector would write to every page, and so copy it
        for worker, connection in enumerate(connections):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # some libraries hold a thread; none that a worker needs
                pid = os.fork()
            if pid == 0:
                for other in (*connections, report):
                    if other is not connection:
                        other.close()
                _live(connection, work)
            running[pid] = worker
        for connection in connections:
            connection.close()
        while running:  # looked at, and only then waited for: what is in ``running`` is never another process's number
            pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid  # type: ignore[union-attr]
            worker = running.pop(pid)
            report.send((worker, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)


def _live(connection: Connection, work: Callable[[Any], Any]) -> None:
    """A worker's whole life after the fork; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _serve(connection, work)
        code = 0
    except BaseException:  # nothing may go up into the code of the process that was forked
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[Any, Any] = (None, work(task))
        except DFlashError as error:
            answer = (error, None)
        try:
            connection.send_bytes(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))
        except (BrokenPipeError, OSError):
            return

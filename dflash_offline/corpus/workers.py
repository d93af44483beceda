"""Work on every core, results in order, and a killed worker noticed at once.

``multiprocessing.Pool`` waits for ever when a worker is killed (out of memory); here each worker has a pipe and its
exit is watched together with it. Workers are spawned, never forked, and end when their pipe closes.
"""

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from dflash_offline.errors import DFlashError, ProcessError


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ordered(make: Callable[[Any], Callable[[Any], Any]], argument: Any, tasks: Iterable[Any], *, workers: int) -> Iterator[Any]:
    """Yield ``make(argument)(task)`` for every task, in order, computed by ``workers`` processes.

    ``make`` is called once in each process and must be importable. With one worker everything runs in this process.
    Tasks are taken from the iterable only a few ahead of the results, so memory is bounded.

    Raises:
        ProcessError: a worker was killed or failed.
        DFlashError: one raised by the work itself.
    """
    if workers <= 1:
        work = make(argument)
        for task in tasks:
            yield work(task)
        return
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, argument), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield from _feed(processes, connections, iter(tasks))
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
            process.close()


def _feed(processes: list[Any], connections: list[Connection], tasks: Iterator[Any]) -> Iterator[Any]:
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
                raise _died(processes[worker]) from None
            busy[worker] = taken
            taken += 1
        while given in done:
            yield done.pop(given)
            given += 1
        if not busy:
            if exhausted:
                return
            continue
        ready = wait([connections[i] for i in busy] + [processes[i].sentinel for i in busy])
        for worker in list(busy):
            if connections[worker] in ready:
                try:
                    error, result = connections[worker].recv()
                except (EOFError, ConnectionResetError):
                    raise _died(processes[worker]) from None
                if error is not None:
                    raise error
                done[busy.pop(worker)] = result
                idle.append(worker)
            elif processes[worker].sentinel in ready:
                raise _died(processes[worker])


def _died(process: Any) -> ProcessError:
    process.join(5)
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return ProcessError(
            f"a corpus worker was killed by signal {-code} ({name}{', out of memory?' if code == -9 else ''}); nothing was written"
        )
    return ProcessError(f"a corpus worker ended with exit status {code}; its traceback is above")


def _serve(connection: Connection, make: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    work = make(argument)
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

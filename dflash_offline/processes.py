"""Start model processes, follow them, and leave none behind.

Four measures together leave no process running after Ctrl-C, SIGTERM, SIGHUP, or SIGKILL of anyone:

1. a model process runs in a session of its own with a pipe as stdin, its lifeline (``stage.attach_lifeline``): when
   the supervisor is gone, for whatever reason, the pipe closes and the whole process group is killed;
2. ``run_jobs`` stops every group on its way out, whatever the way, and cannot be interrupted in that;
3. the process that runs ``run_jobs`` under Luigi dies with Luigi (``pipelines/settings.py``, PDEATHSIG);
4. SIGTERM and SIGHUP of Luigi's main process are turned into an ordinary exit (same place).

Each process writes to a log of its own; new lines are copied to the terminal with the process's name before them.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dflash_offline import gpus
from dflash_offline.errors import ProcessError
from dflash_offline.progress import read_progress
from dflash_offline.stage import LIFELINE, PEERS, PROGRESS, SAVING, TERMINATED

POLL_S = 0.1
PROGRESS_POLL_S = 1.0
FAILED_GRACE_S = 3.0  # what the others get when one of them has failed: ranks wait for a dead peer and cannot finish anything
CAUSE_S = 5.0  # that ranks which only lost a peer wait, at most, to see it fail too: the cause is in its log
CHECKPOINT_GRACE_S = 120.0  # what ranks get when the caller is interrupted: the step ends, a checkpoint begins
SAVING_GRACE_S = 1800.0  # on top, for a checkpoint that is being written
MAX_LINES = 40  # copied to the terminal per process and poll; the log has them all
MAX_LINE_CHARS = 400
MAX_LOG_BYTES = 16 << 20  # a log that has grown beyond this is put aside when the next run starts
_ERROR = re.compile(r"^error: (.+)$")
_LOST = 4  # of ``_blame``
_LOST_PEER = re.compile(r"lost contact with|ended before its time|because .* was told to stop")  # as ranks put it (train/)
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b.*$")


@dataclass(frozen=True)
class Job:
    """One model process: ``python -m MODULE ARGUMENTS``."""

    name: str
    module: str
    arguments: list[str]
    gpu: str | None = None  # physical id, see gpus.resolve; None is the CPU
    peers: int = 1  # processes like this one, itself included, that share the cores of this machine
    environment: dict[str, str] = field(default_factory=dict)


class Running:
    """A started job: its process, its log, and how far the log has been copied to the terminal."""

    def __init__(self, job: Job, log_dir: Path, *, pass_fds: Sequence[int]) -> None:
        self.job = job
        self.log = log_dir / f"{job.name}.log"
        self.progress_path = log_dir / f"{job.name}.progress.json"
        self.progress_path.unlink(missing_ok=True)
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        command = [sys.executable, "-m", job.module, *job.arguments]
        with self.log.open("ab") as log:
            log.write(f"=== {datetime.now():%Y-%m-%d %H:%M:%S} {shlex.join(command)}\n".encode())
            log.flush()
            self.start = self._copied = log.tell()
            self.process = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        self._reader = self.log.open("rb")  # kept open: what is in it is told even if the root is deleted meanwhile
        self._rest = b""
        self._group_ended = False

    def _environment(self) -> dict[str, str]:
        # on a GPU only small things are left for the CPU, and each of a dozen reader threads would get a team of its own
        threads = 1 if self.job.gpu else max(1, len(os.sched_getaffinity(0)) // self.job.peers)
        return {
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin where something else uses the cores slow training several times
            "OMP_NUM_THREADS": str(threads),  # unless the user has set it: torch would start a thread per core in each process
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # number GPUs as nvidia-smi does
            **os.environ,
            "CUDA_VISIBLE_DEVICES": self.job.gpu or "",
            **self.job.environment,
            LIFELINE: "1",
            PROGRESS: str(self.progress_path),
            PEERS: str(self.job.peers),
        }

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while running. What an ended process has left behind is killed."""
        status = self.process.poll()
        if status is not None and not self._group_ended:
            self._group_ended = True  # once: later the number may be another process's
            self._signal_group(signal.SIGKILL)
        return status

    def copy_log(self, *, final: bool = False) -> None:
        """Print what the log has grown by, whole lines only unless ``final``, at most ``MAX_LINES`` of them."""
        with contextlib.suppress(OSError, ValueError):
            self._reader.seek(self._copied)
            new = self._reader.read(1 << 20)
            self._copied += len(new)
            lines = (self._rest + new).split(b"\n")
            self._rest = b"" if final else lines.pop()
            shown = [text for line in lines if (text := line.decode(errors="replace").split("\r")[-1].rstrip())]
            if len(shown) > MAX_LINES:
                left_out = len(shown) - MAX_LINES
                shown = [*shown[: MAX_LINES // 2], f"... {left_out} lines left out; they are in {self.log}", *shown[-MAX_LINES // 2 :]]
            for text in shown:
                print(f"{self.job.name}: {_cut(text)}\n", end="", flush=True)  # in one write: others print too

    def cause(self) -> str:
        """Why it failed, in one line: the signal, its own ``error:`` line, its exception, or its last line."""
        status = self.status
        assert status
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else ""
            hint = "out of memory?" if -status == signal.SIGKILL else name
            return f"was killed by signal {-status} ({hint})"
        if status == TERMINATED:
            return "was stopped by SIGTERM"
        lines = self._last_lines()
        for pattern in (_ERROR, _EXCEPTION):
            for line in reversed(lines):
                if found := pattern.match(line):
                    return f"failed: {_cut(found.group(found.lastindex or 0))}"
        last = f": {_cut(lines[-1])}" if lines else ""
        return f"failed with exit status {status}{last}"

    def _last_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            self._reader.seek(max(self.start, self._reader.seek(0, os.SEEK_END) - 16384))
            return [line for line in self._reader.read().decode(errors="replace").splitlines() if line.strip()]
        return []

    @property
    def where(self) -> str:
        """Where its log is, for messages."""
        return f"its log is {self.log}" if self.log.exists() else f"its log is gone: {self.log.parent} was deleted while it ran"

    @property
    def is_saving(self) -> bool:
        """Whether it says that it writes a checkpoint."""
        return self.status is None and (read_progress(self.progress_path) or {}).get("text") == SAVING

    def terminate(self) -> None:
        """SIGTERM to the process, unless it has ended. Not to its group: it may need its own children to finish a checkpoint."""
        if self.status is None:
            self.process.terminate()

    def kill(self) -> None:
        """End the process and its group now, whatever they are doing."""
        if self.status is None:
            self._signal_group(signal.SIGKILL)
            self.process.wait()
        self._group_ended = True
        self.copy_log(final=True)
        self._reader.close()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def rank_environment(
    local: int, local_size: int, *, first: int = 0, size: int | None = None, address: str = "127.0.0.1", port: int
) -> dict[str, str]:
    """What tells a training process its place (``train/ranks.py``).

    Args:
        local: its number among the ``local_size`` ranks of this host.
        first: rank of the first of them; ``size``: ranks of all hosts, those of this one when left out.
        address, port: where they meet.
    """
    return {
        "WORLD_SIZE": str(size or local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(first + local),
        "LOCAL_RANK": str(local),
    }


def free_port() -> int:
    """A TCP port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} ..."


def run_jobs(
    jobs: list[Job],
    *,
    log_dir: Path,
    say: Callable[[str], None] = print,
    grace_s: float = 3.0,
    inherit: Sequence[int] = (),
    leased: bool = False,
    stop_requested: Callable[[], str | None] = lambda: None,
    on_progress: Callable[[dict[str, dict[str, Any]]], None] = lambda states: None,
) -> None:
    """Run jobs together until all have ended well; whatever happens, none is running afterwards.

    Args:
        log_dir: gets ``NAME.log`` and ``NAME.progress.json`` of each job; created.
        say: prints one line about the jobs.
        grace_s: seconds between SIGTERM and SIGKILL when the caller is interrupted (not when a job has failed).
        inherit: file descriptors of locks that must outlive the caller if a job does.
        leased: the locks of the jobs' GPUs are among them; else they are taken here, waiting for whoever holds them.
        stop_requested: polled; a text ends the jobs with that text as the error.
        on_progress: gets the last progress state of each job that has one, about once a second.

    Raises:
        ProcessError: a job failed. The others are stopped within seconds; the text names the cause and the log.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProcessError(f"{log_dir}: the log folder cannot be made ({error.strerror}); choose another root in the run file") from None
    with contextlib.ExitStack() as stack:
        physical = [job.gpu for job in jobs if job.gpu is not None and not leased]
        descriptors = stack.enter_context(gpus.lease(physical, lambda text: say(f"{jobs[0].name}: {text}")))
        if reason := stop_requested():
            raise ProcessError(reason)
        running: list[Running] = []
        grace = [grace_s]
        stack.callback(lambda: stop(running, grace_s=grace[0]))
        for job in jobs:
            started = Running(job, log_dir, pass_fds=[*descriptors, *inherit])
            running.append(started)
            device = "the CPU" if job.gpu is None else f"GPU {job.gpu}"
            say(f"{job.name}: started on {device}, pid {started.process.pid}, log {started.log}")
        progress_at = 0.0
        while any(process.status is None for process in running):
            for process in running:
                process.copy_log()
            if any(process.status for process in running) or (reason := stop_requested()):
                grace[0] = min(grace_s, FAILED_GRACE_S)
                break
            if time.monotonic() >= progress_at:
                progress_at = time.monotonic() + PROGRESS_POLL_S
                on_progress(progress_of(running))
            time.sleep(POLL_S)
        failed = [process for process in running if process.status]
        if failed:
            time.sleep(POLL_S)  # peers of a dead rank fail with it: look at all of them before naming the first cause
            end = time.monotonic() + CAUSE_S
            while (
                any(process.status is None for process in running)
                and all(_blame(process) == _LOST for process in running if process.status)
                and time.monotonic() < end
            ):
                time.sleep(POLL_S)
            failed = [process for process in running if process.status]
        for process in running:
            process.copy_log(final=process.status is not None)
        on_progress(progress_of(running))  # how it ended
        if failed:
            first = min(failed, key=_blame)
            raise ProcessError(f"{first.job.name} {first.cause()}; {first.where}")
        if reason:
            raise ProcessError(reason)


def progress_of(running: Iterable[Running]) -> dict[str, dict[str, Any]]:
    """The last progress state of each job that has one."""
    return {process.job.name: state for process in running if (state := read_progress(process.progress_path))}


def _blame(process: Running) -> int:
    """Which of several failed processes is named: one killed or stopped from outside, then one that says why, then any other.

    A rank that only lost its peer comes last: the peer's own failure is the cause.
    """
    if process.status is not None and process.status < 0:
        return 0 if process.status == -signal.SIGKILL else 1
    if process.status == TERMINATED:
        return 1
    told = [found.group(1) for line in process._last_lines() if (found := _ERROR.match(line))]
    if told and _LOST_PEER.search(told[-1]):
        return _LOST
    return 2 if told else 3


def stop(running: list[Running], *, grace_s: float) -> None:
    """SIGTERM to every process, SIGKILL to what is left of its group after ``grace_s``; a further Ctrl-C ends the waiting at once.

    The time is extended, by ``SAVING_GRACE_S`` at the most, while one of them writes a checkpoint.
    """
    if not running:
        return
    with _uninterrupted() as impatient:
        for process in running:
            process.terminate()
        end = time.monotonic() + grace_s
        while any(process.status is None for process in running) and not impatient.is_set():
            late_s = time.monotonic() - end
            if late_s > SAVING_GRACE_S or (late_s > 0 and not any(process.is_saving for process in running)):
                break
            for process in running:
                process.copy_log()
            time.sleep(POLL_S)
        for process in running:
            process.kill()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[threading.Event]:
    """Signals that arrive while processes are being stopped do not interrupt that.

    Yields an event that a Ctrl-C sets. The first half second is not counted: the Ctrl-C that started the stop may
    reach this process twice, from the terminal and from Luigi.
    """
    impatient = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield impatient
        return
    since = time.monotonic()

    def on_interrupt(*_: object) -> None:
        if time.monotonic() - since > 0.5:
            impatient.set()

    handlers = {signal.SIGINT: on_interrupt, signal.SIGTERM: signal.SIG_IGN, signal.SIGHUP: signal.SIG_IGN}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield impatient
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

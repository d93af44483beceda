"""The run-file parameter and the base of all tasks.

A task has two significant parameters: ``config``, the run file, and ``key``, worked out from it (``dflash_offline/
keys.py``): a changed input is another key, hence another task with another output. Nothing else identifies a task, except
a drafter's name where the run file has several, and a replica's number.
"""

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import luigi

from dflash_offline.config import EMBEDDED, RunConfig
from dflash_offline.errors import DFlashError, ProcessError
from dflash_offline.gpus import locked
from dflash_offline.inputs import take_stdin
from dflash_offline.layout import Layout
from dflash_offline.manifest import disk_is_full
from dflash_offline.processes import Job, run_jobs
from dflash_offline.watch.hosts import Heartbeat
from pipelines import terminal
from pipelines.forwarding import Forwarder
from pipelines.outcome import Outcome
from pipelines.places import came_first, host_folder

RUN_FILE = "run.toml"
STOP_GRACE_S = 3.0


@functools.lru_cache
def outcome() -> Outcome:
    """The outcome of this Luigi run; made by ``pipelines/__init__.py`` before anything forks."""
    return Outcome()


@functools.lru_cache
def load(path: Path) -> RunConfig:
    """The run file, read once a process: one command works on one state of it, and of its standard input."""
    config = RunConfig.load(path)
    take_stdin(config, print)
    return config


@functools.lru_cache
def load_drafter(path: Path, drafter: str) -> RunConfig:
    """The run file as a drafter has it; "" is the whole."""
    return load(path).for_drafter(drafter) if drafter else load(path)


@functools.lru_cache
def content_key(path: Path, function: Callable[[RunConfig], str], drafter: str = "") -> str:
    """A key of ``keys.py``, worked out once a process (it reads parts of the target's weights)."""
    return function(load_drafter(path, drafter))


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """End the command with one line where a user can mend the cause, instead of Luigi's traceback."""
    try:
        yield
    except DFlashError as error:
        raise SystemExit(f"luigi: error: {error}") from None


@functools.lru_cache
def default_run_file(folder: Path) -> Path:
    """``run.toml`` in the folder, else the embedded demo."""
    path = folder / RUN_FILE
    if path.exists():
        return path
    print(f"no --config, and no {RUN_FILE} here: running the embedded demo, a small model on the CPU ({EMBEDDED})", flush=True)
    return EMBEDDED


class RunFileParameter(luigi.PathParameter):
    """Path of a run file, made absolute; a folder stands for its ``run.toml``, or for the embedded demo without one."""

    def normalize(self, x: Any) -> Path:
        path = Path(x).expanduser().absolute()
        with one_line():
            if path.is_dir():
                path = default_run_file(path)
            load(path)
        return path


class RunTask(luigi.Task):
    """One stage of a run: processes that write files, the last of which are the task's output."""

    config = RunFileParameter(
        default=Path(), description=f"run file; {RUN_FILE} in the current folder, else the embedded demo, when left out"
    )
    key = luigi.Parameter(default="", description="content key, worked out from the run file; do not set it")

    drafter: Any = ""  # a parameter of the tasks that are about one drafter
    stage: ClassVar[str]  # name of the log folder
    task_key: ClassVar[Callable[[RunConfig], str]]  # what `key` holds
    grace_s: ClassVar[float] = STOP_GRACE_S
    on_every_host: ClassVar[bool] = False  # hosts that share the root run it at the same time, each with its own processes

    @classmethod
    def get_param_values(cls, params: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        values = dict(super().get_param_values(params, args, kwargs))
        with one_line():
            now = content_key(values["config"], cls.task_key, values.get("drafter", ""))
        if values["key"] not in ("", now):
            raise SystemExit(f"luigi: error: {cls.__name__}: its key is {now} now, not {values['key']}; start the command anew")
        values["key"] = now
        return list(values.items())

    @property
    def run_config(self) -> RunConfig:
        """The run file; of a task about one of several drafters, as that one has it."""
        return load_drafter(self.config, self.drafter)

    @property
    def whole_config(self) -> RunConfig:
        """The run file with all its drafters."""
        return load(self.config)

    @property
    def label(self) -> str:
        """How messages name the task."""
        return f"{self.task_family} {self.drafter}" if self.drafter else self.task_family

    @property
    def layout(self) -> Layout:
        return Layout(self.run_config.root_dir)

    def stage_key(self, function: Callable[[RunConfig], str]) -> str:
        return content_key(self.config, function, self.drafter)

    @property
    def logs(self) -> Path:
        """Folder of logs, progress files and locks. Once the task runs: it may have to be found out which host came first."""
        return self.logs_of_this_host if self.on_every_host else self.layout.logs(self.stage)

    @property
    def logs_of_this_host(self) -> Path:
        """A folder that no other host writes to: each has its own, only the first one at a root needs none, unless hosts are named."""
        folder = self.layout.logs(self.stage)
        return folder / host_folder() if self.run_config.names_hosts or not came_first(folder.parent) else folder

    def deps(self) -> Any:
        """What it depends on. Luigi's main process asks, before it forks, of tasks that are not complete: something will run."""
        if multiprocessing.parent_process() is None:
            terminal.follow(self.layout.root)
        return super().deps()

    def jobs(self) -> list[Job]:
        """The processes of this stage."""
        raise NotImplementedError

    def job_name(self) -> str:
        """Name of the task among those of its stage; names its lock file."""
        return f"{self.stage}-{self.drafter}" if self.drafter else self.stage

    def run(self) -> None:
        """Run the processes, unless another command has made the output meanwhile; they must leave it complete.

        Raises:
            ProcessError: a process failed, or ended well and left no output.
        """
        with one_line_process_errors(self.logs), contextlib.ExitStack() as stack:
            self.logs.mkdir(parents=True, exist_ok=True)
            check_writable(self.logs, root=self.layout.root)
            lock = locked(self.logs / f"{self.job_name()}.lock", f"another run of {self.label}", self.say)
            descriptor = stack.enter_context(lock)
            if not self.complete():
                self.run_processes(self.jobs(), inherit=[descriptor])

    def run_processes(self, jobs: list[Job], *, inherit: list[int], leased: bool = False) -> None:
        """Run the processes to their end; the output must be there then.

        Args:
            inherit: descriptors of the locks held.
            leased: the locks of the GPUs are among them.

        Raises:
            ProcessError: as ``run``.
        """
        forwarder = Forwarder(self)
        with Heartbeat(self.layout.all_logs), contextlib.closing(forwarder):
            run_jobs(
                jobs,
                log_dir=self.logs,
                say=self.say,
                grace_s=self.grace_s,
                inherit=inherit,
                leased=leased,
                stop_requested=self.stop_requested,
                on_progress=forwarder,
            )
        self.outputs_written()
        if missing := [target.path for target in luigi.task.flatten(self.output()) if not target.exists()]:
            name = jobs[0].name
            raise ProcessError(f"{name} ended without an error but left no {missing[0]}; its log is {self.logs / name}.log")

    def outputs_written(self) -> None:
        """Wait for outputs that the processes of another host write."""

    def stop_requested(self) -> str | None:
        """A text once this task must end because of another one."""
        return None

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{text}\n", end="", flush=True)  # in one write, also with PYTHONUNBUFFERED: other tasks print too

    def on_failure(self, exception: BaseException) -> Any:
        return str(exception) if isinstance(exception, DFlashError) else super().on_failure(exception)


@contextlib.contextmanager
def one_line_process_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if disk_is_full(error):
            raise ProcessError(f"{folder}: the disk is full; make space and run the same command again") from error
        raise ProcessError(f"{folder}: {error.strerror or error}; the run's root must be a folder this user can write to") from error


def check_writable(folder: Path, *, root: Path) -> None:
    """A stage writes into the root, whatever is there already.

    Raises:
        ProcessError: this user cannot, or the file system is mounted read-only.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ProcessError(
            f"{folder}: cannot be written to (not this user's, or mounted read-only); the run's root {root} must be a folder this user "
            "can write to: mend that, or name another root in the run file"
        )


class StoppedError(ProcessError):
    """This task was stopped because another one failed; that one is reported."""


@RunTask.event_handler(luigi.Event.FAILURE)
def _on_failure(task: RunTask, error: BaseException) -> None:
    if isinstance(error, DFlashError):
        text = str(error)
    elif isinstance(error, SystemExit):
        text = "stopped"
    else:
        text = f"{type(error).__name__}: {error}"
    kind = "stopped" if isinstance(error, StoppedError | SystemExit) else "failed"
    outcome().add(kind, task.label, text)


@RunTask.event_handler(luigi.Event.PROCESS_FAILURE)
def _on_process_failure(task: RunTask, text: str) -> None:
    """The task's own process died (killed from outside); called in Luigi's main process."""
    outcome().add("failed", task.label, f"its task process died ({text}; out of memory?); logs are in {task.logs}")

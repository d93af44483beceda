"""What this pipeline needs of Luigi. A flag or a luigi.cfg overrides each of these settings.

``luigi --module pipelines`` imports this package before it reads its settings, so they are put in place here:

- a failed stage ends the command with a status other than 0 (Luigi's default is 0): 10 already running, 20 missing
  data, 25 not run, 30 a stage failed, 35 scheduling failed, 40 anything else;
- the local scheduler, unless a luigid was asked for;
- every task in a process of its own, which ends with Luigi's main process (``TaskProcessGuard``);
- SIGTERM and SIGHUP end the main process the way an exception would, so that everything is cleaned up.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import luigi
from luigi.configuration import LuigiConfigParser
from luigi.worker import KeepAliveThread

from dflash_offline.errors import DFlashError

log = logging.getLogger("luigi-interface")

MAX_TASKS = 129  # Luigi's "workers", tasks at a time: more than any machine has replicas; an idle one costs nothing
PR_SET_PDEATHSIG = 1
DEFAULTS = {
    "core": {
        "workers": str(MAX_TASKS),
        "log_level": "INFO",
        # Luigi's "already running" compares command lines only; the same command in another folder is another run
        "lock_pid_dir": f"{tempfile.gettempdir()}/luigi-{os.getuid()}-{zlib.crc32(os.fsencode(Path.cwd())):08x}",
    },
    "worker": {
        "force_multiprocessing": "true",
        "check_complete_on_run": "true",
        "task_process_context": "pipelines.settings.TaskProcessGuard",
    },
    "retcode": {
        "already_running": "10",
        "missing_data": "20",
        "not_run": "25",
        "task_failed": "30",
        "scheduling_error": "35",
        "unhandled_exception": "40",
    },
}
# with luigid: survive its restart (60 tries, 5 s apart) instead of failing after a minute and a half
LUIGID_DEFAULTS = {"core": {"rpc_retry_attempts": "60", "rpc_retry_wait": "5"}}
LAST_PING_S = 1.0
# Settings that a luigi.cfg lying about may change without its owner meaning this pipeline; what is lost when it does
GUARDED = {
    ("worker", "force_multiprocessing"): "stages are not isolated from one another",
    ("worker", "check_complete_on_run"): "a stage that wrote nothing may count as done",
    ("worker", "task_process_context"): "model processes may outlive a killed luigi",
    ("retcode", "task_failed"): "the exit status of a failed stage is another one",
}
_LUIGID_OPTIONS = (
    "scheduler_host",
    "scheduler_port",
    "scheduler_url",
    "default_scheduler_host",
    "default_scheduler_port",
    "default_scheduler_url",
)


def apply() -> None:
    """Put the defaults, signal handlers and log filter in place."""
    config = luigi.configuration.get_config()
    for (section, option), lost in GUARDED.items():
        if config.has_option(section, option) and str(config.get(section, option)).lower() != DEFAULTS[section][option].lower():
            print(f"luigi: warning: your Luigi configuration sets [{section}] {option}: {lost}", file=sys.stderr)
    _set_defaults(config, DEFAULTS)
    if wants_luigid(config):
        _set_defaults(config, LUIGID_DEFAULTS)
        core = luigi.interface.core
        core.ignore_unconsumed = {*getattr(core, "ignore_unconsumed", ()), *LUIGID_DEFAULTS["core"]}  # or Luigi warns of its own settings
        KeepAliveThread.join = _join_briefly  # type: ignore[method-assign]
    elif not config.has_option("core", "local_scheduler"):
        config.set("core", "local_scheduler", "true")
    log.addFilter(one_line_errors)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored, and must stay so
                signal.signal(number, _stop)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook


def _join_briefly(thread: KeepAliveThread, timeout: float | None = None) -> None:
    """Luigi waits for this thread on its way out. With luigid gone it is in the middle of minutes of retries, and a daemon anyway."""
    threading.Thread.join(thread, LAST_PING_S if timeout is None else timeout)


def _set_defaults(config: Any, defaults: dict[str, dict[str, str]]) -> None:
    for section, options in defaults.items():
        for option, value in options.items():
            if not config.has_option(section, option):
                # an ini value takes % as the start of an interpolation
                config.set(section, option, value.replace("%", "%%") if isinstance(config, LuigiConfigParser) else value)


def wants_luigid(config: Any) -> bool:
    """Whether a flag or the configuration names a central scheduler."""
    flags = [argument for argument in sys.argv if argument.startswith("--scheduler-") and not argument.startswith("--scheduler-retry")]
    if config.has_option("core", "local_scheduler"):
        return str(config.get("core", "local_scheduler")).lower() == "false"
    return bool(flags) or any(config.has_option("core", option) for option in _LUIGID_OPTIONS)


def _stop(number: int, frame: FrameType | None) -> None:
    """One signal starts the clean-up; a second one must not interrupt it."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    for process in multiprocessing.active_children():  # all at once: Luigi would wait for one after the other
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(process.pid, signal.SIGTERM)  # type: ignore[arg-type]
    raise SystemExit(128 + number)


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("luigi: stopped by Ctrl-C; the same command goes on from here", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def one_line_errors(record: logging.LogRecord) -> bool:
    """Log filter: an error a user can mend is one line, not a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DFlashError | SystemExit):
        reason = "stopped" if isinstance(error, SystemExit) else str(error)
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {reason}", (), None
    return True


class TaskProcessGuard:
    """Ties the process of a task to the Luigi process that forked it (Luigi's ``task_process_context``)."""

    def __init__(self, task_process: Any) -> None:
        self.forked = task_process.use_multiprocessing

    def __enter__(self) -> None:
        if not self.forked:
            return
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it died before the line above
            raise SystemExit("luigi is gone")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.forked and kind is KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None  # the main process says it; no traceback per task

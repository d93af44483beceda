"""The common start of every stage process: ``python -m dflash_offline.STAGE --config FILE [--drafter NAME] --key KEY [...]``.

A stage is started by the supervisor (``processes.py``) with

``DFLASH_LIFELINE``  set: stdin is a pipe held open by the supervisor. When it closes, for whatever reason the
                     supervisor went away, the whole process group of the stage is killed: no orphan keeps a GPU.
``DFLASH_PROGRESS``  path of the progress file.
``DFLASH_PEERS``     how many processes like this one, itself included, share the cores of this machine.
``DFLASH_COMMAND``   pid of the command that all processes of a run descend from, for the progress file.
``CUDA_VISIBLE_DEVICES``  the one GPU of this process, so that its device is always ``cuda:0``; empty for the CPU.

Without them it runs by hand in the same way. Nothing here imports torch.
"""

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dflash_offline.config import RunConfig
from dflash_offline.errors import ConfigError, DFlashError
from dflash_offline.progress import Progress

LIFELINE = "DFLASH_LIFELINE"
PROGRESS = "DFLASH_PROGRESS"
PEERS = "DFLASH_PEERS"
SAVING = "writing a checkpoint"  # progress text of a process that is given more time when it is asked to stop
TERMINATED = 128 + signal.SIGTERM  # exit status of a stage that was asked to stop and did


def attach_lifeline() -> None:
    """Die with the supervisor: at the end of stdin the whole process group is killed. No effect when run by hand."""
    if not os.environ.pop(LIFELINE, None):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)  # a second one must not interrupt the clean-up
    raise SystemExit(TERMINATED)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def run_stage(
    name: str,
    body: Callable[[RunConfig, argparse.Namespace, Progress], None],
    argv: list[str] | None = None,
    *,
    key: Callable[[RunConfig], str],
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Run one stage and leave with an exit status: 0 done, 1 an error (one line on stderr), 143 asked to stop.

    Args:
        name: module name under ``dflash_offline``, for usage texts.
        body: does the work; gets the run file, the parsed arguments and the progress of this process.
        argv: arguments without the program's name; None takes ``sys.argv``.
        key: the stage's function of ``keys.py``. The key is worked out again and must be the one given, so that
            a run file edited while the command runs never ends up under an old name. Left out on the command line
            (run by hand) it is filled in: ``arguments.key`` is always set.
        add_arguments: adds the stage's own options to the parser.

    SIGTERM raises ``SystemExit(143)`` in the body, unless the body installs a handler of its own.
    """
    attach_lifeline()
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog=f"python -m dflash_offline.{name}", allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, help="run file")
    parser.add_argument("--drafter", help="name of the drafter, where the run file has several")
    parser.add_argument("--key", help="content key of this stage; refused when the run file now has another one")
    if add_arguments is not None:
        add_arguments(parser)
    arguments = parser.parse_args(argv)
    path = os.environ.get(PROGRESS)
    progress = Progress(Path(path) if path else None)
    previous, root = None, None
    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        progress.update(text="starting", force=True)
        config = RunConfig.load(arguments.config)
        if arguments.drafter is not None:
            config = config.for_drafter(arguments.drafter)
        arguments.key = checked_key(config, arguments.key, key)
        progress.state["key"] = arguments.key
        root = config.root_dir if config.root_dir.exists() else None
        body(config, arguments, progress)
        progress.end()
    except DFlashError as error:
        progress.end(f"error: {error}")
        fail(error)
    except OSError:
        if root is None or root.exists():
            raise
        fail(DFlashError(f"{root}: the run's root was deleted or moved while this ran; what was in it will be made anew"))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as error:
        if _exit_code(error) == TERMINATED:
            progress.end("stopped")
        raise
    finally:
        if previous is not None:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, previous)


def checked_key(config: RunConfig, given: str | None, key: Callable[[RunConfig], str]) -> str:
    """The stage's content key, worked out anew.

    Raises:
        ConfigError: it is not the ``given`` one.
    """
    now = key(config)
    if given is not None and given != now:
        raise ConfigError(
            f"{config.source.name}: it, or a file it names, changed while the command ran "
            f"(the key was {given} and is now {now}); run the same command again"
        )
    return now


def fail(error: DFlashError) -> NoReturn:
    """Print an error a user can mend as one line on stderr and leave with status 1."""
    line = " ".join(str(error).split("\n"))
    print(f"error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(1)

"""Compiled kernels: where they are kept, and making them before the ranks meet.

Every shape of micro-batch gets one forward and backward pass before any rank talks to another, so that no rank can
wait in a reduction for one that is still compiling. Most of them compile nothing: on the ``triton`` path the shapes with
one number of blocks share the graphs of the first (``Drafter.compile_layers``), and held-out batches those of training.
They are run all the same, as proof of that, and since a shape's first pass also has libraries choose and load kernels.

The first process on a host compiles under a file lock; the others wait, then load what it left in the shared cache, all
at the same time.
"""

import contextlib
import fcntl
import importlib
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_offline.manifest import digest

CACHE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_CACHE = "TRITON_CACHE_DIR"


def use_cache_folder(device: torch.device) -> tuple[Path, str | None]:
    """Name the folder of compiled kernels for this process and its children: one per host, torch build and GPU model.

    TORCHINDUCTOR_CACHE_DIR is respected. Otherwise it lies in the temporary folder, which is a local disk almost
    everywhere (a home folder often is not), and belongs to this user alone. Where it cannot be written, a temporary
    folder of the command that started this process takes its place: the same one for all ranks of this host.

    Returns:
        The folder, and a line to print when it is not the usual one.
    """
    given = Path(os.environ.get(CACHE) or "")
    temporary = Path(tempfile.gettempdir())
    # torch itself names its default in the environment once it has compiled something, here or in a parent process
    by_user = bool(given.name) and not (given.parent == temporary and given.name.startswith("torchinductor_"))
    build = f"{socket.gethostname()}-torch{torch.__version__}-{torch.cuda.get_device_name(device)}"
    usual = temporary / f"dflash-offline-{os.getuid()}" / re.sub(r"[^A-Za-z0-9.+_-]+", "-", build)
    folder, said = given if by_user else usual, None
    try:
        _own_folder(folder, private=None if by_user else folder.parent)
    except OSError as error:
        refused, folder = folder, temporary / f"dflash-offline-kernels-{os.getuid()}-{os.getppid()}"
        try:
            _own_folder(folder, private=folder)
        except OSError:
            folder = Path(tempfile.mkdtemp(prefix="dflash-offline-kernels-"))
        said = f"note: compiled kernels cannot be kept in {refused} ({error}); using {folder}, so they are compiled again next time"
        os.environ[TRITON_CACHE] = str(folder / "triton")
    os.environ[CACHE] = str(folder)
    if not by_user:
        os.environ.setdefault(TRITON_CACHE, str(folder / "triton"))
    return folder, said


def _own_folder(folder: Path, *, private: Path | None) -> None:
    """Make a folder and see that it can be written; ``private``, it or one above it, must be this user's alone.

    Raises:
        OSError: it cannot be, or is another user's.
    """
    if private is not None:
        private.mkdir(mode=0o700, exist_ok=True)
        if private.stat().st_uid != os.getuid():
            raise PermissionError(f"{private} is another user's")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def import_compiler() -> None:
    """Import what ``torch.compile`` consists of, in a thread: seconds, in which this process reads weights and checksums."""
    threading.Thread(target=importlib.import_module, args=("torch._inductor.compile_fx",), daemon=True).start()


@contextlib.contextmanager
def compiling(folder: Path, what: Any) -> Iterator[bool]:
    """Alone in the folder while ``what`` (any JSON value) was never compiled there, else beside all others.

    Yields whether this process is the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f"{digest(what)}.compiled"
    with (folder / "compile.lock").open("a") as file:
        first = not mark.exists()
        if first:
            fcntl.flock(file, fcntl.LOCK_EX)
            first = not mark.exists()  # another process may have compiled meanwhile
        if not first:
            fcntl.flock(file, fcntl.LOCK_UN)  # loading needs no lock: whoever waits may begin at once
        yield first
        if first:
            with contextlib.suppress(OSError):  # a full disk: the next process compiles under the lock once more
                mark.touch()


def _worth_saying(record: logging.LogRecord) -> bool:
    """Not what PyTorch 2.11 warns of at every matrix product: that it cannot describe it for a benchmark, of which there is none."""
    return not record.getMessage().startswith("Constructing input/output tensor meta failed")


def recompiles() -> str:
    """Why torch.compile last made a graph anew, as it says itself; empty when it does not."""
    reasons = torch._dynamo.utils.counters.get("recompiles") or {}
    return "; ".join(str(reason).splitlines()[0] for reason in list(reasons)[-2:]) or "a shape or mode that the warm-up does not cover"


def warm_up(folder: Path, what: Any, passes: dict[str, Callable[[], None]]) -> str:
    """Run every pass once (see the module's docstring); returns a line to print."""
    logging.getLogger("torch._inductor.select_algorithm").addFilter(_worth_saying)
    began = time.monotonic()
    with compiling(folder, what) as first:
        got_lock = time.monotonic()
        for run in passes.values():
            run()
        torch.cuda.synchronize()
    seconds = time.monotonic() - got_lock
    waited = f", after waiting {got_lock - began:.0f}s for another process to compile" if got_lock - began > 1 else ""
    return f"{'compiled' if first else 'loaded'} kernels ({', '.join(passes)}) in {seconds:.1f}s{waited} ({folder})"

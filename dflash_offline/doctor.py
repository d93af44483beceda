"""Is this machine fit for the run? Each check says what it found and, where something is amiss, what to do."""

import fcntl
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.errors import DFlashError

_PROBE_BYTES = 128 << 20
_REMOTE_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "fuse.sshfs", "9p")


@dataclass(frozen=True)
class Check:
    """One line of ``dflash-offline doctor``. ``advice`` is empty where nothing is to be done."""

    name: str
    level: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def examine(config: RunConfig) -> list[Check]:
    """All checks for a run file on this machine, in the order they are printed."""
    groups: list[Callable[[RunConfig], Iterator[Check]]] = [_python, _torch, _gpus, _target, _limits, _disk, _luigid]
    checks: list[Check] = []
    for group in groups:
        checks.extend(group(config))
    return checks


def _python(config: RunConfig) -> Iterator[Check]:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Check(
        "python", "ok" if fits else "fail", platform.python_version(), "" if fits else "use Python 3.11 to 3.13 (luigi needs < 3.14)"
    )
    for package, lowest in (("torch", (2, 11)), ("transformers", (5, 0)), ("zarr", (3, 1)), ("numcodecs", (0, 16)), ("luigi", (3, 8))):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Check(package, "fail", "not installed", f"pip install '{package}>={'.'.join(map(str, lowest))}'")
            continue
        old = tuple(int(number) for number in found.split("+")[0].split(".")[:2] if number.isdigit()) < lowest
        advice = f"pip install --upgrade '{package}>={'.'.join(map(str, lowest))}'" if old else ""
        yield Check(package, "fail" if old else "ok", found, advice)


def _wants_gpu(config: RunConfig) -> bool:
    return config.target.gpus != "cpu" or config.train.gpus != "cpu"


def _torch(config: RunConfig) -> Iterator[Check]:
    import torch

    wanted = _wants_gpu(config)
    built = torch.version.cuda
    if built is None:
        level: Literal["ok", "warn", "fail"] = "fail" if wanted else "ok"
        yield Check("cuda", level, "this torch is a CPU build", 'install a CUDA build of torch, or set gpus = "cpu"' if wanted else "")
        return
    available = torch.cuda.is_available()
    advice = "" if available or not wanted else "torch sees no GPU: compare the driver's CUDA version below with the build's"
    yield Check(
        "cuda", "ok" if available or not wanted else "fail", f"built for CUDA {built}, usable: {'yes' if available else 'no'}", advice
    )
    if available and torch.distributed.is_nccl_available():
        yield Check("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    try:
        yield Check("triton", "ok", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        yield Check(
            "triton", "fail" if wanted else "warn", "not installed", "pip install triton (the attention kernel is compiled with it)"
        )
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    yield Check(
        "C compiler",
        "ok" if compiler or not wanted else "fail",
        compiler or "none",
        "" if compiler else "apt-get install gcc (Triton needs one)",
    )
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    writable = os.access(_existing(folder), os.W_OK)
    yield Check(
        "compile cache", "ok" if writable else "warn", str(folder), "" if writable else "set TORCHINDUCTOR_CACHE_DIR to a writable folder"
    )


def _gpus(config: RunConfig) -> Iterator[Check]:
    from dflash_offline import gpus

    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    for line in lines:
        index, name, total, used, driver = [cell.strip() for cell in line.split(",")]
        busy = float(used) > 1000
        advice = "somebody computes on it; a run waits only for GPUs that another run of this project holds" if busy else ""
        found = f"{name}, {float(total) / 1024:.0f} GiB, {float(used) / 1024:.1f} in use, driver {driver}"
        yield Check(f"GPU {index}", "warn" if busy else "ok", found, advice)
    for where, wanted, count in (
        ("[target] gpus", config.target.gpus, config.target.replicas),
        ("[train] gpus", config.train.gpus, config.train.ranks),
        *((f"[[drafters]] {entry['name']}: gpus", entry["gpus"], config.train.ranks) for entry in config.drafters if "gpus" in entry),
    ):
        try:
            found_ids = gpus.resolve(wanted, count, where=where)
            text = "the CPU" if found_ids[0] is None else ", ".join(str(gpu) for gpu in found_ids)
            yield Check(where, "ok", f"{len(found_ids)} processes on {text}")
        except DFlashError as error:
            yield Check(where, "fail", str(error), "name other GPUs in the run file")


def _target(config: RunConfig) -> Iterator[Check]:
    from dflash_offline import demo, identity

    try:
        if config.target.model == DEMO_MODEL:
            yield Check("target", "ok", f"demo model, {demo.find_gguf()}")
            return
        folder = identity.target_folder(config)
        weights = sum(size for size, _ in identity.weights_identity(folder).values())
        ids = identity.capture_layer_ids(config)
        yield Check("target", "ok", f"{folder}, {weights / 1e9:.1f} GB of weights, {identity.num_target_layers(config)} layers, taps {ids}")
    except DFlashError as error:
        yield Check("target", "fail", str(error), "mend [target] in the run file")


def _limits(config: RunConfig) -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= 1024
    yield Check("open files", "ok" if enough else "warn", f"limit {soft} (up to {hard})", "" if enough else "ulimit -n 4096")
    memory = _memory_bytes()
    yield Check("memory", "ok", f"{memory / 1e9:.1f} GB available, {len(os.sched_getaffinity(0))} CPU cores")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < 1 << 30 and _wants_gpu(config)
        advice = "NCCL shares memory there: start the container with --shm-size=1g or more" if small else ""
        yield Check("/dev/shm", "warn" if small else "ok", f"{size / 1e9:.1f} GB", advice)


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _file_system(path: Path) -> str:
    """Type of the file system a path lies on, from the longest mount point above it."""
    best, found = -1, "?"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        mount = mount.encode().decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) > best:
            best, found = len(mount), kind
    return found


def _disk(config: RunConfig) -> Iterator[Check]:
    folder = _existing(config.root_dir)
    usage, kind = shutil.disk_usage(folder), _file_system(folder.resolve())
    few = usage.free < 10e9
    yield Check(
        "disk",
        "warn" if few else "ok",
        f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.0f} on {folder} ({kind})",
        "see `dflash-offline plan` for what the run needs" if few else "",
    )
    if not os.access(folder, os.W_OK):
        yield Check("root", "fail", f"{folder} is not writable", "choose another root in the run file")
        return
    probe = folder / f".dflash-doctor-{os.getpid()}"
    try:
        yield _locks(probe, kind)
        if usage.free > 4 * _PROBE_BYTES:
            yield _rates(probe)
    except OSError as error:
        yield Check("disk", "fail", f"{folder}: {error.strerror}", "choose another root in the run file")
    finally:
        probe.unlink(missing_ok=True)


def _locks(probe: Path, kind: str) -> Check:
    """A second flock on a file must be refused; some network file systems grant it, and two runs would write one part."""
    with probe.open("w") as first, probe.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Check(
                "file locks", "fail", f"flock on {kind}: {error.strerror}", "mount the file system with locks (NFS: v4, or lockd running)"
            )
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            remote = kind in _REMOTE_FILE_SYSTEMS
            advice = "checked on this host only; for several hosts the server must hold the locks" if remote else ""
            return Check("file locks", "ok", f"work on {kind}", advice)
    return Check("file locks", "fail", f"flock on {kind} lets two writers in", "choose a root on a file system with locks")


def _rates(probe: Path) -> Check:
    content = os.urandom(1 << 20)
    begin = time.perf_counter()
    with probe.open("wb", buffering=0) as file:
        for _ in range(_PROBE_BYTES >> 20):
            file.write(content)
        os.fsync(file.fileno())
        written_s = time.perf_counter() - begin
    with probe.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while file.read(1 << 20):
            pass
        read_s = time.perf_counter() - begin
    write, read = (_PROBE_BYTES / seconds / 1e6 for seconds in (written_s, read_s))
    slow = read < 100
    advice = "training reads the store all the time; choose a faster disk if wait= in the status line is not near 0" if slow else ""
    return Check("disk rate", "warn" if slow else "ok", f"writes {write:,.0f} MB/s with fsync, reads {read:,.0f} MB/s (128 MB)", advice)


def _luigid(config: RunConfig) -> Iterator[Check]:
    from luigi.configuration import get_config

    luigi_config = get_config()
    host = luigi_config.get("core", "default_scheduler_host", luigi_config.get("core", "default-scheduler-host", "localhost"))
    port = int(luigi_config.get("core", "default_scheduler_port", luigi_config.get("core", "default-scheduler-port", "8082")))
    wanted = str(luigi_config.get("core", "local_scheduler", "true")).lower() == "false"
    try:
        with socket.create_connection((host, port), timeout=1.0):
            yield Check("luigid", "ok", f"answers on {host}:{port}")
    except OSError:
        advice = f"start luigid on {host}, or take local_scheduler=false out of luigi.cfg" if wanted else ""
        yield Check(
            "luigid",
            "fail" if wanted else "ok",
            f"none on {host}:{port}" + ("" if wanted else " (not needed: the local scheduler is used)"),
            advice,
        )

"""What is installed: Python, packages, torch's build, driver, NCCL, Triton, a C compiler, the compile cache."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from dflash_offline.config import RunConfig
from dflash_offline.doctor.check import Check, Level, existing, wants_gpu
from dflash_offline.environment import driver

_LOWEST = {"torch": (2, 11), "transformers": (5, 0), "zarr": (3, 1), "numcodecs": (0, 16), "luigi": (3, 8)}
_NOT_NEEDED = "(not needed on the CPU)"


def python(config: RunConfig) -> Iterator[Check]:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    advice = "" if fits else "use Python 3.11 to 3.13 (luigi needs < 3.14)"
    yield Check("python", "ok" if fits else "fail", platform.python_version(), advice)
    for package, lowest in _LOWEST.items():
        wanted = f"'{package}>={'.'.join(map(str, lowest))}'"
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Check(package, "fail", "not installed", f"pip install {wanted}")
            continue
        old = tuple(int(number) for number in found.split("+")[0].split(".")[:2] if number.isdigit()) < lowest
        yield Check(package, "fail" if old else "ok", found, f"pip install --upgrade {wanted}" if old else "")


def torch_build(config: RunConfig) -> Iterator[Check]:
    """The build as well as the version: builds of one version for two CUDA versions have behaved differently."""
    import torch

    wanted, built, found = wants_gpu(config), torch.version.cuda, driver()
    kind = f"CUDA {built}" if built else f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU"
    text = f"{torch.__version__}, built for {kind} from {str(torch.version.git_version)[:12]}"
    amiss = wanted and built is None
    yield Check("torch build", "fail" if amiss else "ok", text, 'install a CUDA build of torch, or set gpus = "cpu"' if amiss else "")
    hidden = "driver" not in found and wanted and not torch.cuda.is_available()
    advice = "install the NVIDIA driver, or pass its GPUs into the container" if hidden else ""
    text = f"{found.get('driver', 'no NVIDIA driver')}{', ' + found['gpus'] if 'gpus' in found else ''}"
    yield Check("driver", "fail" if hidden else "ok", text, advice)
    if built is None:
        yield Check("cuda", "ok", _NOT_NEEDED) if not wanted else Check("cuda", "fail", "not usable", "see torch build above")
    else:
        usable = torch.cuda.is_available()
        advice = (
            ""
            if usable or not wanted
            else f"torch sees no GPU: is the driver new enough for CUDA {built}, and CUDA_VISIBLE_DEVICES not empty?"
        )
        yield Check("cuda", "ok" if usable or not wanted else "fail", f"{built}, usable: {'yes' if usable else 'no'}", advice)
    yield _nccl(config, wanted=wanted, usable=built is not None and torch.cuda.is_available())


def _nccl(config: RunConfig, *, wanted: bool, usable: bool) -> Check:
    import torch

    if usable and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return Check("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    gpus = config.train.gpus
    several = wanted and gpus != "cpu" and (gpus == "all" or len(gpus) > 1)
    level: Level = "fail" if several else "ok"
    return Check(
        "nccl", level, "none" if wanted else f"none {_NOT_NEEDED}", "ranks on several GPUs need a torch with NCCL" if several else ""
    )


def compilers(config: RunConfig) -> Iterator[Check]:
    wanted = wants_gpu(config)
    try:
        yield Check("triton", "ok", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        advice = "pip install triton (the attention kernel is compiled with it)" if wanted else ""
        yield Check("triton", "fail" if wanted else "ok", "none" if wanted else f"none {_NOT_NEEDED}", advice)
    compiler = next((found for name in (os.environ.get("CC", ""), "gcc", "cc", "clang") if name and (found := shutil.which(name))), None)
    missing = compiler is None and wanted
    found = compiler or ("none" if wanted else f"none {_NOT_NEEDED}")
    yield Check("C compiler", "fail" if missing else "ok", found, "apt-get install gcc (Triton needs one)" if missing else "")
    for name, folder in _caches().items():
        yield _cache(name, folder)


def _caches() -> dict[str, Path]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    found = {"compile cache": Path(cache_dir())}
    if own := os.environ.get("TRITON_CACHE_DIR"):
        found["triton cache"] = Path(own)
    return found


def _cache(name: str, folder: Path) -> Check:
    """Compiled kernels are written to it and loaded from it."""
    place = existing(folder)
    if not os.access(place, os.W_OK):
        return Check(name, "warn", f"{folder} is not writable", "set TORCHINDUCTOR_CACHE_DIR to a writable folder: every run compiles anew")
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return Check(
            name, "fail", f"{folder} is mounted noexec", "set TORCHINDUCTOR_CACHE_DIR to a folder that programs may be loaded from"
        )
    kernels = sum(1 for _ in folder.rglob("*.so")) if folder.is_dir() else 0
    return Check(name, "ok", f"{folder}, {f'{kernels} compiled files' if kernels else 'empty: the first run compiles'}")

"""What made a result, as every manifest records it: in this work the build matters as much as the code.

Builds of one version of torch for two CUDA versions have behaved differently, so a version alone says too little.
"""

import contextlib
import importlib.util
import platform
import re
import subprocess
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from dflash_offline import nvidia

_PACKAGES = (
    *("dflash_offline", "torch", "transformers", "tokenizers", "safetensors", "numpy", "zarr", "numcodecs", "luigi", "triton"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-linear-attention", "causal-conv1d"),
)
_DRIVER = Path("/proc/driver/nvidia")


@lru_cache
def environment() -> dict[str, str]:
    """Python, packages, torch's build (CUDA version, commit), driver and GPUs of this machine, git commit of this code.

    Reads package metadata and files, and asks programs, so that a process without torch stays without it. What is not
    there is left out.
    """
    versions = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    versions |= torch_build() | driver()
    here = Path(__file__).resolve().parent
    if commit := _answer(["git", "-C", str(here), "describe", "--always", "--dirty"]):
        versions["git"] = commit
    return versions


def torch_build() -> dict[str, str]:
    """``torch/version.py`` without importing torch: the whole version, the CUDA version and the commit it was built from."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
            for field, name in (("__version__", "torch"), ("cuda", "cuda"), ("git_version", "torch_git")):
                if matched := re.search(rf"^{field}\b[^=\n]*= *'([^'\n]+)'", text, flags=re.MULTILINE):
                    found[name] = matched.group(1)
    return found


@lru_cache
def driver(folder: Path = _DRIVER) -> dict[str, str]:
    """``{"driver": "580.95.05", "gpus": "8 x NVIDIA H200"}``, from the kernel or, where a container hides that, from nvidia-smi."""
    models: list[str] = []
    version = _first(folder / "version", r"\s(\d{3,}\.\d+(?:\.\d+)?)\s")
    if version is not None:
        models = [name for path in sorted(folder.glob("gpus/*/information")) if (name := _first(path, r"^Model:\s*(.+?)\s*$"))]
    if not models:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            pairs = list(nvidia.ask("driver_version", "name", timeout_s=20))
            version, models = (pairs[0][0] if pairs else version), [name for _, name in pairs]
    found = {} if version is None else {"driver": version}
    if models:
        found["gpus"] = ", ".join(f"{models.count(name)} x {name}" for name in dict.fromkeys(models))
    return found


def _first(path: Path, pattern: str) -> str | None:
    with contextlib.suppress(OSError):
        matched = re.search(pattern, path.read_text(), flags=re.MULTILINE)
        return matched.group(1) if matched else None
    return None


def _answer(command: list[str]) -> str:
    """What a program prints; nothing where it fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""

"""Memory and utilisation of this machine's GPUs: by NVML where ``nvidia-ml-py`` is installed, else by ``nvidia-smi``."""

import contextlib
import subprocess
import threading
from dataclasses import asdict, dataclass
from typing import Any

from dflash_offline import nvidia

_FIELDS = ("index", "uuid", "name", "utilization.gpu", "memory.used", "memory.total")
_MIB = 1 << 20


@dataclass(frozen=True)
class GpuState:
    """One GPU. ``busy`` is the share of the last moment in which a kernel ran (0 to 1); None where the driver does not tell."""

    gpu: str
    uuid: str
    name: str
    busy: float | None
    used_bytes: int | None
    total_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class GpuReader:
    """Reads the state of all GPUs, again and again.

    Attributes:
        note: why there are none, in words; empty where there are some.
    """

    def __init__(self) -> None:
        self.note = ""
        self._nvml = _start_nvml()

    def read(self) -> list[GpuState]:
        """State of every GPU now; none, with ``note`` set, where the driver cannot be asked."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                states = _by_nvml(self._nvml)
                self.note = "" if states else "the NVIDIA driver shows no GPU"
                return states
        if not nvidia.is_there():
            self.note = "no NVIDIA driver on this machine (neither NVML nor nvidia-smi)"
            return []
        try:
            states = [_by_row(cells) for cells in nvidia.ask(*_FIELDS, timeout_s=20)]
        except (OSError, subprocess.SubprocessError) as error:
            self.note = f"nvidia-smi could not be asked ({type(error).__name__})"
            return []
        self.note = "" if states else "nvidia-smi shows no GPU"
        return states


_nvml_lock = threading.Lock()


def _start_nvml() -> Any:
    """The NVML module, started; None without the package, the library or a driver."""
    with _nvml_lock:
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return pynvml


def _by_nvml(nvml: Any) -> list[GpuState]:
    states = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        busy = used = total = None
        with contextlib.suppress(nvml.NVMLError):  # not told of a GPU that is cut up (MIG)
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            used, total = int(memory.used), int(memory.total)
        name, uuid = (value.decode() if isinstance(value, bytes) else str(value) for value in _names(nvml, handle))
        states.append(GpuState(str(index), uuid, name, busy, used, total))
    return states


def _names(nvml: Any, handle: Any) -> tuple[Any, Any]:
    return nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)


def _by_row(cells: list[str]) -> GpuState:
    index, uuid, name, busy, used, total = cells
    share, (used_mib, total_mib) = _number(busy), map(_number, (used, total))
    return GpuState(
        index,
        uuid,
        name,
        None if share is None else share / 100,
        None if used_mib is None else int(used_mib * _MIB),
        None if total_mib is None else int(total_mib * _MIB),
    )


def _number(text: str) -> float | None:
    """``[N/A]`` and the like are None."""
    try:
        return float(text)
    except ValueError:
        return None

"""The program ``nvidia-smi``, which tells of this machine's GPUs where NVML is not asked. Nothing here imports torch."""

import shutil
import subprocess
from collections.abc import Iterator

PROGRAM = "nvidia-smi"


def is_there() -> bool:
    return shutil.which(PROGRAM) is not None


def ask(*fields: str, timeout_s: float = 60.0) -> Iterator[list[str]]:
    """The fields of each GPU, as ``nvidia-smi --help-query-gpu`` names them; numbers without their units.

    Raises:
        OSError: there is no such program.
        subprocess.SubprocessError: it fails, or hangs for longer than ``timeout_s``.
    """
    command = [PROGRAM, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True)
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields):  # anything else is a notice
            yield cells

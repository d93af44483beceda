"""Commands out of fenced blocks of Markdown, and running them as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language; "" for those that name none."""
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL) if name == language]


def commands(text: str) -> list[str]:
    """Commands of the bash blocks without their comments; a loop is one command."""
    found: list[str] = []
    for block in blocks(text, "bash"):
        open_loops = 0
        for line in (line.split("  #")[0].rstrip() for line in block.splitlines()):
            if not line or line.startswith("#"):
                continue
            if open_loops:
                found[-1] += f"\n{line}"
            else:
                found.append(line.strip())
            open_loops += bool(re.match(r"\s*(for|while) ", line)) - (line.strip() == "done")
    return found


def environment() -> dict[str, str]:
    """The commands as users type them: the console scripts of this interpreter first on PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder; it must end with status 0 and without a traceback."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done

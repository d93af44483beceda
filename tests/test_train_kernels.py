"""Processes that compile the same kernels: one alone, then the others beside each other."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from dflash_offline.train.kernels import CACHE, TRITON_CACHE, compiling, use_cache_folder

PROCESS = """
import json, sys, time
from pathlib import Path
from dflash_offline.train.kernels import compiling

folder, ready, go = (Path(each) for each in sys.argv[1:])
ready.touch()
while not go.exists():
    time.sleep(0.01)
with compiling(folder, {"shape": 1}) as first:
    began = time.time()
    time.sleep(0.7)
    print(json.dumps([first, began, time.time()]))
"""


def run_together(folder: Path, count: int) -> list[tuple[bool, float, float]]:
    """(first, began, ended) of each process, by when it began."""
    go, readies = folder / "go", [folder / f"ready{number}" for number in range(count)]
    go.unlink(missing_ok=True)
    for ready in readies:
        ready.unlink(missing_ok=True)
    command = [sys.executable, "-c", PROCESS, str(folder / "cache")]
    started = [subprocess.Popen([*command, str(ready), str(go)], stdout=subprocess.PIPE, text=True) for ready in readies]
    while not all(ready.exists() for ready in readies):
        assert all(process.poll() is None for process in started)
        time.sleep(0.02)
    go.touch()
    return sorted((tuple(json.loads(process.communicate(timeout=60)[0])) for process in started), key=lambda each: each[1])


def test_one_process_compiles_and_the_others_load_at_the_same_time(tmp_path: Path) -> None:
    compiler, *loaders = run_together(tmp_path, 3)
    assert compiler[0] and not any(first for first, _, _ in loaders)
    assert all(began >= compiler[2] for _, began, _ in loaders), "they waited for the one that compiled"
    assert max(began for _, began, _ in loaders) < min(ended for _, _, ended in loaders), "not for each other"


def test_with_a_warm_cache_nobody_waits(tmp_path: Path) -> None:
    run_together(tmp_path, 1)
    found = run_together(tmp_path, 3)
    assert not any(first for first, _, _ in found)
    assert max(began for _, began, _ in found) < min(ended for _, _, ended in found)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of a machine with a GPU on which nothing was compiled yet."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for name in (CACHE, TRITON_CACHE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return folder


def test_kernels_are_kept_for_one_host_build_and_gpu(temporary: Path) -> None:
    folder, said = use_cache_folder(torch.device("cuda"))
    assert said is None and folder.is_dir() and folder.is_relative_to(temporary)
    assert torch.__version__ in folder.name and folder.name.endswith("NVIDIA-H200")
    assert os.environ[CACHE] == str(folder) and os.environ[TRITON_CACHE] == str(folder / "triton")
    assert folder.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("by_user", [True, False])
def test_a_folder_that_cannot_be_written_is_said_and_all_ranks_use_one_other(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_user: bool
) -> None:
    if by_user:
        (tmp_path / "file").touch()
        monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    else:
        (temporary / f"dflash-offline-{os.getuid()}").touch()
    wanted = os.environ.get(CACHE)
    folder, said = use_cache_folder(torch.device("cuda"))
    assert said is not None and "cannot be kept in" in said and (wanted or "dflash-offline-") in said and str(folder) in said
    assert folder.is_dir() and os.environ[CACHE] == str(folder) and os.environ[TRITON_CACHE] == str(folder / "triton")
    again, _ = use_cache_folder(torch.device("cuda"))
    assert again == folder


def test_a_mark_that_cannot_be_left_fails_nothing(tmp_path: Path) -> None:
    with compiling(tmp_path / "cache", 1) as first:
        for path in (tmp_path / "cache").iterdir():
            path.unlink()
        (tmp_path / "cache").rmdir()
    assert first

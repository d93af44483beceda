"""GPU choice and locks. The machine's GPUs are told by a stand-in for nvidia-smi; the locks are real."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_offline import gpus
from dflash_offline.config import TrainConfig
from dflash_offline.errors import ConfigError, ProcessError

Machine = Callable[[int], None]


COMPUTES = """#!/bin/sh
case "$1" in
  *compute_cap*) echo "GPU-22aa-bbbb, [N/A]"; echo "GPU-00aa-bbbb, 8.0"; echo "GPU-11aa-bbbb, 9.0" ;;
  *) echo "0, GPU-00aa-bbbb"; echo "1, GPU-11aa-bbbb"; echo "2, GPU-22aa-bbbb" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """``machine(n)``: nvidia-smi lists n GPUs; n = 0: there is no nvidia-smi. Locks go to an empty folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(count: int) -> None:
        gpus._listed.cache_clear()
        gpus._capabilities.cache_clear()
        script = folder / "nvidia-smi"
        script.write_text("#!/bin/sh\n" + "".join(f"echo '{i}, GPU-{i}{i}aa-bbbb'\n" for i in range(count)))
        script.chmod(0o755)
        if not count:
            script.unlink()

    yield make
    gpus._listed.cache_clear()
    gpus._capabilities.cache_clear()


def test_settings_that_a_gpu_cannot_train_with_are_refused(machine: Machine, tmp_path: Path) -> None:
    train = TrainConfig(head_precision="fp8")
    machine(2)
    gpus.check_settings(train, ["0", "1"])  # an old driver, which does not tell
    (tmp_path / "bin" / "nvidia-smi").write_text(COMPUTES)
    gpus._capabilities.cache_clear()
    gpus._listed.cache_clear()
    gpus.check_settings(train, ["1", "GPU-11", "2", "MIG-5"])
    gpus.check_settings(TrainConfig(), ["0", None])
    for gpu in ("0", "GPU-00aa-bbbb"):
        with pytest.raises(ConfigError, match=rf'\[train\] head_precision = "fp8" needs .* not 8\.0\); use "bf16" \(GPU {gpu}\)'):
            gpus.check_settings(train, ["1", gpu])
    with pytest.raises(ConfigError, match=r'\[\[drafters\]\] a: head_precision = "fp8" needs GPUs; with gpus = "cpu" use "bf16"'):
        gpus.check_settings(train, [None], where="[[drafters]] a:")


def test_cpu_needs_no_gpu(machine: Machine) -> None:
    machine(0)
    assert gpus.resolve("cpu", 3) == [None, None, None]


def test_indices_and_all(machine: Machine) -> None:
    machine(4)
    assert gpus.resolve([2, 0]) == ["2", "0"]
    assert gpus.resolve("all") == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("given", "wanted", "found"),
    [
        ("6,3", [0, 1], ["6", "3"]),
        ("6,3", "all", ["6", "3"]),
        ("GPU-11aa-bbbb, GPU-00aa-bbbb", [1], ["GPU-00aa-bbbb"]),
        ("2,-1,3", "all", ["2"]),  # CUDA ignores everything from the first entry that is no GPU
    ],
)
def test_callers_visible_devices_are_what_is_counted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, given: str, wanted: list[int] | str, found: list[str]
) -> None:
    machine(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert gpus.resolve(wanted) == found


@pytest.mark.parametrize(
    ("count", "given", "wanted", "message"),
    [
        (0, None, "all", r'\[target\] gpus = "all": this machine has 0 NVIDIA GPUs; set gpus = "cpu" to run without'),
        (0, None, [0], r'\[target\] gpus = \[0\]: this machine has 0 NVIDIA GPUs, so there is no GPU 0; set it to "cpu" to run without'),
        (2, None, [0, 5], r"this machine has 2 NVIDIA GPUs, so there is no GPU 5; name GPUs from 0 to 1"),
        (8, "4", [1], r"CUDA_VISIBLE_DEVICES shows 1, so there is no GPU 1; name GPUs from 0 to 0"),
        (8, "", "all", r"CUDA_VISIBLE_DEVICES shows 0"),
    ],
)
def test_missing_gpus_are_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, count: int, given: str | None, wanted: list[int] | str, message: str
) -> None:
    machine(count)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(ConfigError, match=message):
        gpus.resolve(wanted, where="[target] gpus")


def test_one_gpu_has_one_lock_however_it_is_written(machine: Machine) -> None:
    machine(3)
    assert gpus.lock_name("1") == gpus.lock_name("GPU-11aa-bbbb") == gpus.lock_name("GPU-11") == "GPU-11aa-bbbb"
    machine(0)
    assert gpus.lock_name("1") != gpus.lock_name("2")


def test_second_run_waits_and_says_for_whom(machine: Machine) -> None:
    machine(2)
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with gpus.lease(["GPU-11aa-bbbb"], said.append):
            order.append("second")

    thread = threading.Thread(target=second)
    with gpus.lease(["1", "0"], said.append) as descriptors:
        assert len(descriptors) == 2
        thread.start()
        end = time.monotonic() + 10
        while not said and time.monotonic() < end:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert said == [f"waiting for GPU GPU-11aa-bbbb, held by pid {os.getpid()}"]
    assert order == ["first", "second"]


def test_a_child_keeps_the_lock_after_its_starter_let_go(machine: Machine) -> None:
    machine(1)
    with gpus.lease(["0"], print) as (descriptor,):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    path = gpus.lock_folder() / "GPU-00aa-bbbb.lock"
    with path.open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child.kill()
        child.wait()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.stdin.close()  # type: ignore[union-attr]


def test_locks_are_for_every_user_whatever_the_umask(machine: Machine) -> None:
    machine(1)
    previous = os.umask(0o077)
    try:
        with gpus.lease(["0"], print):
            path = gpus.lock_folder() / "GPU-00aa-bbbb.lock"
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777
    finally:
        os.umask(previous)


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.lock").mkdir()
    with (
        pytest.raises(ProcessError, match=r"x\.lock: the lock file cannot be opened \(Is a directory\)"),
        gpus.locked(tmp_path / "x.lock", "x", print),
    ):
        pass


def test_any_free_lock_is_taken_and_nothing_is_held_while_waiting(tmp_path: Path) -> None:
    paths = {f"GPU {i}": tmp_path / f"{i}.lock" for i in range(3)}
    said: list[str] = []
    with gpus.any_of(paths, 2, said.append) as first:
        assert set(first) == {"GPU 0", "GPU 1"} and not said
        with gpus.any_of(paths, 1, said.append) as second:
            assert set(second) == {"GPU 2"} and not said
        seen_free: list[bool] = []

        def look() -> None:
            with gpus.try_locked(paths["GPU 2"]) as lock:
                seen_free.append(lock is not None)
            if len(seen_free) == 3:
                raise TimeoutError

        with pytest.raises(TimeoutError), gpus.any_of(paths, 2, said.append, tick=look):
            pytest.fail("two of three were held")
        assert said == ["queued: waits for 2 of GPU 0, GPU 1, GPU 2"] and seen_free == [True, True, True]
    with gpus.any_of(paths, 3, said.append) as third:
        assert set(third) == set(paths)
        with gpus.try_locked(paths["GPU 1"]) as lock:
            assert lock is None
    with gpus.try_locked(paths["GPU 1"]) as lock:
        assert lock is not None

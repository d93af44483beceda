"""The supervisor with real processes, and Luigi killed in every way: nothing may be left running.

The kill scenarios run ``python -m luigi`` on two small tasks of the shape of the pipeline's own (replicas in a task
each, ranks in one task), whose processes do nothing but wait. A few run here; the sweep is marked ``long``.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import write_run_file

from dflash_offline.errors import ProcessError
from dflash_offline.processes import Job, run_jobs

WAITER = """
import os, signal, subprocess, sys, time
from dflash_offline.progress import Progress
from dflash_offline.stage import SAVING, attach_lifeline
attach_lifeline()
progress = Progress(os.environ["DFLASH_PROGRESS"])
mode = sys.argv[1]
print("on", repr(os.environ["CUDA_VISIBLE_DEVICES"]), "rank", os.environ.get("RANK"), flush=True)
if mode == "ok":
    progress.update(done=1, total=2, text="steps", force=True)
    time.sleep(1.2)
    print("unfinished line", end="")
    progress.update(done=2, total=2, text="steps", force=True)  # the end, between two looks at it
elif mode == "error":
    print("error: no such thing", file=sys.stderr)
    raise SystemExit(1)
elif mode == "deleted":  # somebody removes the root meanwhile
    import shutil
    shutil.rmtree(os.path.dirname(os.environ["DFLASH_PROGRESS"]))
    print("error: no such file", file=sys.stderr)
    raise SystemExit(1)
elif mode == "crash":
    raise RuntimeError("CUDA out of memory")
elif mode == "quit":
    print("last words"); raise SystemExit(7)
elif mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif mode == "loud":
    for i in range(5000):
        print("line", i)
elif mode == "bar":
    print("10%\\r50%\\r100%", "x" * 1000)
elif mode == "bereft":
    print("error: rank 0 of 2: lost contact with rank 1, whose log says why", file=sys.stderr)
    raise SystemExit(1)
elif mode == "late crash":
    time.sleep(1.5)
    raise RuntimeError("CUDA out of memory")
elif mode == "peer":  # a rank whose peer dies fails a little later
    time.sleep(0.05)
    raise RuntimeError("connection closed by peer")
elif mode in ("wait", "stubborn", "saving", "slow saving"):
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"])
    def on_term(*_):
        if mode == "slow saving":
            progress.update(text=SAVING, force=True)
        if "saving" in mode:
            time.sleep(4)  # longer than the grace of other stages
            print("checkpoint written", flush=True)
            raise SystemExit(143)
    if mode != "wait":
        signal.signal(signal.SIGTERM, on_term)
    print("waiting", flush=True)
    end = time.time() + 300
    while time.time() < end:
        time.sleep(0.1)
"""

PIPELINE = """
import os
import luigi
import pipelines
from dflash_offline.processes import Job
from pipelines.base import RunTask, StoppedError, outcome

def job(name, mode, **kwargs):
    return Job(name, "waiter", [mode], **kwargs)

class Replica(RunTask):
    stage = "replica"
    task_key = staticmethod(lambda config: "key")
    replica = luigi.IntParameter()

    def output(self):
        return luigi.LocalTarget(str(self.layout.root / f"done-{self.replica}"))

    def job_name(self):
        return f"replica-{self.replica}"

    def jobs(self):
        return [job(self.job_name(), os.environ.get(f"MODE_{self.replica}", os.environ["MODE"]), peers=2)]

    def stop_requested(self):
        if reason := outcome().failure(self.task_family):
            raise StoppedError(reason)

class Replicas(luigi.WrapperTask, RunTask):
    task_key = staticmethod(lambda config: "key")

    def requires(self):
        return [Replica(config=self.config, replica=i) for i in range(2)]

    def run(self):
        pass

class Ranks(RunTask):
    stage = "ranks"
    task_key = staticmethod(lambda config: "key")
    grace_s = 12.0

    def output(self):
        return luigi.LocalTarget(str(self.layout.root / "done"))

    def jobs(self):
        return [job(f"rank-{i}", os.environ["MODE"], environment={"RANK": str(i)}) for i in range(2)]
"""

# ---------------------------------------------------------------- run_jobs


@pytest.fixture
def waiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """``waiter(mode, name="a")``: a job that runs the module above."""
    (tmp_path / "waiter.py").write_text(WAITER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda mode, name="a", **kwargs: Job(name, "waiter", [mode], **kwargs)


def running_below(me: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            # servers that Python's multiprocessing keeps for this process are of other tests
            if process.status() != psutil.STATUS_ZOMBIE and "multiprocessing" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_lines_reach_log_and_terminal(waiter: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    states: list[dict] = []
    said: list[str] = []
    run_jobs(
        [waiter("ok", "a"), waiter("ok", "b", environment={"RANK": "1"})],
        log_dir=tmp_path / "logs",
        say=said.append,
        on_progress=states.append,
    )
    out = capfd.readouterr().out.splitlines()
    assert sorted(out) == ["a: on '' rank None", "a: unfinished line", "b: on '' rank 1", "b: unfinished line"]
    log = (tmp_path / "logs" / "a.log").read_text()
    assert log.startswith("=== ") and log.splitlines()[0].endswith("-m waiter ok") and log.endswith("on '' rank None\nunfinished line")
    assert len(said) == 2 and "started on the CPU, pid" in said[0] and said[0].endswith(str(tmp_path / "logs" / "a.log"))
    assert any(state.get("b", {}).get("done") == 1 for state in states)
    assert states[-1]["b"]["done"] == 2 and states[-1]["b"]["text"] == "steps"


def test_a_flood_of_lines_is_bounded_on_the_terminal_only(
    waiter: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_jobs([waiter("loud")], log_dir=tmp_path, say=lambda text: None)
    out = capfd.readouterr().out.splitlines()
    assert len(out) < 1000 and any("lines left out; they are in" in line for line in out)
    assert out[-1] == "a: line 4999"
    assert len((tmp_path / "a.log").read_text().splitlines()) == 5002


def test_progress_bars_and_long_lines_are_cut(waiter: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_jobs([waiter("bar")], log_dir=tmp_path, say=lambda text: None)
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("a: 100% xxx") and last.endswith("x ...") and len(last) < 420


@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("error", "a failed: no such thing"),
        ("crash", "a failed: RuntimeError: CUDA out of memory"),
        ("quit", "a failed with exit status 7: last words"),
        ("kill", "a was killed by signal 9 (out of memory?)"),
    ],
)
def test_failure_names_cause_and_log(waiter: Callable[..., Job], tmp_path: Path, mode: str, cause: str) -> None:
    with pytest.raises(ProcessError) as caught:
        run_jobs([waiter(mode)], log_dir=tmp_path, say=lambda text: None)
    assert str(caught.value) == f"{cause}; its log is {tmp_path / 'a.log'}"


def test_a_failure_after_the_root_was_deleted_is_still_told(
    waiter: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessError) as caught:
        run_jobs([waiter("deleted")], log_dir=tmp_path / "logs", say=lambda text: None)
    assert str(caught.value) == f"a failed: no such file; its log is gone: {tmp_path / 'logs'} was deleted while it ran"
    assert "a: error: no such file" in capfd.readouterr().out


def test_a_root_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """Whether as another user's folder or as a read-only file system: the lock file is not what has to be mended."""
    folder = tmp_path / "logs"
    folder.mkdir()
    tmp_path.chmod(0o755)
    code = f"""
import os, pathlib
from pipelines.base import check_writable
from dflash_offline.errors import ProcessError
if os.geteuid() == 0:
    os.setuid(65534)
else:
    os.chmod({str(folder)!r}, 0o555)
try:
    check_writable(pathlib.Path({str(folder)!r}), root=pathlib.Path({str(tmp_path)!r}))
except ProcessError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.startswith(f"{folder}: cannot be written to") and f"root {tmp_path} must be a folder" in found.stdout, found.stderr


def test_an_old_error_in_the_log_is_not_taken_for_this_runs(waiter: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("error: of last week\n")
    with pytest.raises(ProcessError, match="exit status 7: last words"):
        run_jobs([waiter("quit")], log_dir=tmp_path, say=lambda text: None)
    assert (tmp_path / "a.log").read_text().startswith("error: of last week\n=== ")


def test_one_dead_rank_stops_the_others_within_seconds_and_is_the_one_named(waiter: Callable[..., Job], tmp_path: Path) -> None:
    jobs = [waiter("peer", "rank-0"), waiter("kill", "rank-1"), waiter("stubborn", "rank-2")]
    begin = time.monotonic()
    with pytest.raises(ProcessError, match=r"rank-1 was killed by signal 9 \(out of memory\?\)"):
        run_jobs(jobs, log_dir=tmp_path, say=lambda text: None, grace_s=120)
    assert time.monotonic() - begin < 6
    assert running_below(psutil.Process()) == []


@pytest.mark.parametrize("crash", ["crash", "late crash"])
def test_the_rank_that_failed_is_named_not_the_one_that_lost_it(waiter: Callable[..., Job], tmp_path: Path, crash: str) -> None:
    with pytest.raises(ProcessError, match="rank-1 failed: RuntimeError: CUDA out of memory"):
        run_jobs([waiter("bereft", "rank-0"), waiter(crash, "rank-1")], log_dir=tmp_path, say=lambda text: None)


def test_stop_request_ends_the_jobs_with_its_text(waiter: Callable[..., Job], tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ProcessError, match="because of b"):
        run_jobs(
            [waiter("wait")],
            log_dir=tmp_path,
            say=lambda text: None,
            stop_requested=lambda: "because of b" if time.monotonic() - begin > 0.5 else None,
        )
    assert running_below(psutil.Process()) == []


@pytest.mark.parametrize(("mode", "written"), [("slow saving", True), ("saving", False)])
def test_grace_is_extended_while_a_checkpoint_is_being_written(
    waiter: Callable[..., Job], tmp_path: Path, mode: str, written: bool
) -> None:
    def stop() -> str | None:
        log = tmp_path / "a.log"
        return "enough" if log.exists() and "waiting" in log.read_text() else None

    with pytest.raises(ProcessError, match="enough"):
        run_jobs([waiter(mode)], log_dir=tmp_path, say=lambda text: None, grace_s=1, stop_requested=stop)
    assert ("checkpoint written" in (tmp_path / "a.log").read_text()) == written
    assert running_below(psutil.Process()) == []


def test_interrupt_waits_for_a_checkpoint_then_a_second_one_does_not(waiter: Callable[..., Job], tmp_path: Path) -> None:
    def interrupt(*delays: float) -> float:
        (tmp_path / "a.log").unlink(missing_ok=True)

        def send() -> None:
            while not (tmp_path / "a.log").exists() or "waiting" not in (tmp_path / "a.log").read_text():
                time.sleep(0.05)
            for delay in delays:
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGINT)

        sender = threading.Thread(target=send)
        sender.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_jobs([waiter("saving")], log_dir=tmp_path, say=lambda text: None, grace_s=60)
        sender.join()
        assert running_below(psutil.Process()) == []
        return time.monotonic() - begin

    interrupt(0.0)
    assert (tmp_path / "a.log").read_text().endswith("checkpoint written\n")
    interrupt(0.0, 1.0)
    assert "checkpoint written" not in (tmp_path / "a.log").read_text()


# ---------------------------------------------------------------- Luigi killed in every way

Scenario = Callable[["subprocess.Popen[str]", list[psutil.Process], list[psutil.Process]], None]


def group(number: signal.Signals) -> Scenario:
    return lambda luigi, tasks, models: os.killpg(luigi.pid, number)


def times(count: int, pause_s: float, send: Scenario) -> Scenario:
    def repeat(luigi: "subprocess.Popen[str]", tasks: list[psutil.Process], models: list[psutil.Process]) -> None:
        for _ in range(count):
            with contextlib.suppress(ProcessLookupError):
                send(luigi, tasks, models)
            time.sleep(pause_s)

    return repeat


SCENARIOS: dict[str, Scenario] = {
    "Ctrl-C": group(signal.SIGINT),
    "Ctrl-C three times": times(3, 0.7, group(signal.SIGINT)),
    "Ctrl-C three times at once": times(3, 0.15, group(signal.SIGINT)),
    "SIGTERM to luigi": lambda luigi, tasks, models: luigi.terminate(),
    "SIGTERM twice to luigi": times(2, 0.1, lambda luigi, tasks, models: luigi.terminate()),
    "SIGKILL to luigi": lambda luigi, tasks, models: luigi.kill(),
    "terminal closed": group(signal.SIGHUP),
    "SIGKILL to the task processes": lambda luigi, tasks, models: [task.kill() for task in tasks][0],
    "SIGKILL to one task process": lambda luigi, tasks, models: tasks[0].kill(),
    "SIGKILL to one model process": lambda luigi, tasks, models: models[0].kill(),
}
FEW = [
    ("Replicas", "wait", "SIGKILL to luigi"),
    ("Replicas", "wait", "SIGTERM to luigi"),
    ("Replicas", "stubborn", "SIGKILL to one model process"),
    ("Ranks", "wait", "SIGKILL to the task processes"),
    ("Ranks", "stubborn", "Ctrl-C three times"),
]
SWEEP = [
    pytest.param(task, mode, scenario, marks=() if (task, mode, scenario) in FEW else pytest.mark.long)
    for scenario in SCENARIOS
    for task in ("Replicas", "Ranks")
    for mode in ("wait", "stubborn")
]


def start_luigi(folder: Path, task: str, *options: str, **environment: str) -> "subprocess.Popen[str]":
    (folder / "waiter.py").write_text(WAITER)
    (folder / "slow_pipeline.py").write_text(PIPELINE)
    write_run_file(folder, model=folder / "model", files=[folder / "none.jsonl"])
    return subprocess.Popen(
        [sys.executable, "-m", "luigi", "--module", "slow_pipeline", task, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # pytest may run where SIGINT or SIGHUP is ignored; a command at a terminal does not
        preexec_fn=lambda: [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)],
    )


def wait_for_models(luigi: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and luigi.poll() is None:
        if sum("waiting" in log.read_text() for log in (folder / "out" / "logs").rglob("*.log")) == count:
            return
        time.sleep(0.05)
    luigi.kill()
    raise AssertionError(f"the model processes did not start:\n{luigi.communicate()[0]}")


@pytest.mark.parametrize(("task", "mode", "scenario"), SWEEP)
def test_nothing_is_left_running(task: str, mode: str, scenario: str, tmp_path: Path) -> None:
    luigi = start_luigi(tmp_path, task, MODE=mode)
    wait_for_models(luigi, tmp_path, 2)
    below = running_below(psutil.Process(luigi.pid))
    models = [process for process in below if "waiter" in process.cmdline()]
    tasks = [process for process in below if "luigi" in process.cmdline()]
    assert len(models) == 2 and len(tasks) == (2 if task == "Replicas" else 1)
    SCENARIOS[scenario](luigi, tasks, models)
    try:
        gone, alive = psutil.wait_procs(below, timeout=20)  # stubborn ranks get their 12 s of grace
        alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert alive == []
        output = luigi.communicate(timeout=10)[0]
        assert luigi.returncode != 0, output
        if "Ctrl-C" in scenario or scenario == "SIGTERM to luigi":  # as docs/operating.md says
            assert luigi.returncode == (-signal.SIGINT if "Ctrl-C" in scenario else 128 + signal.SIGTERM), output
    finally:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        luigi.kill()
        luigi.wait()


def test_failed_replica_stops_the_other_and_the_last_line_says_why(tmp_path: Path) -> None:
    luigi = start_luigi(tmp_path, "Replicas", MODE="wait", MODE_1="kill")
    output = luigi.communicate(timeout=60)[0]
    assert luigi.returncode == 30
    log = tmp_path / "out" / "logs" / "replica" / "replica-1.log"
    assert output.splitlines()[-1] == f"luigi: error: Replica: replica-1 was killed by signal 9 (out of memory?); its log is {log}"
    assert "Traceback" not in output


def test_process_that_leaves_no_output_is_a_failure(tmp_path: Path) -> None:
    luigi = start_luigi(tmp_path, "Ranks", MODE="ok")
    output = luigi.communicate(timeout=60)[0]
    assert luigi.returncode == 30
    assert "luigi: error: Ranks: rank-0 ended without an error but left no" in output.splitlines()[-1]


def test_checkpoint_is_finished_on_sigterm(tmp_path: Path) -> None:
    luigi = start_luigi(tmp_path, "Ranks", MODE="saving")
    wait_for_models(luigi, tmp_path, 2)
    luigi.terminate()
    output = luigi.communicate(timeout=60)[0]
    assert luigi.returncode == 128 + signal.SIGTERM
    assert "rank-0: checkpoint written" in output and "rank-1: checkpoint written" in output
    assert "Traceback" not in output


def test_same_command_twice_is_refused_and_another_command_waits_for_the_stage(tmp_path: Path) -> None:
    first = start_luigi(tmp_path, "Ranks", MODE="wait")
    wait_for_models(first, tmp_path, 2)
    try:
        again = start_luigi(tmp_path, "Ranks", MODE="wait")
        output = again.communicate(timeout=30)[0]
        assert again.returncode == 10 and "already running" in output
        other = start_luigi(tmp_path, "Ranks", "--no-lock", MODE="wait")
        assert other.stdout is not None
        for line in other.stdout:
            if "waiting for another run of Ranks, held by pid" in line:
                break
        else:
            raise AssertionError("the second command did not wait")
        (tmp_path / "out" / "done").touch()
        first.terminate()
        assert "started on" not in other.communicate(timeout=30)[0]  # it found the output there
        assert other.returncode == 0
    finally:
        first.terminate()
        first.communicate(timeout=30)


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["SIGTERM to luigi", "Ctrl-C", "SIGKILL to luigi"])
@pytest.mark.parametrize("task", ["Replicas", "Ranks"])
def test_nothing_is_left_running_where_psutil_is_not_installed(task: str, scenario: str, tmp_path: Path) -> None:
    """Luigi ends task processes in another way without psutil."""
    (tmp_path / "psutil.py").write_text("raise ImportError\n")
    test_nothing_is_left_running(task, "stubborn", scenario, tmp_path)


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "nohup.py").write_text(
        "import runpy, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv[:] = sys.argv[1:]; "
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    (tmp_path / "waiter.py").write_text(WAITER)
    (tmp_path / "slow_pipeline.py").write_text(PIPELINE)
    write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"])
    luigi = subprocess.Popen(
        [sys.executable, "nohup.py", "luigi", "--module", "slow_pipeline", "Ranks"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MODE": "wait"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_for_models(luigi, tmp_path, 2)
    os.killpg(luigi.pid, signal.SIGHUP)
    time.sleep(1)
    assert luigi.poll() is None and len(running_below(psutil.Process(luigi.pid))) >= 3
    luigi.terminate()
    luigi.communicate(timeout=30)

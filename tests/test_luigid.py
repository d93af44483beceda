"""With a real luigid: what it tells of running tasks, in its JSON and on its page, and that losing it loses nothing else.

``DFLASH_PICTURES=docs/images pytest tests/test_luigid.py`` takes the pictures of the documentation anew.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, opened
from test_terminal import prepared

from dflash_offline.config import RunConfig
from dflash_offline.report.serving import Server, announced
from pipelines.forwarding import message, percentage


class Luigid:
    """The scheduler, listening on this machine."""

    def __init__(self, folder: Path, port: int) -> None:
        command = [sys.executable, "-c", "from luigi.cmdline import luigid; luigid()"]
        options = ["--port", str(port), "--address", "127.0.0.1", "--state-path", str(folder / "state")]
        self.url = f"http://127.0.0.1:{port}"
        self.log = (folder / "luigid.log").open("wb")
        self.process = subprocess.Popen([*command, *options], cwd=folder, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.tasks("RUNNING")
                return
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.1)

    def tasks(self, status: str) -> dict[str, dict[str, Any]]:
        """Tasks in this state, by family."""
        data = urllib.parse.quote(json.dumps({"status": status, "upstream_status": ""}))
        with urllib.request.urlopen(f"{self.url}/api/task_list?data={data}", timeout=10) as answer:
            return {task["name"]: task for task in json.load(answer)["response"].values()}

    def wait_for(self, family: str, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A running task of this family, once it is as wanted."""
        end = time.monotonic() + 40
        while True:
            task = self.tasks("RUNNING").get(family)
            if task is not None and seen(task):
                return task
            assert time.monotonic() < end, task
            time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def luigid(tmp_path: Path) -> Iterator[Luigid]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    (tmp_path / "scheduler").mkdir()
    started = Luigid(tmp_path / "scheduler", port)
    yield started
    started.close()


@pytest.fixture
def start(tmp_path: Path, luigid: Luigid) -> Iterator[Callable[[float], "subprocess.Popen[str]"]]:
    """``start(seconds)``: the command with that scheduler; each of its processes works so long."""
    commands: list[subprocess.Popen[str]] = []

    def run(seconds: float) -> "subprocess.Popen[str]":
        commands.append(
            subprocess.Popen(
                [*prepared(tmp_path), "--scheduler-url", luigid.url],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(tmp_path), "SECONDS": str(seconds)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return commands[-1]

    yield run
    for command in commands:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.communicate(timeout=30)


def test_messages_percentage_and_link_of_a_running_task(
    start: Callable[[float], "subprocess.Popen[str]"], luigid: Luigid, tmp_path: Path
) -> None:
    command = start(2.5)
    task = luigid.wait_for("Capture", lambda task: bool(task["status_message"] and task["tracking_url"]))
    first, *others = task["status_message"].splitlines()
    assert re.match(r"capture +\S+  1 of 4 parts  [\d.]+K tokens/s  ETA 60s$", first), first
    assert [line.split()[0] for line in others] == ["capture-0", "capture-1"] and "writing 2/3" in others[0]
    assert task["progress_percentage"] == 25
    log = tmp_path / "out" / "logs" / "capture" / "capture-0.log"
    assert task["tracking_url"] == log.as_uri() and log.exists()
    with Server(RunConfig.load(tmp_path / "run.toml"), port=0) as server, announced(server):  # now there is a page to link to
        task = luigid.wait_for("Train", lambda task: str(task["tracking_url"]).startswith("http://127.0.0.1:"))
        assert re.search(r"^train +\S+  \d+ of 400 steps  loss", task["status_message"])
    output = command.communicate(timeout=60)[0]
    assert command.returncode == 0, output
    assert set(luigid.tasks("DONE")) == {"Capture", "Train"}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_luigid_that_dies_stops_no_model_process_and_the_command_can_still_be_stopped(
    start: Callable[[float], "subprocess.Popen[str]"], luigid: Luigid, tmp_path: Path, number: signal.Signals
) -> None:
    command = start(1.5)
    luigid.wait_for("Capture", lambda task: True)
    luigid.process.kill()
    end = time.monotonic() + 30
    while not (tmp_path / "out" / "done-capture-1").exists():
        assert command.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    time.sleep(1.0)
    command.send_signal(number)
    output = command.communicate(timeout=15)[0]  # Luigi alone would go on trying to reach it for five minutes
    assert command.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert "UnconsumedParameterWarning" not in output and "Traceback" not in output


@needs_browser
def test_its_page_in_a_browser(start: Callable[[float], "subprocess.Popen[str]"], luigid: Luigid, tmp_path: Path) -> None:
    start(60.0)
    luigid.wait_for("Capture", lambda task: bool(task["status_message"] and task["tracking_url"]))
    pictures = Path(os.environ.get("DFLASH_PICTURES") or tmp_path)
    with opened(tmp_path) as page:
        page.open(f"{luigid.url}/static/visualiser/index.html#tab=workers")
        page.wait_for("document.querySelector('.taskProgressBar') !== null")
        assert page.value("document.querySelector('.taskProgressBar').innerText") == "25%"
        link = page.value('document.querySelector(\'a[title="Track Progress"], a[data-original-title="Track Progress"]\').href')
        assert link.startswith("file://") and link.endswith("capture-0.log")
        page.value("document.querySelector('.worker-table .statusMessage').click()")
        text = page.wait_for("(document.querySelector('#statusMessageModal.in pre') || {}).innerText")
        assert "1 of 4 parts" in text and "capture-1" in text
        page.wait_for("document.querySelector('#statusMessageModal .progress-bar').innerText.trim() === '25%'")
        time.sleep(0.5)  # the window fades in
        page.picture(pictures / "luigid.png", width=1100, height=520)
        assert (pictures / "luigid.png").read_bytes().startswith(b"\x89PNG")


def test_message_holds_no_tags_and_percentage_stays_within_100() -> None:
    state = {"done": 9, "total": 4, "text": "<img src=x> & so on", "numbers": {}}
    assert "<" not in message("corpus", {"corpus": state}) and "img src" in message("corpus", {"corpus": state})
    assert percentage({"a": state}) == 100
    assert percentage({"a": {"done": 1, "total": 4}, "b": {"done": 3, "total": 4}, "c": {"done": None, "total": 4}}) == 50
    assert percentage({"a": {"done": 1, "total": None}}) is None

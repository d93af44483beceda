"""The live page of a run: its numbers over HTTP and for Prometheus, who may read it, and what a browser shows."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, opened
from conftest import write_run_file
from prometheus_client.parser import text_string_to_metric_families

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.figures import finite
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, read_manifest
from dflash_offline.report.facts import thinned
from dflash_offline.report.live import POINTS, Live
from dflash_offline.report.prometheus import exposition
from dflash_offline.report.serving import Server, announced, serving_url

Get = Callable[..., tuple[int, str, http.client.HTTPMessage]]


def getter(port: int) -> Get:
    def get(path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, answer.headers

    return get


@pytest.fixture
def serve() -> Iterator[Callable[[RunConfig], Server]]:
    """``serve(config)``: a server on a free port."""
    started: list[tuple[Server, threading.Thread]] = []

    def start(config: RunConfig) -> Server:
        server = Server(config, port=0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run of which nothing is there yet, not even its corpus."""
    return RunConfig.load(write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"]))


def tell(config: RunConfig, stage: str, name: str, **state: Any) -> None:
    """Write a progress file as a process of that stage does."""
    folder = Layout(config.root_dir).logs(stage)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"done": 3, "total": 9, "text": "at work", "time": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "numbers": {}}
    (folder / f"{name}.progress.json").write_text(json.dumps(whole | state))


def test_numbers_of_a_finished_run(finished_run: Path, serve: Callable[[RunConfig], Server]) -> None:
    config = RunConfig.load(finished_run / "run.toml")
    get = getter(serve(config).server_address[1])
    found = json.loads(get("/data.json")[1])
    assert {stage["state"] for stage in found["stages"]} == {"complete"}
    layout = Layout(config.root_dir)
    rows = [json.loads(line) for line in (layout.drafter(keys.train_key(config)) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [[row["step"], row["loss"], row["tau"]] for row in found["curves"][""]["steps"]] == [
        [r["step"], r["loss"], r["tau"]] for r in steps
    ]
    assert found["curves"][""]["heldout"][-1]["loss"] == pytest.approx(rows[-1]["heldout"]["loss"])
    corpus = read_manifest(layout.corpus(keys.corpus_key(config)))
    assert sum(row["rows"] for row in found["buckets"]) == corpus["counts"]["rows"]
    assert found["parts"]["committed"] == found["parts"]["planned"] == sum(row["parts"] for row in found["replicas"]) > 0
    results = read_json(layout.evaluation(keys.evaluate_key(config)) / "results.json")
    assert found["evaluations"][""]["overall"] == finite(results["overall"])
    status, page, _ = get("/report")
    assert status == 200 and page == (layout.report(keys.report_key(config)) / "report.html").read_text(encoding="utf-8")
    families = {family.name: family for family in text_string_to_metric_families(get("/metrics")[1])}
    (step,) = families["dflash_training_step"].samples
    assert step.value == steps[-1]["step"]
    assert families["dflash_store_tokens"].samples[0].value == found["parts"]["tokens"]
    lengths = {sample.labels["dataset"]: sample.value for sample in families["dflash_acceptance_length"].samples}
    assert lengths == {name: result["acceptance_length"] for name, result in results["datasets"].items()}
    states = {(sample.labels["stage"], sample.labels["state"]): sample.value for sample in families["dflash_stage_state"].samples}
    assert states["train", "complete"] == 1 and states["train", "running"] == 0


def test_a_run_that_has_not_begun_is_followed_as_it_goes(config: RunConfig, serve: Callable[[RunConfig], Server]) -> None:
    server = serve(config)
    server.live._fresh_s = 0.0
    get = getter(server.server_address[1])
    found = json.loads(get("/data.json")[1])
    assert found["parts"]["planned"] is None and found["processes"] == [] and found["warnings"]
    assert get("/report")[0] == 404
    numbers = {"tokens_per_s": 1500.0, "writer_queue": 2, "odd name": 1.0}
    tell(config, "capture", "capture-0", numbers=numbers, warnings=[[time.time(), 'the "disk" is\\slow']], gpu="3")
    found = json.loads(get("/data.json")[1])
    (process,) = found["processes"]
    assert (process["done"], process["gpu"], process["numbers"]) == (3, "3", numbers)
    assert found["warnings"][-1].endswith('capture-0: the "disk" is\\slow')
    families = {family.name: family for family in text_string_to_metric_families(get("/metrics")[1])}
    (rate,) = families["dflash_process_number_tokens_per_s"].samples
    assert rate.value == 1500.0 and rate.labels == {"process": "capture-0", "stage": "capture", "host": socket.gethostname()}
    assert families["dflash_process_up"].samples[0].value == 1 and families["dflash_process_number_odd_name"].samples[0].value == 1
    assert families["dflash_process_total"].samples[0].labels["unit"] == "parts"


def test_labels_with_any_characters_come_back_whole(config: RunConfig) -> None:
    look = Live(config).look()
    odd = 'a"b\\c\nd'
    look["hosts"] = [{"host": odd, "gpus": [{"gpu": "0", "name": "H200", "busy": 0.5, "used_bytes": 10, "total_bytes": None}]}]
    families = {family.name: family for family in text_string_to_metric_families(exposition(look))}
    (busy,) = families["dflash_gpu_busy_ratio"].samples
    assert busy.labels["host"] == odd and busy.value == 0.5
    assert "dflash_gpu_memory_total_bytes" not in families and families["dflash_gpu_memory_used_bytes"].samples[0].value == 10


def test_only_this_machine_may_read_it_and_nothing_can_be_changed(config: RunConfig, serve: Callable[[RunConfig], Server]) -> None:
    server = serve(config)
    assert server.server_address[0] == "127.0.0.1"
    get = getter(server.server_address[1])
    for host in ("evil.example", "evil.example:80", f"localhost.evil.example:{server.server_address[1]}", ""):
        assert get("/data.json", host=host)[0] == 403, host
    assert get("/", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert get("/", method="POST")[0] == 501
    assert get("/../run.toml")[0] == get("/etc/passwd")[0] == 404
    status, text, headers = get("/", method="HEAD")
    assert (status, text) == (200, "") and int(headers["Content-Length"]) > 1000
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"


def test_the_page_needs_nothing_from_elsewhere(config: RunConfig, serve: Callable[[RunConfig], Server]) -> None:
    page = getter(serve(config).server_address[1])("/")[1]
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,"]
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in page, "what a run says is text"


def test_a_damaged_file_is_said_and_does_not_end_the_server(
    finished_run: Path, tmp_path: Path, serve: Callable[[RunConfig], Server]
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    plan = Layout(config.root_dir).plan(keys.capture_key(config), keys.corpus_key(config))
    plan.write_text("{")
    server = serve(config)
    status, text, _ = getter(server.server_address[1])("/data.json")
    assert status == 503 and str(plan) in text and "not valid JSON" in text
    shutil.copy(finished_run / plan.relative_to(tmp_path / "run"), plan)
    assert getter(server.server_address[1])("/data.json")[0] == 200


def test_a_part_is_read_once(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    live = Live(config, fresh_s=0.0)
    first = live.look()
    store = Layout(config.root_dir).store(keys.capture_key(config))
    for manifest in store.glob(f"part-*/{MANIFEST}"):
        manifest.write_text("no more JSON")
    assert live.look()["replicas"] == first["replicas"]


def test_many_rows_are_thinned_and_numbers_that_are_none_are_null() -> None:
    rows = [{"step": step} for step in range(5000)]
    chosen = [row["step"] for row in thinned(rows, POINTS)]
    assert len(chosen) == POINTS and chosen[0] == 0 and chosen[-1] == 4999 and chosen == sorted(set(chosen))
    assert thinned(rows[:7], POINTS) == rows[:7]
    assert finite({"a": [float("nan"), 1.5, float("inf")], "b": (1, "x")}) == {"a": [None, 1.5, None], "b": [1, "x"]}


def test_a_port_in_use_is_one_line(config: RunConfig, serve: Callable[[RunConfig], Server]) -> None:
    port = serve(config).server_address[1]
    with pytest.raises(
        DFlashError, match=rf"port {port} of 127.0.0.1 cannot be used \(Address already in use\); choose another one with --port"
    ):
        Server(config, port=port)


def test_where_it_is_served_is_known_while_it_is(config: RunConfig, serve: Callable[[RunConfig], Server]) -> None:
    layout, server = Layout(config.root_dir), serve(config)
    assert serving_url(layout) is None
    with announced(server):
        assert serving_url(layout) == server.url
        path = layout.all_logs / "serving.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | {"pid": 2**22 + 1}))
        assert serving_url(layout) is None, "that one was killed"
        path.write_text(before)
    assert serving_url(layout) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(config: RunConfig, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dflash_offline.cli", "report", "--serve", "--port", "0", "--config", str(config.source)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(re.match(r"http://127\.0\.0\.1:(\d+)/ ", line).group(1))  # type: ignore[union-attr]
    assert getter(port)("/metrics")[0] == 200
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors
    assert not (Layout(config.root_dir).all_logs / "serving.json").exists()


@needs_browser
def test_a_browser_shows_a_run_that_goes_on(finished_run: Path, tmp_path: Path, serve: Callable[[RunConfig], Server]) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    metrics = Layout(config.root_dir).drafter(keys.train_key(config)) / "metrics.jsonl"
    tell(
        config, "train", "train-0", key=keys.train_key(config), numbers={"loss": 3.5}, text="<b>bold</b>", warnings=[[time.time(), "slow"]]
    )
    with opened(tmp_path) as page:
        page.open(serve(config).url)
        page.wait_for("document.querySelectorAll('#curves path').length >= 3")
        text = page.text()
        for heading in ("Stages", "Training", "Processes", "Capture", "Length buckets", "Draft and verify", "Warnings"):
            assert heading in text
        assert "complete" in text and "3 of 9 steps" in text and "train-0: slow" in text
        assert "<b>bold</b>" in text, "what a process says is shown as text"
        assert "step 3, loss" in text and "left out for" in text
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 77, "loss": 2.5, "tau": 1.5, "tokens_per_s": 10.0}) + "\n")
        page.wait_for("document.querySelector('#last').innerText.includes('step 77, loss 2.500')")
        assert page.value("document.querySelector('#lost').hidden") is True
        assert page.errors == []

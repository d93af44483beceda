"""Capture end to end on the CPU, in real processes: rows, replicas, kills, leases, faults."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import write_run_file
from safetensors.torch import load_file, save_file

from dflash_offline import keys
from dflash_offline.capture import Replica, job
from dflash_offline.capture.__main__ import add_arguments, body
from dflash_offline.capture.forward import Batch
from dflash_offline.capture.job import Backlog
from dflash_offline.cli import main
from dflash_offline.config import RunConfig
from dflash_offline.corpus import prepare
from dflash_offline.errors import StoreError, TargetError
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_manifest
from dflash_offline.plan import make_plan
from dflash_offline.progress import Progress
from dflash_offline.stage import run_stage
from dflash_offline.store import HiddenStateStore, committed_parts
from dflash_offline.target import load_target

SMALL_PARTS = {"part_bytes": 400_000, "shard_bytes": 100_000}


class Run:
    """A run file with its corpus prepared and planned. ``capture`` runs a replica here, ``start`` one in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, RunConfig.load(path)
        self.layout = Layout(self.config.root_dir)
        self.key, self.corpus_key = keys.capture_key(self.config), keys.corpus_key(self.config)
        self.store_path, self.plan_path = self.layout.store(self.key), self.layout.plan(self.key, self.corpus_key)
        self.corpus = prepare(self.config, self.layout.corpus(self.corpus_key), self.corpus_key, Progress(None))
        self.plan = make_plan(self.config, self.corpus, self.store_path, self.plan_path)

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dflash_offline.capture", "--config", str(self.path), *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DFLASH_PROGRESS": str(self.path.with_name("progress.json"))}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def capture(self, progress: Progress | None = None, heard: Callable[[str], None] | None = None, **options: Any) -> list[str]:
        """Run one replica to the end; the lines it said, each of which ``heard`` gets at once."""
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            if heard is not None:
                heard(line)

        progress = progress or Progress(None)
        progress.say = say
        before = signal.getsignal(signal.SIGTERM)
        try:
            Replica(self.config, capture_key=self.key, **({"replica": 0, "replicas": 1, "progress": progress} | options)).run()
        finally:
            signal.signal(signal.SIGTERM, before)
        return lines

    def begin_again(self) -> None:
        """Put the store aside; the plan stays, so the same parts are made again."""
        self.store_path.rename(self.store_path.with_name("aside"))

    def content(self) -> dict[bytes, torch.Tensor]:
        """Every stored row by hash: its hidden states, bit for bit."""
        store = HiddenStateStore(self.store_path)
        return {store[i].sha256: store[i].hidden_states().view(torch.int16) for i in range(len(store))}

    def extra(self, name: str) -> dict[str, Any]:
        return read_manifest(self.store_path / name)["extra"]


def read_until(process: subprocess.Popen[str], words: str, *, timeout_s: float = 120) -> None:
    late = threading.Timer(timeout_s, process.kill)
    late.start()
    try:
        for line in process.stdout:
            if words in line:
                return
    finally:
        late.cancel()
    raise AssertionError(f"ended without saying {words!r}: {process.stderr.read()}")


@pytest.fixture
def run(run_file: Callable[..., Path]) -> Callable[..., Run]:
    return lambda rows=24, **sections: Run(run_file(rows, **sections))


@pytest.mark.parametrize("drafter", [{"mask_token_id": 999_999}, {"num_attention_heads": 3}])
def test_a_drafter_that_cannot_be_trained_is_refused_by_plan_and_by_capture(
    run_file: Callable[..., Path], capfd: pytest.CaptureFixture[str], drafter: dict[str, int]
) -> None:
    """Also where corpus and plan are there already, made for another drafter."""
    made = Run(run_file(8))
    wrong = Run(run_file(8, drafter=drafter))
    assert wrong.plan_path == made.plan_path
    with pytest.raises(SystemExit, match="^1$"):
        run_stage("capture", body, ["--config", str(wrong.path)], key=keys.capture_key, add_arguments=add_arguments)
    error, name = capfd.readouterr().err, next(iter(drafter))
    assert error.startswith("error: ") and error.count("\n") == 1 and name in error
    assert not wrong.store_path.exists()
    planned = CliRunner().invoke(main, ["plan", "--config", str(wrong.path)])
    assert (planned.exit_code, planned.stderr) == (1, error) and planned.stdout == ""


def same_content(a: dict[bytes, torch.Tensor], b: dict[bytes, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_stored_rows_equal_a_plain_forward_of_each_row(run: Callable[..., Run], tiny_target: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = run(16, store=SMALL_PARTS, target={"capture_layer_ids": [2, 0]})
    out = made.capture()
    assert out[0].startswith("Target 0 on cpu loaded in") and "self-check passed" in out[1]
    assert sum("committed," in line for line in out) == len(made.plan.parts) > 2
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    store = HiddenStateStore(made.store_path)
    assert len(store) == len(made.corpus) > 12
    for index in range(len(made.corpus)):
        row = made.corpus.row(index)
        sample = store[store.find(row.sha256)]
        assert (
            np.array_equal(sample.input_ids, row.input_ids)
            and np.array_equal(sample.loss_mask, row.loss_mask)
            and sample.bucket == row.bucket
        )
        with torch.inference_mode():
            plain = model(torch.from_numpy(row.input_ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        for k, layer_id in enumerate((2, 0)):
            want, got = plain[layer_id + 1][0], sample.hidden_states()[:, k].float()
            rms = want.pow(2).mean(-1, keepdim=True).sqrt()
            assert ((got - want).abs() <= want.abs() * 2**-8 + 1e-5 * rms).all()  # 2**-8: half a step of bf16 at most


def test_second_run_does_nothing_and_loads_nothing(run: Callable[..., Run]) -> None:
    made = run(8)
    made.capture()
    assert made.capture() == []
    assert not list(made.layout.leases(made.key).iterdir())


def test_three_replicas_give_what_one_gives(run: Callable[..., Run]) -> None:
    made = run(24, store=SMALL_PARTS)
    replicas = [made.start("--replica", str(i), "--replicas", "3") for i in range(3)]
    outputs = [process.communicate(timeout=120) for process in replicas]
    assert [process.returncode for process in replicas] == [0, 0, 0], [err for _, err in outputs]
    assert sum(out.count("committed,") for out, _ in outputs) == len(made.plan.parts)
    together = made.content()
    made.begin_again()
    made.capture()
    assert same_content(together, made.content())


def test_killed_at_any_moment_and_run_again(run: Callable[..., Run]) -> None:
    made = run(24, store={"part_bytes": 1_000_000, "shard_bytes": 50_000})
    for delay in (0.0, 0.15):
        process = made.start()
        read_until(process, "self-check")
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert len(committed_parts(made.store_path)) < len(made.plan.parts), "nothing was left to kill"
    made.capture()
    killed = made.content()
    made.begin_again()
    made.capture()
    assert same_content(killed, made.content())


def test_sigterm_releases_the_lease_leaves_at_once_and_others_redo_nothing(run: Callable[..., Run]) -> None:
    made = run(24, store=SMALL_PARTS)
    process = made.start("--replica", "0", "--replicas", "2")
    read_until(process, "committed,")
    start = time.monotonic()
    process.terminate()
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 143 and time.monotonic() - start < 5
    assert "stopped" in out and json.loads(made.path.with_name("progress.json").read_text())["ended"]
    assert all(path.stat().st_mtime == 0 for path in made.layout.leases(made.key).glob("*.lease"))
    done = {name: read_manifest(made.store_path / name)["digest"] for name in committed_parts(made.store_path)}
    assert 0 < len(done) < len(made.plan.parts)
    made.capture(replica=1, replicas=5)
    assert {name: read_manifest(made.store_path / name)["digest"] for name in done} == done
    assert len(committed_parts(made.store_path)) == len(made.plan.parts)


def test_two_hosts_share_a_folder_and_one_dies(run: Callable[..., Run]) -> None:
    """Another host's process cannot be asked whether it lives: its lease is taken over once it is silent."""
    made = run(24, store=SMALL_PARTS)
    there = made.start("--host", "there", "--lease-expires", "2")
    read_until(there, "loaded in")
    there.send_signal(signal.SIGKILL)
    there.communicate()
    assert list(made.layout.leases(made.key).glob("*.lease"))
    out = made.capture(host="here", lease_expires_s=2)
    assert any("over from replica 0 (pid" in line and "on there)" in line for line in out)
    assert sorted(committed_parts(made.store_path)) == [part.name for part in made.plan.parts]


def test_stopped_process_is_overtaken_and_gives_way(run: Callable[..., Run]) -> None:
    """SIGSTOP, takeover by another host, SIGCONT: the sleeper sees that it lost its part and writes nothing of it."""
    made = run(24, store={"part_bytes": 100_000_000, "shard_bytes": 50_000})
    sleeper = made.start("--host", "there", "--lease-expires", "2")
    read_until(sleeper, "self-check")
    sleeper.send_signal(signal.SIGSTOP)

    def wake(line: str) -> None:
        if "over from replica 0" in line:
            sleeper.send_signal(signal.SIGCONT)

    try:
        lines = made.capture(heard=wake, host="here", lease_expires_s=2)
    finally:
        sleeper.send_signal(signal.SIGCONT)
    assert any("over from replica 0" in line for line in lines)
    _, error = sleeper.communicate(timeout=60)
    assert sleeper.returncode == 0, error
    assert len(HiddenStateStore(made.store_path)) == len(made.corpus)


def poison(folder: Path, source: Path, token: int, value: float) -> Path:
    """A copy of a target whose embedding holds ``value`` in the row of one token."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = value
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_row_that_is_not_finite_is_named_and_never_written(run: Callable[..., Run], tiny_target: Path, tmp_path: Path) -> None:
    whole = run(24, store=SMALL_PARTS)
    last = whole.corpus.row(whole.plan.parts[-1].rows[-1])
    others = np.concatenate([whole.corpus.row(i).input_ids for i in range(len(whole.corpus)) if i != last.index])
    token = next(int(t) for t in last.input_ids if t not in others)  # only in the row that comes last
    model = poison(tmp_path / "bad", tiny_target, token, float("nan"))
    made = Run(write_run_file(tmp_path / "poisoned", model=model, files=[tmp_path / "corpus.jsonl"], store=SMALL_PARTS))
    with pytest.raises(TargetError, match=rf"after layer 0 is not finite in row {last.index} \(.*corpus.jsonl line \d+\)"):
        made.capture()
    assert sorted(committed_parts(made.store_path)) == [part.name for part in made.plan.parts[:-1]]


def test_memory_that_runs_out_while_rows_leave_the_gpu_makes_batches_smaller(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, hidden = run(24, store=SMALL_PARTS), job._hidden

    def limited(batch: Batch, rows: range) -> torch.Tensor:
        if len(batch.lengths) > 1 and sum(batch.lengths) > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(batch, rows)

    monkeypatch.setattr(job, "_hidden", limited)
    lines = made.capture()
    told = [line for line in lines if "out of memory while rows were taken off the GPU" in line]
    assert told and len(made.content()) == len(made.corpus)
    halved = [made.extra(part.name)["tokens_per_batch_halved_to"] for part in made.plan.parts]
    assert all(0 < limit <= 600 for limit in halved[-1].values())

    def never(batch: Batch, rows: range) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(job, "_hidden", never)
    made.begin_again()
    with pytest.raises(TargetError, match=r"no GPU memory is left to take a single row of \d+ tokens off it"):
        made.capture()


def test_part_manifest_says_who_made_it_and_how_fast(run: Callable[..., Run], tmp_path: Path) -> None:
    made = run(24, store=SMALL_PARTS)
    began = time.monotonic()
    made.capture(replica=3, replicas=4)
    wall, seconds = time.monotonic() - began, [made.extra(part.name)["seconds"] for part in made.plan.parts]
    assert len(seconds) > 2 and 0 < sum(seconds) <= wall, "parts overlap, but no second counts twice"
    for part in made.plan.parts:
        extra = made.extra(part.name)
        assert extra["replica"] == 3 and extra["device"] == "cpu" and extra["tokens"] == part.tokens
        assert extra["tokens_per_s"] > 0 and 0 <= extra["padding"] < 0.2 and extra["attention"] == "sdpa"


def test_seconds_of_overlapping_parts_add_up_to_the_time_they_took() -> None:
    backlog = Backlog(1)
    began = time.monotonic()
    time.sleep(0.05)
    first = backlog.end(began)
    second = backlog.end(began + 0.02)  # begun while the first was at work
    assert 0.05 <= first < 0.5 and second <= time.monotonic() - began - first
    time.sleep(0.05)
    idle = time.monotonic()
    assert backlog.end(idle) < 0.04, "time before a part began is nobody's"


def test_last_hidden_is_one_more_tap(run: Callable[..., Run], tiny_target: Path) -> None:
    made = run(6, store={"store_last_hidden": True}, target={"capture_layer_ids": [1]})
    made.capture()
    store = HiddenStateStore(made.store_path)
    target = load_target(tiny_target, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[1, 3])
    sample = store[0]
    want = target.capture(torch.from_numpy(np.asarray(sample.input_ids, np.int64))[None])[0]
    torch.testing.assert_close(sample.hidden_states().float(), want, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_other_codecs_and_statistics_that_are_measured_once(run: Callable[..., Run], codec: str) -> None:
    made = run(12, store=SMALL_PARTS | {"codec": codec})
    made.capture()
    path = made.store_path.with_name("channel_statistics.safetensors")
    assert path.exists() == (codec != "bf16")
    once = path.read_bytes() if path.exists() else b""
    first = made.content()
    made.begin_again()
    made.capture()
    assert (path.read_bytes() if path.exists() else b"") == once
    assert same_content(first, made.content())
    if codec != "bf16":
        for name in (path, made.store_path / made.plan.parts[0].name):
            name.rename(name.with_name("gone"))
        with pytest.raises(StoreError, match="missing; the channel statistics"):
            made.capture()


def test_progress_file_tells_parts_speed_and_time_left(run: Callable[..., Run], tmp_path: Path) -> None:
    made = run(12)
    made.capture(progress=Progress(tmp_path / "progress.json"))
    state = json.loads((tmp_path / "progress.json").read_text())
    assert state["done"] == state["total"] == len(made.plan.parts)
    assert state["numbers"]["tokens_per_s"] > 0 and state["numbers"]["eta_s"] == 0


def test_a_replica_that_waits_says_for_how_many_parts(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(4)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    progress = Progress(None)
    replica = Replica(made.config, capture_key=made.key, replica=1, replicas=2, progress=progress)
    for missing, text in ((["part-00000"], "1 part, part-00000"), (["part-00000", "part-00001"], "2 parts, part-00000")):
        replica._wait_for_others(missing)
        assert progress.state["text"] == f"waiting for {text} held by another replica"

"""Training in one process: from the store to a finished drafter, and what stops it."""

import json
import re
import signal
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_runs as runs
from safetensors.torch import load_file

from dflash_offline import keys
from dflash_offline.checkpoint import newest
from dflash_offline.config import RunConfig
from dflash_offline.dataset import BatchShape, DeviceBatch, Job, Prefetcher
from dflash_offline.drafter import Drafter, DrafterShape
from dflash_offline.errors import CheckpointError, TrainError
from dflash_offline.figures import seconds_text
from dflash_offline.manifest import damaged_files, read_manifest, write_manifest
from dflash_offline.progress import Progress
from dflash_offline.replay import ReplayResult, replay
from dflash_offline.target import load_embedding_and_head
from dflash_offline.train import heldout, loop, records, speed, state
from dflash_offline.train.loop import Trainer
from dflash_offline.train.proof import prove
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.setup import prepare
from dflash_offline.train.statistics import RankNumbers

LINE = re.compile(
    r"\[\d+(\.\d|m\d\d)?[smhd]\] step=\d+ loss=\d+\.\d\d acc=[01]\.\d{3} streak=\d+\.\d\d tau=\d+\.\d\d lr=\d\.\de-\d\d noise=\d\.\d{4} "
    r"\| read=\d+MB/s wait=\d+% train=\d+\.\dKtok/s \| epoch~\d+\.\d\d ETA=\d+(\.\d|m\d\d)?[smhd]"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations)


@pytest.fixture
def make_run(tmp_path: Path, inputs: Path, tiny_target: Path):
    return lambda name="run", **train: runs.make_run(tmp_path / name, inputs, model=tiny_target, train=train)


@pytest.fixture
def make_trainer(make_run):
    def make(**train: Any) -> Trainer:
        config = RunConfig.load(make_run(**train))
        ranks = Ranks()
        return Trainer(prepare(config, keys.train_key(config), ranks, torch.device("cpu")), ranks, Progress(None))

    return make


def take_step(trainer: Trainer, number: int = 0, jobs: list[Job] | None = None) -> None:
    """One step, from its own micro-batches or from ``jobs``."""
    step = trainer.order.step(number)
    if jobs is not None:
        trainer.jobs = lambda step: jobs  # type: ignore[method-assign]
    with Prefetcher(trainer.jobs(step), trainer.setup.loader.load) as reader:
        trainer.train_step(step, trainer.feed(reader, training=True))


def load(trainer: Trainer, job: Job) -> DeviceBatch:
    with Prefetcher([job], trainer.setup.loader.load) as reader:
        return trainer.feed(reader, training=False).take()


def test_training_leaves_a_finished_drafter(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = make_run(epochs=2, evaluate_every=3, checkpoint_every=4, lr=3e-3, noise=0.01, ema=0.9)
    folder = runs.train_here(run_file)
    manifest = read_manifest(folder, kind="drafter")
    assert damaged_files(folder, manifest, deep=True) == []
    shape = DrafterShape.from_dict(json.loads((folder / "drafter" / "shape.json").read_text()))
    tensors = load_file(folder / "drafter" / "model.safetensors")
    drafter = Drafter(shape)
    drafter.load_state_dict(tensors, strict=True)
    assert all(tensor.dtype == torch.float32 and bool(tensor.isfinite().all()) for tensor in tensors.values())
    rows = runs.metrics(run_file)
    trained, evaluated = [row for row in rows if "loss" in row], [row for row in rows if "heldout" in row]
    steps = manifest["steps"]
    assert [row["step"] for row in trained] == list(range(1, steps + 1))
    assert evaluated[-1]["step"] == steps and evaluated[0]["step"] == 3
    assert manifest["heldout"] == evaluated[-1]["heldout"] and manifest["metrics"] == trained[-1]
    assert sum(row["loss"] for row in trained[-3:]) < sum(row["loss"] for row in trained[:3])
    assert trained[0]["epoch"] > 0 and trained[-1]["epoch"] == 2 and trained[-1]["eta_s"] == 0
    corpus = runs.open_corpus(run_file)
    assert trained[-1]["tokens"] == 2 * int(corpus.lengths[~corpus.heldout].sum()) == manifest["tokens"]
    assert [path for path in (folder / "tensorboard").iterdir() if path.stat().st_size > 100]
    said = capsys.readouterr().out
    assert ", 1 rank on the CPU, attention sdpa; ready after " in said
    lines = [line for line in said.splitlines() if " loss=" in line and "held-out" not in line]
    assert len(lines) == steps and all(LINE.fullmatch(line) for line in lines), lines
    # the exported weights are the average, not the masters
    saved, _ = newest(folder / "checkpoints", key=manifest["key"])
    assert saved is not None and saved.step == steps
    state = load_file(saved.folder / "state.safetensors")
    flat = torch.cat([tensors[name].flatten() for name, _ in drafter.named_parameters()])
    assert torch.equal(flat, state["ema"]) and not torch.equal(flat, state["master"])


def test_step_normalises_by_the_weights_of_all_micro_batches(make_trainer) -> None:
    trainer = make_trainer(micro_batches_per_step=3)
    number = next(n for n in range(trainer.order.total_steps) if len(trainer.order.step(n).micro_batches) == 3)
    step = trainer.order.step(number)
    outputs = [trainer.losses(load(trainer, job)) for job in trainer.jobs(step)]
    total = sum(out.loss_sum for out in outputs) / sum(float(out.weight_sum) for out in outputs)
    weights = trainer.setup.weights
    gradients = torch.autograd.grad(total, weights.parameters)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    take_step(trainer, number)
    assert trainer.reporter.last_row["grad_norm"] == pytest.approx(float(expected), rel=1e-5)
    assert trainer.reporter.last_row["loss"] == pytest.approx(float(total.detach()), rel=1e-6)
    assert not weights.gradient.any()


def test_micro_batch_without_anchors_changes_nothing(make_trainer) -> None:
    trainer = make_trainer()
    full = trainer.jobs(trainer.order.step(0))[0]
    empty = replace(full, number=1, anchors=[np.zeros(0, np.int64)] * len(full.rows))
    before = trainer.setup.weights.master.clone()
    for jobs in ([empty], []):
        take_step(trainer, jobs=jobs)
        assert trainer.reporter.last_row["loss"] == 0 and trainer.reporter.last_row["grad_norm"] == 0
        assert torch.equal(trainer.setup.weights.master, before)
    take_step(trainer, jobs=[full, empty])
    assert not torch.equal(trainer.setup.weights.master, before) and trainer.setup.weights.master.isfinite().all()
    other = make_trainer()
    take_step(other, jobs=[full])
    assert other.reporter.last_row["loss"] == trainer.reporter.last_row["loss"] > 0
    assert torch.equal(other.setup.weights.master, trainer.setup.weights.master)


def test_one_nan_in_the_store_stops_before_the_update(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(checkpoint_every=1)
    row = int(trainer.order.step(1).micro_batches[0][-1])
    stored, read = int(trainer.setup.loader.stored[row]), trainer.setup.loader.store.read_encoded

    def poisoned(indices: list[int], layers: list[int]):
        batch = read(indices, layers)
        if stored in indices:
            token = int(batch.offsets[indices.index(stored)]) + 2
            codec = trainer.setup.loader.store.codec
            hidden = codec.decode(batch.arrays)
            hidden[token, 1, 5] = float("nan")
            for name, array in codec.encode(hidden).items():
                batch.arrays[name].copy_(array)
        return batch

    monkeypatch.setattr(trainer.setup.loader.store, "read_encoded", poisoned)
    take_step(trainer, 0)
    before = trainer.setup.weights.master.clone()
    with pytest.raises(TrainError, match=rf"step 2: .* not finite.*row {row} \(.*corpus\.jsonl:\d+, [0-9a-f]{{8}}\), layer 1, token 2\."):
        take_step(trainer, 1)
    assert torch.equal(trainer.setup.weights.master, before)
    assert trainer.setup.optimizer.steps_taken == 1


def test_no_checkpoint_is_written_from_a_diverged_run(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop.block_loss
    calls = []

    def exploding(*args: Any, **options: Any):
        calls.append(1)
        out = real(*args, **options)
        return out if len(calls) < 5 else type(out)(out.loss_sum * float("nan"), *(out.weight_sum, out.correct, out.nll, out.probability))

    monkeypatch.setattr(loop, "block_loss", exploding)
    run_file = make_run(checkpoint_every=1, micro_batches_per_step=1)
    cause = r"Last checkpoint: step 4\. All hidden states of the step are finite: try a smaller \[train\] lr\. Its samples: row \d+ "
    with pytest.raises(TrainError, match="step 5: .*" + cause):
        runs.train_here(run_file)
    assert not (runs.drafter_folder(run_file) / "manifest.json").exists()


def test_incomplete_capture_is_refused(tmp_path: Path, tiny_target: Path, conversations: list[dict[str, Any]]) -> None:
    inputs = runs.make_inputs(tmp_path, model=tiny_target, conversations=conversations, captured=5)
    total = len(runs.open_corpus(inputs / "run.toml"))
    with pytest.raises(TrainError, match=f"capture incomplete, 5/{total} rows"):
        runs.train_here(inputs / "run.toml")


def test_gpu_run_file_without_a_gpu_is_refused(make_run) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainError, match="sees no GPU"):
        runs.train_here(make_run(gpus=[0]))


def test_too_slow_a_run_stops(make_run) -> None:
    run_file = make_run(epochs=20, micro_batches_per_step=1, min_tokens_per_s=1e12, log_every=100)
    with pytest.raises(TrainError, match="below .train. min_tokens_per_s"):
        runs.train_here(run_file)


def test_checkpoint_of_another_data_order_is_refused(make_run) -> None:
    run_file = make_run(max_steps=2, checkpoint_every=1)
    folder = runs.train_here(run_file)
    state = folder / "checkpoints" / "step-000002"
    content = json.loads((state / "state.json").read_text())
    content["facts"]["shape"] = "another"
    (state / "state.json").write_text(json.dumps(content))
    manifest = read_manifest(state)
    write_manifest(state, kind="checkpoint", key=manifest["key"])
    with pytest.raises(CheckpointError, match="shape was 'another'"):
        runs.train_here(run_file)


def test_resuming_on_another_machine_is_said(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = make_run(max_steps=2)
    state = runs.train_here(run_file) / "checkpoints" / "step-000002"
    content = json.loads((state / "state.json").read_text())
    content["machine"] |= {"torch": "1.13.0", "cuda": "11.7", "device": "GTX 970"}
    (state / "state.json").write_text(json.dumps(content))
    write_manifest(state, kind="checkpoint", key=read_manifest(state)["key"])
    capsys.readouterr()
    runs.train_here(run_file)
    said = capsys.readouterr().out
    for name, before in (("torch", "1.13.0"), ("cuda", "11.7"), ("device", "GTX 970")):
        assert f"note: {name} was {before} before and is " in said


def test_what_is_compiled_after_warm_up_is_counted_and_said(
    make_trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(log_every=1)
    trainer.warmed_up, step = True, trainer.order.step(0)
    monkeypatch.setattr(loop, "compiled_graphs", lambda: 2)
    take_step(trainer, 0)
    trainer._count_recompiles(step)
    assert (
        f"warning: rank 0: 2 graphs compiled after warm-up, in step 1 of {trainer.order.shapes[step.bucket]}: " in capsys.readouterr().out
    )
    for number in (1, 2):
        take_step(trainer, number)
        trainer._count_recompiles(trainer.order.step(number))
        assert trainer.reporter.last_row["recompiles"] == trainer.progress.state["numbers"]["recompiles"] == 2
    assert "compiled after" not in capsys.readouterr().out


def test_heldout_batches_use_the_graphs_of_training_and_leave_nothing_behind(make_trainer) -> None:
    """Equal to the last bit to a pass without gradients; what that pass saves for backward is gone, and no gradient appears."""
    trainer = make_trainer()
    setup, batch, modes, kept = trainer.setup, load(trainer, trainer.heldout_jobs[0]), [], []
    setup.drafter.layers[0].register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()  # an operator's own output, kept as it is, would be a cycle
            kept.append(weakref.ref(self))

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        out = trainer.losses(batch)
        assert not torch.is_grad_enabled()
    assert kept and not any(saved() for saved in kept)
    assert modes == [True] and not out.loss_sum.requires_grad
    assert all(parameter.grad is None for parameter in setup.weights.parameters) and not setup.weights.gradient.any()
    with torch.no_grad():
        anchors = setup.embedding[batch.anchor_tokens]
        plain = setup.drafter(batch.hidden_states, anchors, batch.blocks, mask_embedding=trainer.mask_embedding, trained_slots_only=True)
        assert torch.equal(trainer.drafted(batch, anchors), plain)
        live = batch.blocks.num_live
        loss = loop.block_loss(plain, setup.head, batch.labels, batch.supervised, objective=setup.objective, num_live=live)
    assert torch.equal(loss.loss_sum, out.loss_sum) and torch.equal(loss.nll, out.nll) and torch.equal(loss.correct, out.correct)
    assert trainer.losses(batch).loss_sum.requires_grad


def test_heldout_replay_is_that_of_the_evaluator(make_trainer) -> None:
    trainer = make_trainer(epochs=10, lr=1e-2, anchors=64)
    for number in range(trainer.order.total_steps):
        take_step(trainer, number)
    trainer.evaluate()
    scored = heldout.Scores()
    with torch.no_grad():
        for job in trainer.heldout_jobs:
            batch = load(trainer, job)
            scored.add(batch, trainer.losses(batch))
    setup = trainer.setup
    summary = scored.summary(setup.corpus)
    embedding, head = load_embedding_and_head(Path(setup.config.target.model), dtype=torch.float32, device="cpu")
    results = []
    for row in heldout.choose_rows(setup.corpus, 64):
        sample = setup.loader.store[int(setup.loader.stored[row])]
        hidden, ids, mask = sample.hidden_states().flatten(1).float(), torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask)
        results.append(replay(setup.drafter, embedding, head, hidden, ids, mask))
    pooled = ReplayResult.pooled(results)
    assert summary["tau_replay"] == pytest.approx(pooled.tau, rel=1e-9) and pooled.tokens > 1.02 * pooled.steps
    low, high = summary["tau_replay_interval"]
    assert low <= summary["tau_replay"] <= high and low < high


def test_heldout_jobs_cover_every_anchor_once(make_trainer) -> None:
    trainer = make_trainer(slots_per_batch=64)
    corpus, seen = trainer.setup.corpus, {}
    for job in trainer.heldout_jobs:
        assert sum(len(positions) for positions in job.anchors) <= job.shape.blocks
        assert sum(int(corpus.lengths[row]) for row in job.rows) <= job.shape.context
        for row, positions in zip(job.rows, job.anchors, strict=True):
            seen.setdefault(int(row), []).extend(positions.tolist())
    assert sorted(seen) == np.flatnonzero(corpus.heldout).tolist()
    for row, positions in seen.items():
        mask = np.array(corpus.row(row).loss_mask)
        assert positions == [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def test_a_long_held_out_row_has_a_number_of_blocks_that_training_has() -> None:
    shapes = [BatchShape(0, 256, 1000), BatchShape(1, 512, 1024), BatchShape(2, 512, 64)]
    sizes = {"tokens_per_batch": 4096}
    assert heldout.shape_for(300, shapes, blocks=1020, **sizes) == shapes[1]
    assert heldout.shape_for(600, shapes, blocks=1020, **sizes) == BatchShape(-1, 4096, 1024)
    assert heldout.shape_for(600, shapes, blocks=1025, **sizes) == BatchShape(-1, 4096, 1024)
    assert heldout.shape_for(600, shapes, blocks=512, **sizes) == BatchShape(-1, 4096, 512)


def test_walk_by_hand() -> None:
    # one answer at tokens 3..9: first step takes 2 + 1, the second would take 5 but three are left
    assert heldout.walk({3: 2, 6: 4, 9: 0}, [(3, 10)]) == (6, 2)
    assert heldout.walk({3: 0, 4: 0, 5: 0}, [(3, 6)]) == (2, 2)
    assert heldout.walk({}, []) == (0, 0)


def test_status_line_shape() -> None:
    row = {"elapsed_s": 840.0, "step": 8, "loss": 9.81, "acc": 0.031, "streak": 0.12, "tau": 1.12, "lr": 6e-5, "noise": 0.0003}
    row |= {"read_bytes_per_s": 412e6, "wait_share": 0.01, "tokens_per_s": 23500.0, "epoch": 0.01, "eta_s": 1.3 * 3600}
    line = (
        "[14m] step=8 loss=9.81 acc=0.031 streak=0.12 tau=1.12 lr=6.0e-05 noise=0.0003 "
        "| read=412MB/s wait=1% train=23.5Ktok/s | epoch~0.01 ETA=1.3h"
    )
    assert records.status_line(row) == line
    assert records.status_line(row | {"slow_ranks": {"2": 1.42, "5": 2.0}}) == line + " | slow: rank 2 x1.4, rank 5 x2.0"


def test_heldout_line_counts() -> None:
    held: dict[str, Any] = {"loss": 2.5, "acc": 0.25, "tau": 1.5, "tau_replay": None, "rows": 1, "blocks": 1}
    line = "[12s] step=7 held-out: loss=2.50 acc=0.250 tau=1.50 (1 conversation, 1 block)"
    assert records.heldout_line({"elapsed_s": 12, "step": 7, "heldout": held}) == line
    many = held | {"rows": 2, "blocks": 1319}
    assert records.heldout_line({"elapsed_s": 12, "step": 7, "heldout": many}).endswith(" (2 conversations, 1,319 blocks)")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(45.2, "45s"), (119.4, "119s"), (119.7, "2m00s"), (128, "2m08s"), (599.4, "9m59s"), (599.6, "10m")],
        *[(840, "14m"), (4680, "1.3h"), (216_000, "2.5d")],
    ],
)
def test_lines_of_one_minute_differ_while_a_run_is_young(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_throughput_watch_says_once_what_got_slow() -> None:
    watch = speed.ThroughputWatch(skip=1)
    for _ in range(30):
        assert watch.step("bucket 1", tokens=1000, seconds=0.1, spent={"waiting": 0.01, "the step": 0.09}) is None
    said = [watch.step("bucket 1", tokens=1000, seconds=1.0, spent={"waiting": 0.9, "the step": 0.1, "reading": 0.95}) for _ in range(40)]
    (line,) = [line for line in said if line]
    assert re.match(
        r"warning: training slowed down to [45]\.\d Ktok/s from 10\.0 in bucket 1; of a step's 0\.\d{3}s: waiting \d\d%, ", line
    )
    assert "reading" in line
    assert watch.rate == pytest.approx(1000)


def ranks_of(*micro_batch_s: float, memory: tuple[float, ...] | None = None) -> list[RankNumbers]:
    memory = memory or (10 << 30,) * len(micro_batch_s)
    return [RankNumbers(2.0 + rank, (2.0 + rank) * each, memory=memory[rank]) for rank, each in enumerate(micro_batch_s)]


def test_ranks_that_differ_are_named_once() -> None:
    watch = speed.RankWatch(skip=0)
    alike = [line for _ in range(60) for line in watch.step(ranks_of(0.10, 0.11, 0.119))]  # uneven shares are no difference
    assert alike == [] and watch.slow == {} and [speed.micro_batch_s for speed in watch.speeds] == pytest.approx([0.10, 0.11, 0.119])
    said = [line for _ in range(60) for line in watch.step(ranks_of(0.2, 0.1, 0.13, memory=(60 << 30, 90 << 30, 61 << 30)))]
    assert watch.slow == pytest.approx({0: 2.0, 2: 1.3}) and len(said) == 3
    assert said[0].startswith("warning: ranks differ in speed: rank 0 takes 0.200s for a micro-batch, 2.00 times as long as rank 1")
    assert said[2].startswith("warning: ranks differ in memory: 90.0 GiB are in use where rank 1 runs, 60.0 GiB where rank 0 does")
    assert speed.RankWatch().step(ranks_of(0.1)) == []


def test_what_takes_too_long_is_said_once() -> None:
    said: list[str] = []
    with speed.StallWatch(said.append, after_s=0.2) as stall:
        for _ in range(30):
            stall.at("computing")
            time.sleep(0.01)
        assert said == []
        stall.at("waiting for data")
        time.sleep(0.7)
    assert said == ["has been waiting for data for 0 minutes"]


def test_a_reader_that_hangs_is_said(make_trainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loop, "StallWatch", partial(speed.StallWatch, after_s=0.2))
    trainer = make_trainer(max_steps=2)
    state.resume(trainer)
    load = trainer.setup.loader.load
    monkeypatch.setattr(trainer.setup.loader, "load", lambda job: (time.sleep(0.8 if job.step == 1 else 0), load(job))[1])
    trainer.run()
    assert "warning: rank 0 has been waiting for data for 0 minutes, at step 2\n" in capsys.readouterr().out


def test_records_drop_what_a_resumed_run_will_write_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    files = records.Records(tmp_path, after=1)
    files.write({"step": 2, "loss": 1.25})
    files.close()
    assert [row["loss"] for row in records.read_metrics(tmp_path / "metrics.jsonl")] == [2.0, 1.25]


def test_attention_is_checked_against_the_dense_reference(make_trainer) -> None:
    trainer = make_trainer()
    assert 'attention "sdpa" checked against the dense reference' in prove(trainer)
    path = trainer.setup.drafter.attention
    right = path.plan
    path.plan = lambda blocks, window: right(replace(blocks, context_end=blocks.context_end + 1), window)  # sees its own anchor
    with pytest.raises(TrainError, match="outputs differ from the dense reference by .* training with it would be wrong"):
        prove(trainer)


def test_a_reading_process_changes_nothing(make_run) -> None:
    files = [make_run(reader, reader=reader, max_steps=4, evaluate_every=2, log_every=1) for reader in ("threads", "process")]
    for run_file in files:
        with runs.RankProcesses(run_file) as rank:
            ((status, _, err),) = rank.output()
        assert status == 0 and not err, err
    assert files[0] != files[1] and runs.losses(files[0]) == runs.losses(files[1]) != []


@pytest.mark.parametrize("reader", ["threads", "process"])
def test_sigterm_saves_and_exits_143(make_run, reader: str) -> None:
    run_file = make_run(epochs=200, log_every=1, checkpoint_every=100000, reader=reader)
    with runs.RankProcesses(run_file) as rank:
        rank.wait_for_step(3)
        rank.signal(signal.SIGTERM)
        ((status, out, err),) = rank.output()
    assert status == 143 and not err, err
    last = runs.losses(run_file)[-1][0]
    saved, _ = newest(runs.drafter_folder(run_file) / "checkpoints", key=keys.train_key(RunConfig.load(run_file)))
    assert saved is not None and saved.step == last and f"stopped at step {last}" in out

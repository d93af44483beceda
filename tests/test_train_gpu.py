"""Training on GPUs: compiled block-sparse attention in bf16, and two ranks over NCCL."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs as runs
from conftest import make_tiny_target

from dflash_offline import keys
from dflash_offline.attention import EagerAttention, dense_mask
from dflash_offline.config import RunConfig
from dflash_offline.errors import TrainError
from dflash_offline.progress import Progress
from dflash_offline.train.loop import Trainer
from dflash_offline.train.proof import prove
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.setup import prepare

pytestmark = pytest.mark.gpu

TRAIN = {
    "gpus": [0],
    "dtype": "bfloat16",
    "epochs": 4,
    "anchors": 64,
    "slots_per_batch": 1024,
    "micro_batches_per_step": 3,
    "checkpoint_every": 4,
    "lr": 1e-3,
    "noise": 0.01,
    "log_every": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A target wide enough for GPU kernels: hidden 512, heads of 64."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.05}
    return make_tiny_target(tmp_path_factory.mktemp("gpu-target") / "model", tiny_tokenizer_dir, **sizes)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, model: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=model, conversations=conversations)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, inputs: Path, model: Path) -> Path:
    """The same run in float32 on the CPU, noise left out (its numbers depend on the kind of device)."""
    train = TRAIN | {"gpus": "cpu", "dtype": "float32", "noise": 0.0}
    run_file = runs.make_run(tmp_path_factory.mktemp("cpu"), inputs, model=model, train=train)
    with runs.RankProcesses(run_file) as rank:
        ((status, out, err),) = rank.output(300)
    assert status == 0, (out, err)
    return run_file


@pytest.mark.parametrize("attention", ["auto", "flex", "triton", "eager"])
def test_losses_follow_those_of_the_cpu(on_cpu: Path, tmp_path: Path, inputs: Path, model: Path, attention: str) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=model, train=TRAIN | {"attention": attention, "noise": 0.0})
    with runs.RankProcesses(run_file) as rank:
        ((status, out, err),) = rank.output(300)
    assert status == 0 and "compiled after warm-up" not in out, (out, err)
    here, there = runs.losses(run_file), runs.losses(on_cpu)
    assert len(here) == len(there)
    # initial weights are drawn on the device, so they differ from the CPU's: the curves are alike, not equal
    assert here[0][1] == pytest.approx(there[0][1], rel=0.05)
    assert sum(loss for _, loss, _ in here[-4:]) == pytest.approx(sum(loss for _, loss, _ in there[-4:]), rel=0.1)
    assert "checked against the dense reference" in out
    if attention != "eager":
        assert re.search(r"^(compiled|loaded) kernels \(", out, re.MULTILINE), out


def test_uncompiled_attention_is_an_error(tmp_path: Path, inputs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    run_file = runs.make_run(tmp_path, inputs, model=model, train=TRAIN | {"attention": "flex"})
    with runs.RankProcesses(run_file) as rank:
        ((status, out, err),) = rank.output(300)
    assert status == 1 and err.splitlines()[-1].startswith('error: attention "flex": compilation is turned off'), (out, err)


def test_dense_attention_in_disguise_is_an_error(tmp_path: Path, inputs: Path, model: Path) -> None:
    """What the compile race leads to on some builds: the drafter says flex, and dense attention runs."""
    config = RunConfig.load(runs.make_run(tmp_path, inputs, model=model, train=TRAIN | {"attention": "flex"}))
    ranks = Ranks()
    setup = prepare(config, keys.train_key(config), ranks, torch.device("cuda"))

    def dense(query, context_key, context_value, block_key, block_value, plan):
        return EagerAttention().attend(query, context_key, context_value, block_key, block_value, dense_mask(plan))

    path = setup.drafter.attention
    path.plan, path.attend = lambda blocks, window: blocks, dense
    trainer = Trainer(setup, ranks, Progress(None))
    with pytest.raises(TrainError, match=r"no kernel named \*flex_attention\* ran|more than dense attention would"):  # by kernel or by time
        trainer.warm_up(tmp_path / "kernels")
        prove(trainer)


def test_wrong_attention_is_an_error(tmp_path: Path, inputs: Path, model: Path) -> None:
    config = RunConfig.load(runs.make_run(tmp_path, inputs, model=model, train=TRAIN | {"attention": "eager"}))
    ranks = Ranks()
    setup = prepare(config, keys.train_key(config), ranks, torch.device("cuda"))
    path = setup.drafter.attention
    leaky = path.plan
    path.plan = lambda blocks, window: leaky(replace(blocks, context_end=blocks.context_end + 1), window)
    with pytest.raises(TrainError, match="outputs differ from the dense reference"):
        prove(Trainer(setup, ranks, Progress(None)))


def test_killed_and_resumed_goes_on(tmp_path: Path, inputs: Path, model: Path) -> None:
    whole = runs.make_run(tmp_path / "whole", inputs, model=model, train=TRAIN)
    broken = runs.make_run(tmp_path / "broken", inputs, model=model, train=TRAIN)
    with runs.RankProcesses(whole) as rank:
        assert rank.output(300)[0][0] == 0
    with runs.RankProcesses(broken) as rank:
        rank.wait_for_step(6, timeout_s=200)
        rank.signal(signal.SIGKILL)
        rank.output()
    with runs.RankProcesses(broken) as rank:
        ((status, out, err),) = rank.output(300)
    assert status == 0 and "resuming at step" in out and "loaded kernels" in out, (out, err)
    for (step, loss, _), (other_step, other, _) in zip(runs.losses(whole), runs.losses(broken), strict=True):
        assert step == other_step and loss == pytest.approx(other, rel=5e-3)


def test_sigterm_stops_after_the_step(tmp_path: Path, inputs: Path, model: Path) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=model, train=TRAIN | {"epochs": 500, "checkpoint_every": 100000})
    with runs.RankProcesses(run_file) as rank:
        rank.wait_for_step(6, timeout_s=200)
        rank.signal(signal.SIGTERM)
        ((status, out, err),) = rank.output(60)
    assert status == 143 and "stopped at step" in out, (out, err)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_two_ranks_over_nccl_follow_one(on_cpu: Path, tmp_path: Path, inputs: Path, model: Path, fsdp: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = runs.make_run(tmp_path / "one", inputs, model=model, train=TRAIN)
    two = runs.make_run(tmp_path / "two", inputs, model=model, train=TRAIN | {"gpus": [0, 1], "fsdp": fsdp})
    with runs.RankProcesses(one) as rank:
        assert rank.output(300)[0][0] == 0
    with runs.RankProcesses(two, two) as ranks:
        finished = ranks.output(300)
    assert [status for status, _, _ in finished] == [0, 0], finished
    assert ("divided among 2 ranks" in finished[0][1]) == fsdp
    for (step, loss, _), (other_step, other, _) in zip(runs.losses(one), runs.losses(two), strict=True):
        assert step == other_step and loss == pytest.approx(other, rel=5e-3)


def test_a_killed_rank_ends_the_other_over_nccl(tmp_path: Path, inputs: Path, model: Path) -> None:
    """A collective of GPUs never ends by itself when a rank is gone: the other one hears of it beside NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_file = runs.make_run(tmp_path, inputs, model=model, train=TRAIN | {"gpus": [0, 1], "epochs": 5000, "checkpoint_every": 100000})
    with runs.RankProcesses(run_file, run_file) as ranks:
        ranks.wait_for_step(6, timeout_s=200)
        ranks.processes[1].kill()
        (status, _, err), (killed, _, _) = ranks.output(30)
    assert killed == -signal.SIGKILL and status == 1
    assert re.search(r"^error: rank 0 of 2: (rank 1 ended before its time|lost contact with rank 1)", err, re.MULTILINE), err


def test_training_towards_the_targets_distribution(tmp_path: Path, model: Path, conversations: list[dict[str, Any]]) -> None:
    inputs = runs.make_inputs(tmp_path / "inputs", model=model, conversations=conversations, last_hidden=True)
    kl, section = TRAIN | {"kl_weight": 0.5, "noise": 0.0}, {"codec": "lossless", "store_last_hidden": True}
    gpu = runs.make_run(tmp_path / "gpu", inputs, model=model, train=kl, store=section)
    cpu = runs.make_run(tmp_path / "cpu", inputs, model=model, train=kl | {"gpus": "cpu", "dtype": "float32"}, store=section)
    for run_file in (gpu, cpu):
        with runs.RankProcesses(run_file) as rank:
            ((status, out, err),) = rank.output(300)
        assert status == 0 and "compiled after warm-up" not in out, (out, err)
    here, there = runs.losses(gpu), runs.losses(cpu)
    assert here[0][1] == pytest.approx(there[0][1], rel=0.05) and here[-1][1] == pytest.approx(there[-1][1], rel=0.1)

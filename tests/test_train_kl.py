"""Training towards the target's distribution: from a store with the last hidden state, against the target's own logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs as runs
from transformers import AutoModelForCausalLM

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.dataset import Job, Prefetcher
from dflash_offline.errors import ConfigError
from dflash_offline.manifest import read_manifest
from dflash_offline.objective import decay
from dflash_offline.progress import Progress
from dflash_offline.train.loop import Trainer
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.setup import prepare

STORE = {"codec": "lossless", "store_last_hidden": True}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations, last_hidden=True)


def test_loss_is_that_of_the_targets_own_logits(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train={"kl_weight": 0.6, "noise": 0.1}, store=STORE)
    config, ranks = RunConfig.load(run_file), Ranks()
    setup = prepare(config, keys.train_key(config), ranks, torch.device("cpu"))
    trainer = Trainer(setup, ranks, Progress(None))
    step = trainer.order.step(0)
    rows = [int(row) for row in step.micro_batches[0]]
    assert len(rows) > 1, "rows have to be packed"
    with Prefetcher([Job(0, 0, 0, rows, trainer.order.shapes[step.bucket])], setup.loader.load) as reader:
        batch = trainer.feed(reader, training=True).take()
    assert batch.hidden_states.shape[1] == 3 * 64 and batch.last_hidden.shape == (batch.hidden_states.shape[0], 64)
    out = trainer.losses(batch)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    wanted, start = [], 0
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(setup.corpus.row(row).input_ids.astype("int64"))
            wanted.append(torch.log_softmax(model(ids[None]).logits[0], -1))  # row j: distribution of token j + 1
        drafted = setup.drafter(
            batch.hidden_states, setup.embedding[batch.anchor_tokens], batch.blocks, mask_embedding=trainer.mask_embedding
        )
        drafted = torch.log_softmax(drafted @ setup.head.weight.T, -1)  # [N, B, V]
    starts = {}
    for row, teacher in zip(rows, wanted, strict=True):
        starts[start], start = teacher, start + len(setup.corpus.row(row).input_ids)
    weights, loss, weight_sum = decay(4, config.gamma), 0.0, 0.0
    for block in range(batch.blocks.num_live):
        teacher, p = starts[int(batch.blocks.context_start[block])], int(batch.blocks.anchor_positions[block])
        for k in range(1, 4):
            if batch.supervised[block, k]:
                towards = teacher[p + k - 1]
                divergence = float((towards.exp() * (towards - drafted[block, k])).sum())
                nll = -float(drafted[block, k, batch.labels[block, k]])
                loss += float(weights[k]) * (0.4 * nll + 0.6 * divergence)
                weight_sum += float(weights[k])
    assert float(out.weight_sum) == pytest.approx(weight_sum, rel=1e-5)
    assert float(out.loss_sum.detach()) == pytest.approx(loss, rel=2e-3)  # the store rounds the teacher's states to bf16


def test_training_runs_from_start_to_end_and_gets_closer_to_the_target(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    train = {"kl_weight": 1.0, "epochs": 2, "lr": 3e-3, "evaluate_every": 8, "micro_batches_per_step": 1}
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train=train, store=STORE)
    manifest = read_manifest(runs.train_here(run_file), kind="drafter")
    heldout = [row["heldout"]["loss"] for row in runs.metrics(run_file) if "heldout" in row]
    assert manifest["heldout"]["loss"] == heldout[-1] < heldout[0]


def test_a_store_without_the_last_hidden_state_is_refused(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    with pytest.raises(ConfigError, match=r"kl_weight needs the target's last hidden state: set \[store\] store_last_hidden"):
        RunConfig.load(runs.make_run(tmp_path, inputs, model=tiny_target, train={"kl_weight": 0.5}))

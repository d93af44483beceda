"""Compiled layers with the operators of the ``triton`` path, on a CPU: which micro-batches share graphs, and that they are right."""

import importlib.util
from pathlib import Path
from typing import Any

import dense_operators
import numpy as np
import pytest
import torch
import training_runs as runs

from dflash_offline import keys
from dflash_offline.attention import BlockLayout
from dflash_offline.config import RunConfig
from dflash_offline.dataset import Prefetcher
from dflash_offline.drafter import Drafter, DrafterShape, model
from dflash_offline.errors import TrainError
from dflash_offline.graphs import compiled_graphs
from dflash_offline.progress import Progress
from dflash_offline.train import proof, setup
from dflash_offline.train.loop import Trainer
from dflash_offline.train.ranks import Ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is not installed"),
    pytest.mark.filterwarnings("ignore:No CUDA runtime is found"),
]

SHAPE = DrafterShape(
    hidden_size=64, num_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, vocab_size=500, block_size=4, mask_token_id=499,
    target_layer_ids=(1, 3), num_target_layers=6, max_position_embeddings=4096, layer_windows=(None, None, 40, None, None),
)  # fmt: skip
GRAPHS = 4  # first, inner, inner with a window, last


@pytest.fixture(autouse=True)
def operators_on_a_cpu() -> None:
    dense_operators.register()
    torch._dynamo.reset()


def forward_and_backward(drafter: Drafter, num_context: int, *, num_blocks: int = 12) -> list[torch.Tensor]:
    """Output and the gradient of every parameter for made-up states of ``num_context`` rows."""
    generator = torch.Generator().manual_seed(num_context)
    anchors = np.sort(np.random.default_rng(num_context).choice(num_context - 8, num_blocks - 3, replace=False))
    blocks = BlockLayout.pack([num_context - 6], [anchors], block_size=4, num_context=num_context, num_blocks=num_blocks)
    hidden, rows = torch.randn(num_context, 128, generator=generator), torch.randn(num_blocks + 1, 64, generator=generator)
    out = drafter(hidden, rows[:-1], blocks, mask_embedding=rows[-1], trained_slots_only=True)
    upstream = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad(out, list(drafter.parameters()), upstream)]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])  # a minute of g++
def test_one_set_of_graphs_serves_every_number_of_context_rows(backend: str) -> None:
    drafter, reference = Drafter(SHAPE, attention="triton"), Drafter(SHAPE, attention="eager")
    drafter.compile_layers(backend=backend)
    before, more = compiled_graphs(), []
    for number, num_context in enumerate((384, 128, 1280, 256, 201)):  # the first is neither the least nor the most
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = forward_and_backward(drafter, num_context)
        more.append(compiled_graphs() - before)
        right, names = forward_and_backward(reference, num_context), ["output", *dict(drafter.named_parameters())]
        for name, got, wanted in zip(names, found, right, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert more == [GRAPHS] * 5
    forward_and_backward(drafter, 256, num_blocks=16)
    assert compiled_graphs() - before == 2 * GRAPHS, "another N is a set of its own: slots have constant shapes"


@pytest.mark.long
def test_where_that_is_turned_off_every_number_of_context_rows_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "ANY_CONTEXT", False)
    drafter = Drafter(SHAPE, attention="triton")
    drafter.compile_layers(backend="aot_eager")
    before = compiled_graphs()
    for num_context in (128, 256, 128):
        forward_and_backward(drafter, num_context)
    assert compiled_graphs() - before == 2 * GRAPHS


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations)


@pytest.fixture
def trainer(tmp_path: Path, inputs: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer as on a GPU, with compiled layers and the ``triton`` path."""
    train = {"evaluate_every": 2, "epochs": 1, "anchors": 64, "slots_per_batch": 512}
    config, ranks = RunConfig.load(runs.make_run(tmp_path, inputs, model=tiny_target, train=train, drafter={"layers": 4})), Ranks()
    monkeypatch.setattr(setup, "choose_attention", lambda *_, **__: "triton")
    made = setup.prepare(config, keys.train_key(config), ranks, torch.device("cpu"))
    made.drafter.compile_layers(backend="aot_eager")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kernels = proof.KERNELS["triton"]
    monkeypatch.setattr(proof, "_kernels_of_a_pass", lambda *_: dict.fromkeys(kernels, 1.0))
    return Trainer(made, ranks, Progress(None))


def test_buckets_held_out_batches_and_the_proof_share_the_graphs_of_the_warm_up(trainer: Trainer, tmp_path: Path) -> None:
    shapes = {*trainer.order.shapes.values(), *(job.shape for job in trainer.heldout_jobs)}
    assert len({shape.context for shape in shapes}) >= 3
    before, blocks = compiled_graphs(), {shape.blocks for shape in shapes}
    trainer.warm_up(tmp_path / "kernels")
    made = compiled_graphs() - before
    assert len(blocks) < len(shapes) and made == 3 * len(blocks), (made, shapes)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert "checked against the dense reference" in proof.prove(trainer)
        for number in range(trainer.order.total_steps):
            step = trainer.order.step(number)
            with Prefetcher(trainer.jobs(step), trainer.setup.loader.load) as reader:
                trainer.train_step(step, trainer.feed(reader, training=True))
        trainer.evaluate()
    assert compiled_graphs() - before == made
    assert all(torch.isfinite(parameter).all() and parameter.grad is None for parameter in trainer.setup.weights.parameters)


def test_a_graph_that_holds_for_one_number_of_context_rows_only_is_an_error_that_says_so(trainer: Trainer, tmp_path: Path) -> None:
    attend, context = trainer.setup.drafter.attention.attend, max(shape.context for shape in trainer.order.shapes.values())

    def fixed(query: torch.Tensor, context_key: torch.Tensor, *rest: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            context_key = context_key + torch.zeros(context, 1, 1)
        return attend(query, context_key, *rest)

    trainer.setup.drafter.attention.attend = fixed
    with pytest.raises(TrainError, match=r"one graph cannot serve all length buckets; set ANY_CONTEXT = False in .*model\.py"):
        trainer.warm_up(tmp_path / "kernels")

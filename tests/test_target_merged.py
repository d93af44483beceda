"""Projections of one input computed as one product: the same numbers, memory and graphs, and only where that is what they are."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_target_families import FAMILIES, TAPS, V, load, save_model
from torch import nn

from dflash_offline.capture import check_taps
from dflash_offline.capture.forward import prepare_process
from dflash_offline.errors import TargetError
from dflash_offline.graphs import compiled_graphs
from dflash_offline.target.merged import _MergedLinear, merge, value_row

LENGTHS = ([9], [5, 24, 3], [2] * 9)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    prepare_process()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def recording(products: list[int]) -> Callable[..., Any]:
    """The backend ``aot_eager``, noting how many channels each product of the last graph gives."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nodes = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "linear"]
        products[:] = [node.args[1].meta["example_value"].shape[0] for node in nodes]
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return backend


def merged(module: nn.Module) -> list[_MergedLinear]:
    return [part for part in module.modules() if isinstance(part, _MergedLinear)]


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, marks=pytest.mark.long) for family in ("llama", "qwen2")),
        "qwen3",
        "gemma3-text",
        "mistral-window",
        "qwen3-moe",
    ],
)
def test_merged_equals_unmerged_in_one_graph(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    target, plain = load(tmp_path, layer_ids=TAPS), load(tmp_path, layer_ids=TAPS)
    products, before = [], compiled_graphs()
    target.compile_layers(dynamic=True, backend=recording(products))
    assert len(merged(target.model)) == len(target.layers) * (3 if family == "qwen3-moe" else 5)
    for lengths in LENGTHS:
        rows = [torch.randint(4, V, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
        found = target.packed_taps(rows)
        for got, want in zip(found, plain.packed_taps(rows), strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.pow(2).mean().sqrt()
        assert all(torch.equal(a, b) for a, b in zip(found, target.packed_taps(rows), strict=True))
        check_taps(target, rows[0], [tap[0, : lengths[0]] for tap in found])
    assert compiled_graphs() - before == 1, "layers must share a graph, whatever the batch"
    assert products[:2] == [64, 32] and products.count(96) == (family != "qwen3-moe")
    assert all(part.group._given is None and not part.group._parts for part in merged(target.model)), "a tensor stays after the call"


@pytest.mark.parametrize("family", ["qwen2", "llama-tied"])
def test_weights_are_views_and_take_no_more_memory(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    target, plain = load(tmp_path, layer_ids=TAPS), load(tmp_path, layer_ids=TAPS)
    target.compile_layers(dynamic=True, backend="eager")
    assert target.num_bytes == plain.num_bytes
    state, want = target.model.state_dict(), plain.model.state_dict()
    assert list(state) == list(want) and all(torch.equal(state[name], want[name]) for name in want)
    parts = merged(target.layers[1])
    assert value_row(target.layers) == 64 and value_row(plain.layers) is None
    for part in parts:
        for name in ("weight", "bias") if part.bias is not None else ("weight",):
            whole, own = getattr(part.group, name), getattr(part, name)
            assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert whole.untyped_storage().nbytes() == whole.nbytes
    assert (parts[0].bias is not None) == (family == "qwen2")


@pytest.mark.parametrize("family", ["qwen3.5-text", "falcon-h1", "gemma2"])
def test_targets_of_other_kinds_stay_right(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    save_model(tmp_path, family)
    target, plain = load(tmp_path, layer_ids=TAPS), load(tmp_path, layer_ids=TAPS)
    target.compile_layers(dynamic=True, backend="eager")
    ids = torch.randint(4, V, (3, 21), generator=torch.Generator().manual_seed(2))
    for got, want in zip(target.taps(ids), plain.taps(ids), strict=True):
        assert (got - want).abs().max() <= 2e-5 * want.pow(2).mean().sqrt()


def test_self_check_does_not_check_merged_by_merged(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    target = load(tmp_path, layer_ids=TAPS)
    target.compile_layers(dynamic=True, backend="eager")
    for layer in target.layers:
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        gate.place, up.place = up.place, gate.place
    ids = torch.arange(4, 40)
    with pytest.raises(TargetError, match="self-check"):
        check_taps(target, ids, [tap[0] for tap in target.packed_taps([ids])])


class Mixer(nn.Module):
    """Three projections, called as ``order`` says: each name with a number that is added to its input, if not 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.order = [("q_proj", 0), ("k_proj", 0), ("v_proj", 0)]

    def forward(self, states: torch.Tensor) -> list[torch.Tensor]:
        return [getattr(self, name)(states + more if more else states) for name, more in self.order]


@pytest.mark.parametrize(
    ("order", "products"),
    [
        ([("v_proj", 0), ("q_proj", 0), ("k_proj", 0)], 1),
        ([("q_proj", 0), ("k_proj", 1), ("v_proj", 0)], 2),
        ([("q_proj", 0), ("k_proj", 1), ("v_proj", 1)], 3),
        ([("q_proj", 0), ("q_proj", 0), ("k_proj", 0), ("v_proj", 2)], None),
        ([("q_proj", 0)], 1),
    ],
)
@torch.inference_mode()
def test_another_input_is_computed_for_itself(order: list[tuple[str, int]], products: int | None) -> None:
    states, mixer, plain = torch.randn(5, 8), Mixer(), Mixer()
    assert merge([mixer], lambda: mixer(states)) == 1
    mixer.order = plain.order = order
    made: list[int] = []
    compiled = torch.compile(mixer.forward, dynamic=True, backend=recording(made), fullgraph=True)
    for more in (0, 1):
        for got, want in zip(compiled(states + more), plain(states + more), strict=True):
            torch.testing.assert_close(got, want)
    assert products is None or len(made) == products
    assert torch.equal(mixer(states)[0], plain(states)[0]), "uncompiled, each is computed as before"


class InPlace(Mixer):
    """Writes to what it was given between two projections."""

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = states.clone()
        query = self.q_proj(states)
        states.mul_(3)
        return query, self.k_proj(states), self.v_proj(states)


@torch.inference_mode()
def test_an_input_that_is_written_to_in_between_merges_nothing() -> None:
    module = InPlace()
    assert merge([module], lambda: module(torch.randn(5, 8))) == 0


@torch.inference_mode()
def test_a_forward_that_fails_merges_nothing() -> None:
    assert merge([Mixer()], lambda: Mixer()(torch.randn(5, 7))) == 0


def quantised(mixer: Mixer) -> None:
    class Quantised(nn.Linear):
        pass

    mixer.k_proj = Quantised(8, 4)


def hooked(mixer: Mixer) -> None:
    mixer.v_proj.register_forward_hook(lambda *_: None)


def replaced(mixer: Mixer) -> None:
    mixer.q_proj.forward = mixer.q_proj.forward


def fused(mixer: Mixer) -> None:
    mixer.qkv_proj = nn.Linear(8, 16)
    mixer.v_proj = None
    mixer.order = [("qkv_proj", 0)]


def sharing(mixer: Mixer) -> None:
    mixer.v_proj.weight = mixer.k_proj.weight


def one_without_bias(mixer: Mixer) -> None:
    mixer.k_proj.bias = None


def other_input(mixer: Mixer) -> None:
    mixer.order[2] = ("v_proj", 1)


def never_called(mixer: Mixer) -> None:
    mixer.order = mixer.order[:1]


@pytest.mark.parametrize("change", [quantised, hooked, replaced, fused, sharing, one_without_bias, other_input, never_called])
@torch.inference_mode()
def test_what_is_not_three_plain_projections_of_one_input_is_left_alone(change: Callable[[Mixer], None]) -> None:
    mixer = Mixer()
    change(mixer)
    before = {name: tensor.data_ptr() for name, tensor in mixer.state_dict().items()}
    assert merge([mixer], lambda: mixer(torch.randn(5, 8))) == 0 and not merged(mixer)
    assert {name: tensor.data_ptr() for name, tensor in mixer.state_dict().items()} == before
    assert not any(module._forward_pre_hooks for module in mixer.modules())

"""The attention rule on every path: leaks, equality with the dense reference, gradients, windows, packing."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dflash_offline.attention import BlockLayout, SdpaAttention, choose_attention, dense_mask, make_attention, prove
from dflash_offline.errors import TrainError

HEADS, KV_HEADS, WIDTH = 4, 2, 16
PATHS = ["eager", "sdpa", "flex"]


def layout(*, padded: bool = True) -> BlockLayout:
    """Two sequences of 37 and 26 rows, an anchor at 0 and one at the last row, and padding on both axes."""
    anchors = [np.array([0, 3, 4, 17, 30, 36]), np.array([1, 12, 25])]
    return BlockLayout.pack([37, 26], anchors, block_size=4, num_context=70 if padded else None, num_blocks=12 if padded else None)


def states(blocks: BlockLayout, *, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots = blocks.num_blocks * blocks.block_size
    shapes = [(slots, HEADS), (blocks.num_context, KV_HEADS), (blocks.num_context, KV_HEADS), (slots, KV_HEADS), (slots, KV_HEADS)]
    return [torch.randn(*shape, WIDTH, generator=generator) for shape in shapes]


def straightforward(query, context_key, context_value, block_key, block_value, blocks, window):
    """Slot by slot, key by key, as the rule is worded."""
    size, out = blocks.block_size, torch.zeros_like(query)
    for block in range(blocks.num_blocks):
        start, end = int(blocks.context_start[block]), int(blocks.context_end[block])
        for slot in range(size):
            rows = [row for row in range(start, end) if window is None or row >= end + slot - (window - 1)]
            own = [other for other in range(size) if window is None or (other <= slot and other >= slot - (window - 1))]
            me = block * size + slot
            keys = torch.cat([context_key[rows], block_key[[block * size + other for other in own]]])
            values = torch.cat([context_value[rows], block_value[[block * size + other for other in own]]])
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                weights = torch.softmax(keys[:, group] @ query[me, head] / WIDTH**0.5, 0)
                out[me, head] = weights @ values[:, group]
    return out


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("path", PATHS)
def test_equals_the_rule_as_worded(path, window):
    blocks = layout()
    inputs = states(blocks)
    attention = make_attention(path)
    attended = attention.attend(*inputs, attention.plan(blocks, window))
    torch.testing.assert_close(attended, straightforward(*inputs, blocks, window), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("path", ["sdpa"])  # flex has no backward on a CPU: test_attention_gpu.py
def test_gradients_equal_the_reference(path, window):
    blocks = layout()
    inputs, upstream, found = states(blocks), None, {}
    for name in ("eager", path):
        attention, leaves = make_attention(name), [state.clone().requires_grad_() for state in inputs]
        attended = attention.attend(*leaves, attention.plan(blocks, window))
        upstream = torch.randn(attended.shape, generator=torch.Generator().manual_seed(1)) if upstream is None else upstream
        found[name] = torch.autograd.grad(attended, leaves, upstream)
    for got, wanted in zip(found[path], found["eager"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_leaks_and_everything_visible_counts(path, window):
    """Change one context row or slot at a time and see which blocks notice."""
    blocks = layout()
    attention = make_attention(path)
    plan, visible = attention.plan(blocks, window), dense_mask(blocks, window)
    inputs = states(blocks)
    before = attention.attend(*inputs, plan)
    for column in range(0, visible.shape[1], 3):
        changed = [state.clone() for state in inputs]
        key, row = (1, column) if column < blocks.num_context else (3, column - blocks.num_context)
        changed[key][row] += 3.0
        changed[key + 1][row] -= 3.0
        differs = (attention.attend(*changed, plan) != before).any(-1).any(-1)
        assert torch.equal(differs, visible[:, column]), f"column {column}"


def test_the_dense_mask_never_shows_the_anchors_own_row_or_another_sequence():
    blocks = layout()
    context = dense_mask(blocks)[:, : blocks.num_context].view(blocks.num_blocks, blocks.block_size, -1)
    for block in range(blocks.num_live):
        start, end = int(blocks.context_start[block]), int(blocks.context_end[block])
        assert context[block, :, start:end].all()
        assert not context[block, :, end:].any() and not context[block, :, :start].any()
    assert not context[blocks.num_live :].any(), "padding blocks read context"


def test_packing_lays_sequences_side_by_side_with_positions_of_their_own():
    blocks = layout()
    assert blocks.num_live == 9 and blocks.num_blocks == 12 and blocks.num_context == 70
    assert blocks.context_positions[:40].tolist() == [*range(37), 0, 1, 2]
    assert blocks.context_start[:9].tolist() == [0] * 6 + [37] * 3
    assert blocks.context_end[:9].tolist() == [0, 3, 4, 17, 30, 36, 38, 49, 62]
    assert blocks.sequence_end[:9].tolist() == [37] * 6 + [63] * 3
    assert blocks.slot_positions[6].tolist() == [1, 2, 3, 4]
    assert blocks.slot_rows[6].tolist() == [38, 39, 40, 41]


@pytest.mark.parametrize("path", PATHS)
def test_each_sequence_packed_equals_the_sequence_alone(path):
    packed = layout(padded=False)
    attention = make_attention(path)
    inputs = states(packed)
    together = attention.attend(*inputs, attention.plan(packed, None))
    alone = BlockLayout.pack([26], [np.array([1, 12, 25])], block_size=4)
    part = [inputs[0][24:36], inputs[1][37:63], inputs[2][37:63], inputs[3][24:36], inputs[4][24:36]]
    torch.testing.assert_close(attention.attend(*part, attention.plan(alone, None)), together[24:36], rtol=1e-5, atol=1e-6)


def test_unknown_path_is_refused_with_the_known_ones():
    with pytest.raises(TrainError, match="eager.*sdpa"):
        make_attention("flash")


@pytest.mark.parametrize("window", [None, 450])
@pytest.mark.parametrize("size", [16, 10])
def test_flex_tiles_are_those_of_the_dense_mask(size, window):
    """A tile left out would be a silent loss of context, a tile wrongly called full a leak; neither shows on a CPU run."""
    from dflash_offline.attention.flex import TILE, visible_tiles

    generator = np.random.default_rng(0)
    lengths, counts = [700, 90, 430], [40, 3, 25]
    anchors = [np.sort(generator.choice(length, count, replace=False)) for length, count in zip(lengths, counts, strict=True)]
    blocks = BlockLayout.pack(lengths, anchors, block_size=size, num_context=1300, num_blocks=75)
    mask = dense_mask(blocks, window)
    rows, columns = (-mask.shape[0] % TILE, -mask.shape[1] % TILE)
    tiles = torch.nn.functional.pad(mask, (0, columns, 0, rows)).unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    some, every = visible_tiles(blocks, window)
    assert torch.equal(some, tiles.any(3).any(1))
    filled = (
        torch.nn.functional.pad(mask, (0, columns, 0, rows), value=True).unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).all(3).all(1)
    )
    context_tiles = blocks.num_context // TILE
    assert torch.equal(every[:, :context_tiles], filled[:, :context_tiles]) and not every[:, context_tiles:].any()
    assert every.any() and (some & ~every).any()


GEOMETRY = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH, "block_size": 4, "dtype": torch.float32, "device": torch.device("cpu")}


def test_a_right_path_is_proved_right():
    proof = prove(SdpaAttention(), windows={None, 9}, **GEOMETRY)
    assert set(proof.errors) == {"output", "query", "context key", "context value", "block key", "block value"}
    assert max(proof.errors.values()) < 1e-5 and "sdpa" in str(proof)


def test_a_path_that_shows_the_anchors_own_row_is_refused():
    class Leaking(SdpaAttention):
        def plan(self, blocks, window):
            from dataclasses import replace

            return super().plan(replace(blocks, context_end=(blocks.context_end + 1).clamp(max=blocks.num_context)), window)

    with pytest.raises(TrainError, match="differs from the dense reference.*output"):
        prove(Leaking(), windows={None}, **GEOMETRY)


def test_a_path_with_a_wrong_gradient_is_refused():
    class HalfGradient(SdpaAttention):
        def attend(self, query, context_key, *rest):
            return super().attend(query, context_key.detach() + 0.5 * (context_key - context_key.detach()), *rest)

    with pytest.raises(TrainError, match="context key 5.0e-01"):
        prove(HalfGradient(), windows={None}, **GEOMETRY)


def test_the_switch_that_hides_a_race_is_refused():
    switch = "force_compile" + "_during_fx_trace"
    # not with monkeypatch, which deletes what it did not find in the module's __dict__: the switch would be gone for what follows
    with torch._dynamo.config.patch(switch, True), pytest.raises(TrainError, match=switch):
        prove(SdpaAttention(), windows={None}, **GEOMETRY)


@pytest.mark.parametrize("variable", [pytest.param("TORCH_COMPILE_DISABLE", marks=pytest.mark.long), "TORCHDYNAMO_DISABLE"])
def test_compilation_that_is_turned_off_is_refused_where_it_is_wanted(variable):
    code = """
import torch, dflash_offline.attention as a, dflash_offline.attention.proof as p
for name, device in (("flex", "cuda"), ("eager", "cuda"), ("flex", "cpu")):
    try:
        p.refuse_switches(a.make_attention(name), torch.device(device))
        print("taken")
    except p.TrainError as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], env=os.environ | {variable: "1"}, capture_output=True, text=True, check=True)
    found = ran.stdout.splitlines()
    assert "compilation is turned off" in found[0] and found[1:] == ["taken", "taken"], found


def test_auto_is_sdpa_on_a_cpu_and_names_are_taken_as_they_are():
    cpu = torch.device("cpu")
    assert choose_attention("auto", head_dim=64, dtype=torch.float32, device=cpu) == "sdpa"
    assert choose_attention("eager", head_dim=64, dtype=torch.float32, device=cpu) == "eager"
    for name in ("flex", "triton"):  # neither trains there: flex has no backward pass, and the kernels are a GPU's
        with pytest.raises(TrainError, match=rf'\[train\] attention = "{name}" needs GPUs; with gpus = "cpu" use "auto" or "sdpa"'):
            choose_attention(name, head_dim=64, dtype=torch.float32, device=cpu)


INTERPRETED = """
import numpy as np, torch
from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor
def patched(tensor, scope):  # numpy 2.4 no longer turns an array of one element into an index
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
interpreter._patch_lang_tensor = patched

from dflash_offline.attention import BlockLayout, EagerAttention
from dflash_offline.attention.intervals import IntervalAttention, Tiles
from dflash_offline.attention.proof import outcome, random_states

small = Tiles(32, 16, 4, 1, 32, 16, 4, 1, 16, 32, 4, 1, 2)
for heads, kv_heads, width, size, window in ((4, 2, 16, 4, None), (5, 1, 20, 5, 7), (3, 1, 16, 8, None)):
    anchors = [np.array([0, 3, 4, 17, 30, 36]), np.array([1, 12, 25])]
    blocks = BlockLayout.pack([37, 26], anchors, block_size=size, num_context=70, num_blocks=12)
    states = random_states(blocks, heads, kv_heads, width, torch.float32, torch.device("cpu"))
    upstream = torch.randn_like(states[0])
    wanted, got = (outcome(path, blocks, window, states, upstream) for path in (EagerAttention(), IntervalAttention(small)))
    for right, ours in zip(wanted, got):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)

from dflash_offline.objective import kernels, softmax
for vocabulary, kl in ((512, 0.0), (5000, 0.3)):
    logits, labels, weights = torch.randn(7, vocabulary) * 3, torch.randint(0, vocabulary, (7,)), torch.rand(7)
    weights[2] = 0
    teacher = torch.randn(7, vocabulary) if kl else None
    found = []
    for functions in (softmax, kernels):
        work = logits.clone()
        stats = functions.statistics(work, labels, teacher)
        found.append([stats.best, stats.nll, stats.divergence, functions.gradient(work, stats, labels, weights, teacher, kl, fp8=False)[0]])
    for right, ours in zip(*found):
        assert right is None or torch.allclose(right.float(), ours.float(), rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed; test_attention_gpu.py runs the kernels"
)
def test_triton_kernels_equal_the_reference_in_tritons_interpreter():
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.strip() == "equal", ran.stderr[-3000:]

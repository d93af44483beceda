"""Rows on a GPU: the kernel against plain attention, recorded steps against plain ones, the stage against the CPU's text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import write_run_file

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.progress import Progress
from dflash_offline.regenerate import answer_files, regenerate
from dflash_offline.regenerate.decoding import TOLERANCE, Drawing, RowDecoder, check_rows
from dflash_offline.regenerate.drawing import next_tokens
from dflash_offline.regenerate.row_attention import one_token_attention, set_attention
from dflash_offline.target import load_target

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "length", "groups", "per_group", "width"),
    [(1, 1, 1, 1, 16), (5, 200, 3, 3, 64), (4, 129, 8, 4, 128), (3, 70, 2, 1, 96), (2, 64, 1, 20, 80), (700, 40, 2, 2, 64)],
)
def test_kernel_is_plain_attention(dtype: torch.dtype, rows: int, length: int, groups: int, per_group: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows + length)
    query = torch.randn(rows, groups * per_group, width, generator=generator).to(dtype)
    keys_, values = (torch.randn(rows, length, groups, width, generator=generator).to(dtype) for _ in range(2))
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0], lengths[-1] = 1, length
    wanted = one_token_attention(query.float(), keys_.float(), values.float(), lengths, 0.2)
    beyond = torch.arange(length)[None] >= lengths[:, None]
    keys_[beyond], values[beyond] = float("nan"), float("nan")  # what lies behind a row's end is never read
    found = one_token_attention(query.cuda(), keys_.cuda(), values.cuda(), lengths.cuda(), 0.2).float().cpu()
    assert torch.isfinite(found).all()
    assert (found - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.fixture
def model(tiny_target: Path) -> Any:
    return load_target(tiny_target, dtype=torch.float32, device="cuda", attention="sdpa", layer_ids=[], keep_head=True).model


def answers(model: Any, *, drawing: Drawing, recorded: bool) -> list[list[int]]:
    prompts = [[5, 6, 7], [9] * 40, [42], list(range(100, 117))]
    most = [30, 9, 50, 17]
    decoder = RowDecoder(model, num_rows=6, length=96, steps=8, stop_ids=[17, 2], drawing=drawing)
    decoder._recordable = recorded
    decoder.admit([4, 0, 1, 3], prompts, most_tokens=most, keys=[1, 2, 3, 4])
    found: dict[int, list[int]] = {row: [] for row in (4, 0, 1, 3)}
    for _ in range(7):
        decoder.launch()
        written, active = decoder.collect()
        for row in found:
            found[row] += [int(token) for token in written[:, row] if token >= 0]
    assert not active.any() and (decoder._graph is not None) == recorded
    set_attention(model, "sdpa")
    return list(found.values())


@pytest.mark.parametrize("drawing", [Drawing(), Drawing(0.8), Drawing(1.1, 0.7)])
def test_recorded_steps_are_plain_steps(model: Any, drawing: Drawing) -> None:
    plain, recorded = (answers(model, drawing=drawing, recorded=each) for each in (False, True))
    assert plain == recorded
    assert all(plain) and max(map(len, plain)) <= 50


def test_rows_agree_with_the_models_own_forward(tiny_target: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = load_target(tiny_target, dtype=dtype, device="cuda", attention="sdpa", layer_ids=[], keep_head=True).model
        distance, _ = check_rows(model, [[5, 6, 7, 8, 9], [40] * 30], attention="sdpa")
        assert distance < TOLERANCE[dtype]


def test_draws_are_the_same_as_on_the_cpu() -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 3
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9}
    inputs = {"keys": torch.arange(64), "positions": torch.arange(64) * 7}
    here = next_tokens(logits, **options, **inputs)
    there = next_tokens(logits.cuda(), **options, **{name: value.cuda() for name, value in inputs.items()}).cpu()
    assert (here != there).sum() <= 1  # a number may fall on the border between two tokens


def test_stage_writes_what_the_cpu_writes(tmp_path: Path, tiny_target: Path) -> None:
    prompts = [{"id": i, "prompt": f"Question {i}, " * (1 + i % 5)} for i in range(40)]
    rows, lines = {}, []
    for device, gpus in (("cpu", "cpu"), ("gpu", [0])):
        folder = tmp_path / device
        folder.mkdir()
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        section = {"prompts": ["prompts.jsonl"], "max_new_tokens": 20, "batch": 16, "gpus": gpus}
        config = RunConfig.load(write_run_file(folder, model=tiny_target, files=[], regenerate=section))
        progress = Progress(None)
        progress.say = lines.append  # type: ignore[method-assign]
        regenerate(config, keys.regenerate_key(config), progress)
        rows[device] = [json.loads(line) for path in answer_files(config) for line in path.read_text().splitlines()]
    assert not any("not recorded" in line or "transformers' own generate" in line for line in lines)
    same = sum(row in rows["cpu"] for row in rows["gpu"])
    assert same >= 0.9 * len(rows["cpu"]) > 0, "the same text but for near-ties"

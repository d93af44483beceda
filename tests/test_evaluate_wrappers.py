"""Multimodal wrappers, whose sizes sit in ``text_config``: the loop, the batched loop and the export, on their real classes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_target_families import V, save_model
from tiny_drafters import BLOCK, tensors_of, tiny_shape

from dflash_offline.drafter import Drafter, DrafterShape
from dflash_offline.evaluate import BatchedDecoder, Decoder, compare, load_decoder
from dflash_offline.evaluate.batched import supports
from dflash_offline.export import TargetInfo, export_weights, read_drafter
from dflash_offline.target import facts

PROMPT = torch.randint(4, V, (15,), generator=torch.Generator().manual_seed(4)).tolist()


def wrapped(folder: Path, family: str, tokenizer: Path) -> Path:
    save_model(folder, family)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder / path.name)
    return folder


def shape_for(folder: Path) -> DrafterShape:
    known = facts(folder)
    sizes = {"hidden_size": known.hidden_size, "vocab_size": known.vocab_size, "num_target_layers": known.num_layers}
    return tiny_shape(**sizes, mask_token_id=known.vocab_size - 1, rope_parameters=known.rope_parameters)


def say_what(decoder: Decoder, text: list[int]) -> None:
    """Make the drafter propose ``text``, right for 0, 1, 2 ... slots in turn."""
    steps = iter(range(1000))

    def scripted(rows: Any, bonus: int, cache: Any, start: int, *rest: Any) -> tuple[torch.Tensor, None]:
        at, right = start - len(PROMPT), next(steps) % BLOCK
        block = [bonus, *text[at + 1 : at + BLOCK]]
        block += [5] * (BLOCK - len(block))
        return torch.tensor([token if k <= right else (token + 1) % V for k, token in enumerate(block)]), None

    decoder._draft = scripted  # type: ignore[method-assign]


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5", "gemma3"])
def test_the_loop_keeps_the_output_of_a_wrapped_target(tmp_path: Path, tiny_tokenizer_dir: Path, family: str) -> None:
    folder = wrapped(tmp_path / "m", family, tiny_tokenizer_dir)
    drafter = Drafter(shape_for(folder))
    decoder = load_decoder(folder, drafter.shape, tensors_of(drafter), device="cpu", dtype=torch.float32)
    decoder.stop_ids = frozenset()  # random texts must not end early
    assert decoder.target.recurrent == (family == "qwen3.5") and supports(decoder.target.model) == (family == "qwen3-vl")
    plain = decoder.generate_plain(PROMPT, max_new_tokens=30)
    if supports(decoder.target.model):
        prompts = [PROMPT, PROMPT[:6], PROMPT + plain.tokens[:9]]
        for ids, ours in zip(prompts, BatchedDecoder(decoder, 2).generate(prompts, max_new_tokens=20), strict=True):
            assert compare(ours, decoder.generate_plain(ids, max_new_tokens=20), dtype=torch.float32).outcome == "identical"
    say_what(decoder, plain.tokens)
    loop = decoder.generate(PROMPT, max_new_tokens=30)
    assert compare(loop, plain, dtype=torch.float32).outcome == "identical"
    assert set(loop.accepted) >= {0, 1, 2, 3}, loop.accepted


def test_an_export_has_the_sizes_of_the_wrapped_language_model(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Servers compare with ``text_config``: hidden size, rows of the embedding, number of layers."""
    folder = wrapped(tmp_path / "m", "qwen3-vl", tiny_tokenizer_dir)
    drafter = Drafter(shape_for(folder))
    export_weights(tmp_path / "zlab", form="zlab", shape=drafter.shape, tensors=tensors_of(drafter), target=TargetInfo("m", []))
    read, known = read_drafter(tmp_path / "zlab").shape, facts(folder)
    assert (
        (read.hidden_size, read.vocab_size, read.num_target_layers) == (32, V, 4) == (known.hidden_size, known.vocab_size, known.num_layers)
    )

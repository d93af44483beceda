"""SpecForge 0.2.0's model and loss, trained on this project's micro-batches. For ``quality.py`` alone."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from dflash_peers import specforge_draft

from dflash_offline.config import RunConfig
from dflash_offline.dataset import Job
from dflash_offline.optimizer import lr_at
from dflash_offline.train.setup import Setup

WARM_STEPS = 5  # of each bucket, not timed: compilation


def model_of(setup: Setup, *, anchors: int, backend: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Its drafter with our initial weights, and the module that gives its loss."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel

    shape = setup.shape
    rope = dict(shape.rope_parameters)
    model = specforge_draft(shape, device=setup.device, dtype=setup.dtype, backend=backend, rope_parameters=rope)
    with torch.no_grad():  # name by name: both use z-lab's names
        own = dict(setup.drafter.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
    head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
    head.weight = torch.nn.Parameter(setup.head.weight, requires_grad=False)
    embedding = torch.nn.Embedding.from_pretrained(setup.embedding, freeze=True)
    options = {"block_size": shape.block_size, "attention_backend": backend, "num_anchors": anchors, "loss_decay_gamma": 7.0}
    return model, OnlineDFlashModel(model, head, embedding, shape.mask_token_id, **options)


def train(
    config: RunConfig, setup: Setup, *, max_steps: int | None, on_pace: Callable[[float], None]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train over the micro-batches of ``setup``: same rows, same order, same store.

    Its own settings otherwise: AdamW betas 0.9 / 0.999, warm-up 4 %, cosine to 0, clip 1.0, float32 masters. Hidden
    states are read and decoded ahead and are not part of its time, nor is compilation: ``train_s`` is the median step
    of each bucket times its steps.

    Args:
        on_pace: told, once it is known, how many seconds the whole training will take.
    """
    device, train_settings = setup.device, config.train
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    torch.manual_seed(0)
    model, online = model_of(setup, anchors=train_settings.anchors, backend=backend)
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in parameters]
    optimiser = torch.optim.AdamW(masters, lr=train_settings.lr, betas=(0.9, 0.999), weight_decay=0.0, fused=device.type == "cuda")
    total = setup.order.total_steps if max_steps is None else min(max_steps, setup.order.total_steps)
    steps = [setup.order.step(number) for number in range(total)]
    jobs = [Job(step.number, 0, step.epoch, rows, setup.order.shapes[step.bucket]) for step in steps for rows in step.micro_batches]
    taken: dict[int, list[float]] = defaultdict(list)
    counts = {bucket: sum(step.bucket == bucket for step in steps) for bucket in setup.order.shapes}
    tokens, losses, paced = 0, [], False

    def whole() -> float:
        return sum(count * float(np.median(taken[bucket][WARM_STEPS:] or taken[bucket])) for bucket, count in counts.items() if count)

    began_all = time.perf_counter()
    with setup.loader.prefetch(iter(jobs)) as reader:
        for number, step in enumerate(steps):
            micro = reader.take()
            batch = padded(micro, setup, device)
            _wait(device)
            began = time.perf_counter()
            loss = online(**batch)[0]
            loss.backward()
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            rate = lr_at(number, total=total, peak=train_settings.lr, warmup_ratio=0.04, schedule="cosine")
            if number >= 0.04 * total:  # its cosine ends at 0, ours at 10 %
                rate = max(0.0, (rate - 0.1 * train_settings.lr) / 0.9)
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
            losses.append(loss.detach())
            _wait(device)
            taken[step.bucket].append(time.perf_counter() - began)
            tokens += micro.num_tokens
            if not paced and all(len(taken[bucket]) >= min(count, 3 * WARM_STEPS) for bucket, count in counts.items()):
                paced = True
                on_pace(whole())
            if number % 100 == 0:
                print(f"specforge step {number}/{total} loss {float(loss):.3f}, {time.perf_counter() - began_all:.0f} s", flush=True)
    tensors = {name: master.detach().cpu() for name, master in zip(dict(model.named_parameters()), masters, strict=True)}
    final = float(torch.stack(losses[-50:]).mean())
    result = {"steps": total, "tokens": tokens, "train_s": whole(), "final_loss": final, "wall_s": time.perf_counter() - began_all}
    return tensors, result | {"anchors": train_settings.anchors, "epochs": train_settings.epochs, "lr": train_settings.lr, "loss": "ce"}


def padded(micro: Any, setup: Setup, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch as SpecForge takes it: one row a sequence, padded to the longest (to a multiple of 128)."""
    rows = [setup.corpus.row(int(row)) for row in micro.job.rows]
    decoded = micro.encoded.decode(device)
    longest = -(-max(len(row.input_ids) for row in rows) // 128) * 128
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest)
    hidden = torch.zeros(len(rows), longest, decoded.shape[1], dtype=setup.dtype, device=device)
    for index, (row, (start, end)) in enumerate(zip(rows, micro.spans, strict=True)):
        ids[index, : end - start] = torch.from_numpy(np.array(row.input_ids)).long()
        mask[index, : end - start] = torch.from_numpy(np.array(row.loss_mask)).float()
        hidden[index, : end - start] = decoded[start:end]
    return {"input_ids": ids.to(device), "hidden_states": hidden, "loss_mask": mask.to(device)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

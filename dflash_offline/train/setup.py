"""What a rank trains with: data, drafter, frozen tables of the target, weights and optimiser. Nothing is joined yet."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline import identity, keys
from dflash_offline.attention import choose_attention
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.dataset import BatchLoader, BatchShape, DeviceBatch, TrainingOrder, made_up, processes_for, stored_indices
from dflash_offline.drafter import Drafter, DrafterShape, planned_shape
from dflash_offline.errors import TrainError
from dflash_offline.export.warm_start import start_tensors
from dflash_offline.layout import Layout
from dflash_offline.manifest import digest
from dflash_offline.objective import FrozenHead, Objective
from dflash_offline.optimizer import AdamW, Weights
from dflash_offline.precision import DTYPES
from dflash_offline.stage import PEERS
from dflash_offline.store import HiddenStateStore
from dflash_offline.target import Ending, load_embedding_and_head, load_ending
from dflash_offline.train.partial import Partial
from dflash_offline.train.ranks import Ranks


@dataclass
class Setup:
    """Everything that one rank trains with.

    Attributes:
        embedding: the target's [V, H], frozen.
        head: the target's, frozen.
        ending: the target's final norm, when training towards its distribution.
        partial: what part of the store this run is about; None for all of it.
        facts: what all ranks must agree on, and a resumed run with the one before it.
        machine: versions and device; a change on resume is said, not refused.
    """

    config: RunConfig
    key: str
    folder: Path
    device: torch.device
    dtype: torch.dtype
    corpus: Corpus
    order: TrainingOrder
    loader: BatchLoader
    shape: DrafterShape
    drafter: Drafter
    embedding: torch.Tensor
    head: FrozenHead
    ending: Ending | None
    objective: Objective
    weights: Weights
    optimizer: AdamW
    facts: dict[str, Any]
    machine: dict[str, Any]
    partial: Partial | None = None

    def made_up(self, shape: BatchShape) -> DeviceBatch:
        """A micro-batch of a shape with made-up contents, as full as it gets."""
        return made_up(
            shape,
            block_size=self.shape.block_size,
            num_taps=len(self.shape.target_layer_ids),
            hidden_size=self.shape.hidden_size,
            device=self.device,
            dtype=self.dtype,
            teacher=self.ending is not None,
        )


def choose_device(config: RunConfig, ranks: Ranks) -> torch.device:
    """This rank's device: the GPU of its LOCAL_RANK among the visible ones (the supervisor shows each rank one), or the CPU.

    On a CPU the cores are shared out among the ranks; on a GPU PyTorch gets one thread, as the reader has threads of its
    own and each would start a team. OMP_NUM_THREADS overrides both.

    Raises:
        TrainError: the run file asks for GPUs and none is visible.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.size) if config.train.gpus == "cpu" else 1)
    if config.train.gpus == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainError(f'[train] gpus = {config.train.gpus}, but this process sees no GPU; set gpus = "cpu" to train without one')
    local = int(os.environ.get("LOCAL_RANK") or 0)
    device = torch.device("cuda", local if local < torch.cuda.device_count() else 0)
    torch.cuda.set_device(device)
    return device


def prepare(config: RunConfig, key: str, ranks: Ranks, device: torch.device, *, partial: Partial | None = None) -> Setup:
    """Open corpus and store, build the drafter, load the frozen tables. Every rank does this on its own.

    Args:
        partial: train on its parts only, under its key.

    Raises:
        TrainError: the corpus is not captured whole, there is nothing to train on, a setting does not fit the store.
    """
    train, layout = config.train, Layout(config.root_dir)
    dtype = DTYPES[train.dtype]
    corpus = Corpus.open(layout.corpus(keys.corpus_key(config)), deep=True)
    # checksums are read once, by rank 0, before the ranks meet; the others look at sizes
    verify = config.store.verify if ranks.first else "sizes"
    parts = None if partial is None else partial.parts
    store = HiddenStateStore(layout.store(keys.capture_key(config)), verify=verify, parts=parts, **config.store.cache)
    stored = stored_indices(corpus, store, some=partial is not None)
    key = key if partial is None else partial.key
    wanted = identity.drafter_layer_ids(config)
    apart = train.reader == "process" or (train.reader == "auto" and device.type == "cuda")
    order = TrainingOrder(corpus, train, block_size=config.drafter.block_size, available=stored >= 0)
    loader = BatchLoader(
        corpus,
        store,
        stored,
        train,
        taps=store.positions(wanted) + ([store.num_taps - 1] if train.kl_weight > 0 else []),  # the last one is the last layer's
        block_size=config.drafter.block_size,
        pin=device.type == "cuda",
        processes=processes_for(peers_on_host(ranks)) if apart else 0,
    )
    folder = identity.model_folder(config)
    shape = planned_shape(config, folder)
    embedding, head = load_embedding_and_head(folder, dtype=dtype, device=device)
    ending = None
    if train.kl_weight > 0:
        ending = load_ending(folder, dtype=dtype, device=device, trust_remote_code=config.target.trust_remote_code)
    with torch.device(device):
        path = choose_attention(train.attention, head_dim=shape.head_dim, dtype=dtype, device=device)
        drafter = Drafter(shape, attention=path)
    drafter.initialise(seed=train.seed)
    if (start := start_tensors(config, shape)) is not None:
        drafter.load_state_dict(start)
    if device.type == "cuda" and drafter.attention.compiled:
        drafter.compile_layers()
    weights = Weights(drafter, device=device, dtype=dtype, ema=train.ema, shard=ranks.shard if train.fsdp else None)
    return Setup(
        config=config,
        key=key,
        folder=layout.drafter(key),
        device=device,
        dtype=dtype,
        corpus=corpus,
        order=order,
        loader=loader,
        shape=shape,
        drafter=drafter,
        embedding=embedding,
        head=FrozenHead(head, precision=train.head_precision),
        ending=ending,
        objective=Objective(
            loss=train.loss,
            gamma=config.gamma,
            dpace_alpha=train.dpace_alpha,
            kl_weight=train.kl_weight,
            teacher_softcap=None if ending is None else ending.softcap,
        ),
        weights=weights,
        optimizer=AdamW(weights, betas=train.betas, weight_decay=train.weight_decay),
        facts={
            "key": key,
            "seed": train.seed,
            "total_steps": order.total_steps,
            "rows": hashlib.sha256(np.ascontiguousarray(corpus.hashes)[order.rows].tobytes()).hexdigest()[:16],
            "shape": digest(shape.to_dict()),
            "batch_shapes": [str(each) for each in order.shapes.values()],
            "parameters": weights.numel,
        },
        machine={
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": device_name(device),
            "attention": drafter.attention.name,
        },
        partial=partial,
    )


def peers_on_host(ranks: Ranks) -> int:
    """Training processes that share this host's cores, this one included: of several drafters, or this host's ranks of one."""
    given = os.environ.get(PEERS) or os.environ.get("LOCAL_WORLD_SIZE") or ""
    return int(given) if given.isdigit() and int(given) > 0 else ranks.size


def device_name(device: torch.device) -> str:
    """The GPU's model, or the processor's architecture: what another machine may differ in."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()

"""A store with another codec from a captured one. For ``quality.py`` alone."""

import os

import numpy as np
import torch

from dflash_offline import identity, keys
from dflash_offline.codecs import NEEDS_STATISTICS, ChannelStatistics
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.layout import Layout
from dflash_offline.store import HiddenStateStore, PartWriter, committed_parts, create_or_open


def recode(source: RunConfig, config: RunConfig, device: torch.device) -> None:
    """The store of ``config``, whose corpus is prepared, from the states in that of ``source``."""
    path = Layout(config.root_dir).store(keys.capture_key(config))
    create_or_open(path, keys.store_identity(config))
    if committed_parts(path):
        return
    corpus = Corpus.open(Layout(config.root_dir).corpus(keys.corpus_key(config)))
    store = HiddenStateStore(Layout(source.root_dir).store(keys.capture_key(source)))
    rows = [corpus.row(index) for index in range(len(corpus))]
    taps = store.positions(identity.capture_layer_ids(config))
    numbers = [store.find(row.sha256) for row in rows]

    def states(index: int) -> torch.Tensor:
        return store.read_encoded([numbers[index]], taps).decode(device).unflatten(-1, (len(taps), store.hidden_size))

    statistics = None
    if config.store.codec in NEEDS_STATISTICS:
        chosen = np.linspace(0, len(rows) - 1, min(32, len(rows))).astype(int)
        statistics = ChannelStatistics.from_rows(states(index) for index in chosen)
        statistics.save(path.parent / "channel_statistics.safetensors")
    shape = {"num_taps": len(taps), "hidden_size": store.hidden_size, "num_samples": len(rows)}
    tokens = sum(len(row.input_ids) for row in rows)
    settings = {"store_settings": config.store, "statistics": statistics, "threads": min(8, os.cpu_count() or 1)}
    with PartWriter(path, "part-00000", num_tokens=tokens, **shape, **settings) as writer:
        for index in range(writer.resume_sample, len(rows)):
            row = rows[index]
            writer.append(index, row.sha256, row.bucket, row.input_ids, row.loss_mask, states(index))
        writer.commit({"recoded_from": source.store.codec})

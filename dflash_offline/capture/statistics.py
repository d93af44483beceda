"""Channel statistics for codecs that need them: measured once per store, by whichever replica comes first."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dflash_offline.capture.forward import Forwarder
from dflash_offline.codecs import NEEDS_STATISTICS, ChannelStatistics
from dflash_offline.corpus import Corpus
from dflash_offline.manifest import write_bytes
from dflash_offline.plan import CapturePlan
from dflash_offline.store import Remote, committed_parts
from dflash_offline.store.remote import STATISTICS

FILE = STATISTICS  # beside the store, for every corpus that is captured into it


def channel_statistics(codec: str, store_path: Path, plan: CapturePlan, corpus: Corpus, forwarder: Forwarder) -> ChannelStatistics | None:
    """The store's statistics; measured on the plan's rows, one by one, if there are none yet. None for codecs without.

    Raises:
        StoreError: the file is damaged, or is gone although parts were written with it.
    """
    if codec not in NEEDS_STATISTICS:
        return None
    path = Path(store_path).parent / FILE
    with path.with_name(FILE + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remote, begun = Remote.of(store_path), bool(committed_parts(store_path))
        if not path.exists() and not begun:
            ChannelStatistics.from_rows(_hidden_states(plan, corpus, forwarder)).save(path)
        if remote is not None and not begun:
            remote.objects.put(FILE, path)
        elif remote is not None and not path.exists():  # the store was begun from another root
            write_bytes(path, remote.objects.get(FILE))
        return ChannelStatistics.load(path)


def _hidden_states(plan: CapturePlan, corpus: Corpus, forwarder: Forwarder) -> Iterator[torch.Tensor]:
    for index in plan.statistics_rows:
        for _, batch in forwarder.run([np.asarray(corpus.row(index).input_ids)], int(corpus.buckets[index])):
            yield batch.hidden(0)

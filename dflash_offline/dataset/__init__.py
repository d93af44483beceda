"""Batches out of the store.

=================  ===========================================================================================
``order.py``       which rows make up which step, of the whole run; the fixed shape of each bucket
``batches.py``     one micro-batch: rows packed, anchors drawn, labels; decoded on the training device
``prefetch.py``    reading ahead in a thread, bounded in bytes
=================  ===========================================================================================
"""

from dflash_offline.dataset.batches import BatchLoader, DeviceBatch, Job, MicroBatch, add_noise, noise_seed, to_device
from dflash_offline.dataset.order import BatchShape, Step, TrainingOrder, count_candidates, stored_indices
from dflash_offline.dataset.prefetch import PREFETCH_BYTES, Prefetcher

__all__ = [
    "PREFETCH_BYTES",
    "BatchLoader",
    "BatchShape",
    "DeviceBatch",
    "Job",
    "MicroBatch",
    "Prefetcher",
    "Step",
    "TrainingOrder",
    "add_noise",
    "count_candidates",
    "noise_seed",
    "stored_indices",
    "to_device",
]

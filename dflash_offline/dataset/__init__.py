"""Batches out of the store.

=================  ===========================================================================================
``order.py``       which rows make up which step, of the whole run; the fixed shape of each bucket
``batches.py``     one micro-batch on the host: rows packed, anchors drawn, labels
``prefetch.py``    reading ahead in threads, bounded in bytes
``reading.py``     the processes that make micro-batches for a rank on a GPU
``device.py``      one micro-batch on the training device: decoded, padded, noisy; the next one in good time
=================  ===========================================================================================
"""

from dflash_offline.dataset.batches import BatchLoader, Job, MicroBatch, noise_seed
from dflash_offline.dataset.device import DeviceBatch, DeviceFeed, Timing, add_noise, made_up, mark, seconds_between, to_device
from dflash_offline.dataset.order import BatchShape, Step, TrainingOrder, count_candidates, stored_indices
from dflash_offline.dataset.prefetch import PREFETCH_BYTES, Prefetcher
from dflash_offline.dataset.reading import processes_for

__all__ = [
    "PREFETCH_BYTES",
    "BatchLoader",
    "BatchShape",
    "DeviceBatch",
    "DeviceFeed",
    "Job",
    "MicroBatch",
    "Prefetcher",
    "Step",
    "Timing",
    "TrainingOrder",
    "add_noise",
    "count_candidates",
    "made_up",
    "mark",
    "noise_seed",
    "processes_for",
    "seconds_between",
    "stored_indices",
    "to_device",
]

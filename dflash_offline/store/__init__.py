"""The hidden-state store: one Zarr group per committed part, read by sample.

Reading order::

    schema         names, attributes, index
    shard_writing  one Zarr shard file, written straight
    shards         Zarr arrays: metadata, small ones, shards read straight
    shard_chunks   chunks of a shard on their way from the file to where they are wanted
    checksums      of many chunks at once
    objects        an object store, by URL
    cache          blocks of its files, kept here
    remote         a store in an object store and its local folder
    making         making a store, refusing another's
    values         finite, not all zero, norms
    staging        encoding where a sample lies, codes to the CPU
    part_files     files of a part: shape, metadata, small arrays, manifest
    read_back      every file of a part compared with what was written, before its manifest
    journal        what is safe of a part that is being written
    writer         PartWriter: resumable, committed whole
    parts          one committed part, opened
    memory         memory of read batches, used again
    threads        reads of a batch, shared out
    batch          encoded rows on their way to the device
    sample         one conversation: ids, mask, hidden states when asked for
    reader         HiddenStateStore: samples and encoded batches
    verify         every byte against the manifests
    inspect        what is in a store, as dictionaries: summary, samples, details, stats, diff
"""

from typing import TYPE_CHECKING, Any

from dflash_offline.store.inspect import details, diff, environment_notes, export_sample, samples, stats, summary, unfinished
from dflash_offline.store.making import create_or_open, rebuild_index
from dflash_offline.store.objects import open_objects
from dflash_offline.store.reader import HiddenStateStore, committed_hashes
from dflash_offline.store.remote import Remote, mirror
from dflash_offline.store.sample import StoredSample
from dflash_offline.store.schema import check_identity, committed_parts
from dflash_offline.store.verify import Problem, verify

if TYPE_CHECKING:
    from dflash_offline.store.batch import EncodedBatch
    from dflash_offline.store.writer import NewSample, PartWriter

# imported when first asked for: they need torch, which takes seconds that a look into a store has no use for
_WITH_TORCH = {"EncodedBatch": "batch", "NewSample": "writer", "PartWriter": "writer"}

__all__ = [
    "EncodedBatch",
    "HiddenStateStore",
    "NewSample",
    "PartWriter",
    "Problem",
    "Remote",
    "StoredSample",
    "check_identity",
    "committed_hashes",
    "committed_parts",
    "create_or_open",
    "details",
    "diff",
    "environment_notes",
    "export_sample",
    "mirror",
    "open_objects",
    "rebuild_index",
    "samples",
    "stats",
    "summary",
    "unfinished",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

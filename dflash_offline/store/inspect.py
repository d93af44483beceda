"""What is in a store, as plain dictionaries for the command line, a report or a notebook.

``summary`` and ``samples`` read tables and manifests only; ``stats``, ``details`` and ``diff`` read the hidden states of
the few samples they are asked about, in numpy: importing torch would take longer than all that they do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline import manifest
from dflash_offline.errors import StoreError
from dflash_offline.store import schema
from dflash_offline.store.reader import HiddenStateStore
from dflash_offline.store.shards import read_meta

_TOKENS = 256  # read of a sample by stats and diff: long samples would make them slow, and say no more
_NOT_COMPARED = {"git"}  # differs between any two commits


def open_store(path: Path | str | HiddenStateStore) -> HiddenStateStore:
    return path if isinstance(path, HiddenStateStore) else HiddenStateStore(path, verify="off")


def summary(path: Path | str | HiddenStateStore) -> dict[str, Any]:
    """Counts, bytes, layers, buckets, arrays, identity. ``ratio`` is stored bytes over bf16 bytes, everything counted."""
    store = open_store(path)
    parts = [part.manifest for part in store.manifests()]
    tokens, num_bytes = sum(part["tokens"] for part in parts), sum(size for part in parts for size, _ in part["files"].values())
    result: dict[str, Any] = {
        "path": str(store.path),
        "url": store.remote.url if store.remote is not None else None,
        "format_version": store.attributes["format_version"],
        "identity": store.identity,
        "parts": len(parts),
        "samples": len(store),
        "tokens": tokens,
        "bytes": num_bytes,
        "files": sum(len(part["files"]) + 1 for part in parts),
        "unfinished": unfinished(store.path),
        "notes": environment_notes(store),
    }
    if parts:
        taps, width = store.num_taps, store.hidden_size
        lengths, buckets = store.lengths, store.buckets
        rms = [part["rms"] for part in parts]
        weights = np.array([part["tokens"] for part in parts], float) / tokens
        result |= {
            "codec": parts[0]["codec"],
            "num_taps": taps,
            "hidden_size": width,
            "layer_ids": store.layer_ids,
            "bf16_bytes": 2 * taps * width * tokens,
            "ratio": num_bytes / (2 * taps * width * tokens),
            "bytes_per_token": num_bytes / tokens,
            "tokens_per_sample": {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())},
            "buckets": {
                int(b): {"samples": int((buckets == b).sum()), "tokens": int(lengths[buckets == b].sum())} for b in np.unique(buckets)
            },
            "rms": {
                "min": np.min([part["min"] for part in rms], 0).tolist(),
                "mean": (weights @ np.array([part["mean"] for part in rms])).tolist(),
                "max": np.max([part["max"] for part in rms], 0).tolist(),
            },
            "arrays": arrays(store),
        }
    return result


def arrays(store: HiddenStateStore) -> list[dict[str, Any]]:
    """Arrays of the first part with the bytes they take over all parts."""
    parts = list(store.manifests())
    found = []
    for folder in sorted(path for path in parts[0].folder.iterdir() if path.is_dir()):
        meta = read_meta(folder)
        stored = sum(size for part in parts for name, (size, _) in part.manifest["files"].items() if name.startswith(f"{folder.name}/"))
        found.append(
            {
                "name": folder.name,
                "dtype": str(meta.dtype),
                "shape": list(meta.shape),
                "chunk": list(meta.chunk),
                "shard": list(meta.shard) if meta.sharded else None,
                "zstd": meta.zstd,
                "bytes": stored,
            }
        )
    return found


def samples(
    path: Path | str | HiddenStateStore,
    *,
    bucket: int | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    part: str | None = None,
    start: int = 0,
    limit: int | None = 50,
    among: np.ndarray | None = None,
) -> list[dict[str, Any]]:
    """The sample table: number in the store, part, corpus row, content hash, bucket, tokens, supervised tokens.

    Args:
        among: bool [n], only these samples.
    """
    store = open_store(path)
    wanted = store.lengths >= min_tokens
    if among is not None:
        wanted &= among
    if max_tokens is not None:
        wanted &= store.lengths <= max_tokens
    if bucket is not None:
        wanted &= store.buckets == bucket
    if part is not None:
        sizes = store.part_sizes()
        wanted &= np.repeat(np.array([name == part for name, _ in sizes], bool), [count for _, count in sizes])
    rows = []
    for number in np.flatnonzero(wanted)[start : None if limit is None else start + limit]:
        sample = store[int(number)]
        rows.append(
            {
                "number": sample.number,
                "part": sample.part,
                "index": sample.index,
                "sample_id": sample.sample_id,
                "sha256": sample.sha256.hex(),
                "bucket": sample.bucket,
                "tokens": len(sample),
                "supervised": int(sample.loss_mask.sum()),
            }
        )
    return rows


def details(
    path: Path | str | HiddenStateStore, number: int, *, layers: Sequence[int] | None = None, tokens: slice = slice(None), values: int = 8
) -> dict[str, Any]:
    """One sample: ids, mask, and for each tap the RMS of its vectors and the first values of the first token.

    Args:
        layers: positions along K; None = all.
        tokens: which tokens' hidden states to read.
        values: how many first values of a vector to give.
    """
    store = open_store(path)
    sample = store[number]
    taps = list(range(store.num_taps)) if layers is None else [int(i) for i in layers]
    hidden = sample.hidden_states_numpy(taps, tokens)
    names = store.layer_names
    rms = _norms(hidden) * store.hidden_size**-0.5
    return {
        "number": sample.number,
        "part": sample.part,
        "index": sample.index,
        "sample_id": sample.sample_id,
        "sha256": sample.sha256.hex(),
        "bucket": sample.bucket,
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "layers": [
            {
                "layer_id": names[tap],
                "rms": {"min": float(rms[:, i].min()), "mean": float(rms[:, i].mean()), "max": float(rms[:, i].max())}
                if len(rms)
                else None,
                "values": hidden[0, i, :values].tolist() if len(hidden) else [],
            }
            for i, tap in enumerate(taps)
        ],
    }


def stats(path: Path | str | HiddenStateStore, *, num_samples: int = 16, outliers: int = 8, seed: int = 0) -> dict[str, Any]:
    """Norms, outlier channels, non-finite values and similarity of the tapped layers, from ``num_samples`` random samples.

    Of each sample at most 256 tokens are read: the first ones, whose norms stand out, or from a random place on.
    ``similarity[i][j]`` is the mean cosine between the vectors of taps i and j at the same token.
    """
    store = open_store(path)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(store))[:num_samples])
    taps, width = store.num_taps, store.hidden_size
    energy, similarity, tokens, bad = np.zeros((taps, width)), np.zeros((taps, taps)), 0, 0
    low, high, total = np.full(taps, np.inf), np.zeros(taps), np.zeros(taps)
    for number, window in zip(chosen, _windows(store.lengths[chosen], seed), strict=True):
        hidden = store[int(number)].hidden_states_numpy(tokens=window).transpose(1, 0, 2)  # [K, T, H]
        finite = np.isfinite(hidden)
        if not finite.all():
            bad += int(np.count_nonzero(~finite))
            hidden = np.where(finite, hidden, np.float32(0))
        for tap, values in enumerate(hidden):  # a few MB at a time stay in the caches
            energy[tap] += np.einsum("th,th->h", values, values, dtype=np.float64)
        norms = _norms(hidden)
        rms = norms * width**-0.5
        with np.errstate(over="ignore"):  # a norm beyond float32: its vector counts as zero
            unit = (hidden / np.maximum(norms, 1e-12)[..., None].astype(np.float32)).reshape(taps, -1)
        similarity += unit @ unit.T
        low, high, total = np.minimum(low, rms.min(1)), np.maximum(high, rms.max(1)), total + rms.sum(1)
        tokens += hidden.shape[1]
    names = store.layer_names
    rows = []
    for tap in range(taps):
        share = energy[tap] / max(energy[tap].sum(), 1e-30)
        channels = np.argsort(-share, kind="stable")[:outliers]
        rows.append(
            {
                "layer_id": names[tap],
                "rms": {"min": float(low[tap]), "mean": float(total[tap] / tokens), "max": float(high[tap])},
                "outlier_channels": [{"channel": int(c), "share_of_energy": float(share[c])} for c in channels],
                "channel_rms": np.sqrt(energy[tap] / tokens).tolist(),
            }
        )
    return {"samples": chosen.tolist(), "tokens": tokens, "not_finite": bad, "layers": rows, "similarity": (similarity / tokens).tolist()}


def _norms(vectors: np.ndarray) -> np.ndarray:
    """L2 norm of each vector of float32 ``[..., H]``, summed in float64, ``[...]``."""
    return np.sqrt(np.einsum("...h,...h->...", vectors, vectors, dtype=np.float64))


def _windows(lengths: np.ndarray, seed: int) -> list[slice]:
    """At most 256 tokens of each sample; of every second one those at its beginning."""
    starts = (np.random.default_rng(seed).random(len(lengths)) * np.maximum(0, lengths - _TOKENS + 1)).astype(int)
    starts[::2] = 0
    return [slice(int(start), int(start) + _TOKENS) for start in starts]


def diff(one: Path | str, other: Path | str, *, num_samples: int = 16, seed: int = 0) -> dict[str, Any]:
    """How two stores differ: identity fields, rows only in one of them, and hidden states of rows in both.

    ``relative_l2`` compares up to 256 tokens of each of ``num_samples`` random common rows, the second store against the
    first, per tap of ``layer_ids`` (with ``"last"`` for the last hidden state); both None where layers or sizes differ.
    """
    a, b = open_store(one), open_store(other)
    fields = [name for name in sorted({*a.identity, *b.identity}) if a.identity.get(name) != b.identity.get(name)]
    rows_a, rows_b = ({row.tobytes(): i for i, row in enumerate(store.hashes)} for store in (a, b))
    common = sorted(rows_a.keys() & rows_b.keys())
    result: dict[str, Any] = {
        "identity": {name: [a.identity.get(name), b.identity.get(name)] for name in fields},
        "samples": [len(a), len(b)],
        "common": len(common),
        "only_in_first": [key.hex() for key in sorted(rows_a.keys() - rows_b.keys())[:20]],
        "only_in_second": [key.hex() for key in sorted(rows_b.keys() - rows_a.keys())[:20]],
        "num_only_in": [len(rows_a) - len(common), len(rows_b) - len(common)],
        "layer_ids": None,
        "relative_l2": None,
    }
    if common and (a.layer_ids, a.num_taps, a.hidden_size) == (b.layer_ids, b.num_taps, b.hidden_size):
        result["layer_ids"] = a.layer_names
        chosen = np.random.default_rng(seed).permutation(len(common))[:num_samples]
        errors, equal = [], 0
        lengths = np.array([int(a.lengths[rows_a[common[i]]]) for i in chosen])
        for i, window in zip(chosen, _windows(lengths, seed), strict=True):
            x, y = (store[rows[common[i]]].hidden_states_numpy(tokens=window) for store, rows in ((a, rows_a), (b, rows_b)))
            equal += bool(np.array_equal(x.view(np.uint32), y.view(np.uint32)))
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite shows in the result
                relative = _norms(y - x) / np.maximum(_norms(x), 1e-30)
            errors.append(np.quantile(relative, 0.5, axis=0, method="lower"))
        result |= {"compared": len(chosen), "equal": equal, "relative_l2": np.mean(errors, 0).tolist()}
    return result


def environment_notes(path: Path | str | HiddenStateStore) -> list[str]:
    """One sentence for each version, device or attention implementation that changed between parts.

    Such a change is no reason to refuse a store, but worth saying once.
    """
    store, notes, last = open_store(path), [], {}
    for part in store.manifests():
        facts = {name: value for name, value in part.manifest["environment"].items() if name not in _NOT_COMPARED}
        facts |= {name: value for name, value in part.manifest["extra"].items() if name in ("device", "attention", "target_attention")}
        for name, value in facts.items():
            if name in last and last[name] != value:
                note = f"{name} changed from {last[name]} to {value}"
                if all(not known.startswith(note) for known in notes):
                    notes.append(f"{note} at {part.name}")
        last |= facts
    return notes


def unfinished(path: Path | str) -> list[str]:
    """Parts that were begun and not committed."""
    return sorted((entry.name.removesuffix(".partial") for entry in Path(path).glob("part-*.partial")), key=schema.part_key)


def export_sample(
    path: Path | str | HiddenStateStore, number: int, out: Path | str, *, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Write one sample to a safetensors file: ``input_ids`` int32 [T], ``loss_mask`` uint8 [T], ``hidden_states`` bf16 [T, k, H].

    Its metadata are strings: part, corpus row, content hash, bucket, and the layer ids along k.

    Args:
        layers: positions along K; None = all.

    Returns:
        ``{"path", "bytes", "metadata"}``.

    Raises:
        StoreError: the file cannot be written.
    """
    import safetensors.torch
    import torch

    store = open_store(path)
    sample, out = store[number], Path(out)
    names = list(map(str, store.layer_names))
    taps = range(store.num_taps) if layers is None else layers
    facts = {
        "number": sample.number,
        "part": sample.part,
        "sample_id": sample.sample_id,
        "sha256": sample.sha256.hex(),
        "bucket": sample.bucket,
    }
    metadata = {name: str(value) for name, value in facts.items()} | {"layer_ids": ",".join(names[tap] for tap in taps)}
    tensors = {
        "input_ids": torch.from_numpy(sample.input_ids.copy()),
        "loss_mask": torch.from_numpy(sample.loss_mask.copy()),
        "hidden_states": sample.hidden_states(list(taps)),
    }
    try:
        manifest.write_bytes(out, safetensors.torch.save(tensors, metadata))
    except OSError as error:
        raise StoreError(f"{out}: cannot be written ({error.strerror or error})") from None
    return {"path": str(out), "bytes": out.stat().st_size, "metadata": metadata}

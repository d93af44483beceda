"""What is in a hidden-state store. ``describe`` and ``check`` read tables and manifests only and never import torch.

T tokens of a sample, K taps, H hidden size.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.errors import DFlashError, StoreDamagedError, StoreError
from dflash_offline.manifest import MANIFEST, checksum, damaged_files, digest, read_json, read_manifest

if TYPE_CHECKING:
    from dflash_offline.store import HiddenStateStore, StoredSample

_OWN = ("zarr.json", "index.json", ".lock")


def read_index(path: Path) -> dict[str, Any]:
    """The store's index: every committed part with its counts.

    Raises:
        StoreDamagedError: it is missing or does not fit its own digest.
    """
    try:
        index = read_json(path / "index.json")
    except FileNotFoundError:
        raise StoreDamagedError(f"{path / 'index.json'}: missing; `dflash-offline verify` says what is there") from None
    if not isinstance(index, dict) or index.get("digest") != digest({name: value for name, value in index.items() if name != "digest"}):
        raise StoreDamagedError(f"{path / 'index.json'}: its digest does not fit its content; it was edited or damaged")
    return index


def describe(path: Path) -> dict[str, Any]:
    """Counts, bytes, identity, arrays, norms and buckets of a store, without reading a hidden state."""
    import numpy as np
    import zarr

    attributes = read_json(path / "zarr.json").get("attributes", {})
    index = read_index(path)
    parts = {name: entry for name, entry in sorted(index["parts"].items()) if (path / name / MANIFEST).is_file()}
    samples, tokens, size = (sum(entry[field] for entry in parts.values()) for field in ("samples", "tokens", "bytes"))
    found: dict[str, Any] = {
        "path": str(path),
        "format_version": attributes.get("format_version"),
        "identity": attributes.get("identity", {}),
        "parts": parts,
        "parts_missing": sorted(set(index["parts"]) - set(parts)),
        "parts_unfinished": sorted(entry.name for entry in path.glob("part-*.partial")),
        "samples": samples,
        "tokens": tokens,
        "bytes": size,
    }
    if not parts:
        return found
    manifests = {name: read_manifest(path / name) for name in parts}
    first = next(iter(manifests.values()))
    num_taps, hidden_size = first["num_taps"], first["hidden_size"]
    total = sum(manifest["tokens"] for manifest in manifests.values())
    rms = [manifest["rms"] for manifest in manifests.values()]
    layers: list[Any] = list(found["identity"].get("layer_ids", []))
    layers += ["last"] * (num_taps - len(layers))
    found |= {
        "codec": first["codec"],
        "num_taps": num_taps,
        "hidden_size": hidden_size,
        "bytes_per_token": size / tokens,
        "ratio_to_bf16": size / (tokens * num_taps * hidden_size * 2),
        "arrays": _arrays(path / next(iter(parts))),
        "layers": [
            {
                "layer": layers[k],
                "rms_min": min(row["min"][k] for row in rms),
                "rms_mean": sum(row["mean"][k] * m["tokens"] for row, m in zip(rms, manifests.values(), strict=True)) / total,
                "rms_max": max(row["max"][k] for row in rms),
            }
            for k in range(num_taps)
        ],
    }
    buckets = np.concatenate([zarr.open_array(path / name / "buckets", mode="r")[:] for name in parts])
    lengths = np.concatenate([np.diff(zarr.open_array(path / name / "sample_offsets", mode="r")[:]) for name in parts])
    found["buckets"] = [
        {
            "bucket": int(bucket),
            "samples": int((buckets == bucket).sum()),
            "tokens": int(lengths[buckets == bucket].sum()),
            "shortest": int(lengths[buckets == bucket].min()),
            "longest": int(lengths[buckets == bucket].max()),
        }
        for bucket in np.unique(buckets)
    ]
    return found


def _arrays(part: Path) -> list[dict[str, Any]]:
    """Shape, chunks and codecs of each array of a part, from its Zarr metadata."""
    found = []
    for path in sorted(part.glob("*/zarr.json")):
        metadata = read_json(path)
        outer = metadata["codecs"]
        sharded = outer[0]["name"] == "sharding_indexed"
        inner = outer[0]["configuration"] if sharded else None
        found.append(
            {
                "name": path.parent.name,
                "dtype": metadata["data_type"],
                "shape": metadata["shape"],
                "shard": metadata["chunk_grid"]["configuration"]["chunk_shape"] if sharded else None,
                "chunk": inner["chunk_shape"] if inner else metadata["chunk_grid"]["configuration"]["chunk_shape"],
                "codecs": [codec["name"] for codec in (inner["codecs"] if inner else outer)],
            }
        )
    return found


def samples_table(path: Path, *, bucket: int | None, shortest: int, longest: int | None, limit: int) -> list[dict[str, Any]]:
    """Number, part, length, bucket, corpus row and content hash of samples, filtered."""
    import numpy as np
    import zarr

    found: list[dict[str, Any]] = []
    number = 0
    for name in sorted(name for name in read_index(path)["parts"] if (path / name / MANIFEST).is_file()):
        tables = {
            table: zarr.open_array(path / name / table, mode="r")[:]
            for table in ("sample_offsets", "buckets", "sample_ids", "sample_hashes")
        }
        lengths = np.diff(tables["sample_offsets"])
        for i, length in enumerate(lengths.tolist()):
            fits = length >= shortest and (longest is None or length <= longest) and (bucket is None or tables["buckets"][i] == bucket)
            if fits and len(found) < limit:
                found.append(
                    {
                        "sample": number + i,
                        "part": name,
                        "tokens": length,
                        "bucket": int(tables["buckets"][i]),
                        "row": int(tables["sample_ids"][i]),
                        "hash": tables["sample_hashes"][i].tobytes().hex(),
                    }
                )
        number += len(lengths)
    return found


def check(path: Path, *, deep: bool, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Every fault of a store, one line each: ``part-00003: high/c/0/0/0: content differs from its checksum``.

    Args:
        deep: read every byte and compare checksums; else sizes only.
        say: told each part as it is checked.
    """
    problems: list[str] = []
    try:
        index = read_index(path)
    except DFlashError as error:
        return [str(error)]
    group = path / "zarr.json"
    if not group.is_file():
        problems.append("zarr.json: missing")
    elif [group.stat().st_size, checksum(group)] != index["group"]:
        problems.append("zarr.json: differs from what the index says")
    for name, entry in sorted(index["parts"].items()):
        say(name)
        folder = path / name
        if not folder.is_dir():
            problems.append(f"{name}: missing, {entry['samples']:,} samples; capture again, only it is made anew")
            continue
        try:
            manifest = read_manifest(folder)
        except DFlashError as error:
            problems.append(f"{name}: {error}")
            continue
        if manifest["digest"] != entry["manifest"]:
            problems.append(f"{name}: not the part that the index lists (another manifest); it was swapped or edited")
        problems += [f"{name}: {_with_samples(folder, manifest, line)}" for line in damaged_files(folder, manifest, deep=deep)]
        known = {*manifest["files"], MANIFEST}
        there = {entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if entry.is_symlink() or not entry.is_dir()}
        problems += [f"{name}: {extra}: not in the manifest" for extra in sorted(there - known)]
    for entry in sorted(path.iterdir()):
        working = entry.name.startswith(".part-") or entry.name.endswith((".partial", ".tmp"))
        if entry.name not in index["parts"] and entry.name not in _OWN and not working:
            problems.append(f"{entry.name}: not in the index")
    return problems


def _with_samples(folder: Path, manifest: dict[str, Any], problem: str) -> str:
    """Add which samples a damaged shard file holds, from its place along the tokens."""
    import numpy as np

    name = problem.split(":")[0]
    pieces = name.split("/")
    if len(pieces) < 3 or pieces[1] != "c" or not pieces[2].isdigit() or name not in manifest["files"]:
        return problem
    try:
        import zarr

        shard = read_json(folder / pieces[0] / "zarr.json")["chunk_grid"]["configuration"]["chunk_shape"][0]
        offsets = zarr.open_array(folder / "sample_offsets", mode="r")[:]
        if read_json(folder / pieces[0] / "zarr.json")["shape"][0] != offsets[-1]:
            return problem  # not an array along tokens
    except (OSError, ValueError, KeyError, DFlashError):
        return problem
    first = int(np.searchsorted(offsets, int(pieces[2]) * shard, "right")) - 1
    last = int(np.searchsorted(offsets, (int(pieces[2]) + 1) * shard, "left")) - 1
    return f"{problem} (samples {first} to {min(last, len(offsets) - 2)} of the part)"


def find_sample(store: "HiddenStateStore", which: str) -> "StoredSample":
    """A sample by its number, or by the first digits of its content hash.

    Raises:
        StoreError: there is none, or more than one.
    """
    if which.lstrip("-").isdigit() and len(which) < 12:
        if not -len(store) <= int(which) < len(store):
            raise StoreError(f"sample {which}: the store has {len(store):,}, numbered from 0")
        return store[int(which)]
    try:
        wanted = bytes.fromhex(which if len(which) % 2 == 0 else which[:-1])
    except ValueError:
        raise StoreError(f"sample {which!r}: give a number, or the first digits of a content hash") from None
    hits = [i for i, row in enumerate(store.hashes) if row.tobytes().hex().startswith(which.lower()) and row.tobytes().startswith(wanted)]
    if len(hits) != 1:
        raise StoreError(f"sample {which!r}: {len(hits)} samples have a content hash that starts like that")
    return store[hits[0]]


def statistics(store: "HiddenStateStore", *, rows: int, seed: int = 0) -> dict[str, Any]:
    """Norms, outlier channels, non-finite values and similarity of the tapped layers, over some samples.

    Args:
        rows: samples read, drawn evenly over the store.
    """
    import torch

    if not len(store):
        raise StoreError(f"{store.path}: holds no committed part yet; capture first")
    chosen = torch.linspace(0, len(store) - 1, min(rows, len(store))).round().long().unique().tolist()
    num_taps, hidden = store.num_taps, store.hidden_size
    energy = torch.zeros(num_taps, hidden, dtype=torch.float64)
    largest = torch.zeros(num_taps)
    similarity = torch.zeros(num_taps, num_taps, dtype=torch.float64)
    first_rms = torch.zeros(num_taps, dtype=torch.float64)
    bad = torch.zeros(num_taps, dtype=torch.long)
    token_rms: list[torch.Tensor] = []
    tokens = 0
    for number in chosen:
        states = store[number].hidden_states().float()  # [T, K, H]
        bad += (~states.isfinite()).sum((0, 2))
        states = states.nan_to_num(0.0, 0.0, 0.0)
        rms = states.square().mean(2).sqrt()  # [T, K]
        token_rms.append(rms)
        first_rms += rms[0]
        energy += states.square().sum(0).double()
        largest = torch.maximum(largest, states.abs().amax((0, 2)))
        unit = states / states.norm(dim=2, keepdim=True).clamp_min(1e-30)
        similarity += torch.einsum("tkh,tlh->kl", unit, unit).double()
        tokens += len(states)
    all_rms = torch.cat(token_rms)
    layers: list[Any] = [*store.layer_ids, *["last"] * (num_taps - len(store.layer_ids))]
    share = energy / energy.sum(1, keepdim=True).clamp_min(1e-300)
    top = share.topk(min(4, hidden), dim=1)
    return {
        "samples": len(chosen),
        "tokens": tokens,
        "layers": [
            {
                "layer": layers[k],
                "rms_median": float(all_rms[:, k].median()),
                "rms_mean": float(all_rms[:, k].mean()),
                "rms_max": float(all_rms[:, k].max()),
                "rms_first_token": float(first_rms[k] / len(chosen)),
                "abs_max": float(largest[k]),
                "non_finite": int(bad[k]),
                "outlier_channels": [
                    {"channel": int(channel), "energy_share": float(value)}
                    for channel, value in zip(top.indices[k], top.values[k], strict=True)
                ],
            }
            for k in range(num_taps)
        ],
        "similarity": (similarity / max(1, tokens)).tolist(),
    }


def difference(one: "HiddenStateStore", other: "HiddenStateStore", *, rows: int) -> dict[str, Any]:
    """How two stores differ: identity, which rows each has, and hidden states of rows that both have.

    Args:
        rows: shared samples whose hidden states are compared.
    """
    fields = sorted({*one.identity, *other.identity})
    identity = {
        name: [one.identity.get(name), other.identity.get(name)] for name in fields if one.identity.get(name) != other.identity.get(name)
    }
    mine, theirs = ({row.tobytes() for row in store.hashes} for store in (one, other))
    shared = sorted(mine & theirs)
    found: dict[str, Any] = {
        "identity": identity,
        "samples": [len(one), len(other)],
        "only_in_first": len(mine - theirs),
        "only_in_second": len(theirs - mine),
        "shared": len(shared),
        "layers": [],
        "compared": 0,
    }
    layers = [layer for layer in one.layer_ids if layer in other.layer_ids] if shared else []
    if not layers or one.hidden_size != other.hidden_size:
        return found
    step = max(1, len(shared) // rows)
    chosen = shared[::step][:rows]
    found["compared"] = len(chosen)
    found["layers"] = [
        dict(layer=layer, relative_l2=value[0], largest=value[1])
        for layer, value in zip(layers, _compare(one, other, chosen, layers), strict=True)
    ]
    return found


def _compare(one: "HiddenStateStore", other: "HiddenStateStore", chosen: Sequence[bytes], layers: list[int]) -> list[tuple[float, float]]:
    import torch

    square = torch.zeros(2, len(layers), dtype=torch.float64)
    largest = torch.zeros(len(layers))
    for row in chosen:
        a, b = (store[store.find(row)].hidden_states(layers=store.positions(layers)).float() for store in (one, other))
        square[0] += (a - b).square().sum((0, 2)).double()
        square[1] += a.square().sum((0, 2)).double()
        largest = torch.maximum(largest, (a - b).abs().amax((0, 2)))
    relative = (square[0] / square[1].clamp_min(1e-300)).sqrt()
    return [(float(relative[k]), float(largest[k])) for k in range(len(layers))]

"""What a run left behind, gathered from its manifests, ``metrics.jsonl`` and ``results.json``. Nothing is computed anew."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, read_manifest
from dflash_offline.watch.metrics import read_metrics


@dataclass(frozen=True)
class Facts:
    """Everything the page shows.

    Attributes:
        corpus, drafter, export: manifests of these stages.
        buckets: rows of the bucket table.
        parts: manifests of the parts this run uses, without their file lists.
        capture: capture rates by replica, and the totals of the store.
        metrics, heldout: rows of ``metrics.jsonl`` with a training loss, and with held-out figures.
        evaluation: ``results.json``.
        keys: content key of each stage.
    """

    config: RunConfig
    keys: dict[str, str]
    corpus: dict[str, Any]
    buckets: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    capture: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    drafter: dict[str, Any]
    export: dict[str, Any]
    evaluation: dict[str, Any]


def gather(config: RunConfig) -> Facts:
    """Read a finished run.

    Raises:
        DFlashError: a stage before the report is not complete; the text names it.
    """
    layout = Layout(config.root_dir)
    all_keys = {
        "corpus": keys.corpus_key(config),
        "capture": keys.capture_key(config),
        "train": keys.train_key(config),
        "export": keys.export_key(config),
        "evaluate": keys.evaluate_key(config),
    }
    corpus_folder = layout.corpus(all_keys["corpus"])
    corpus = read_manifest(corpus_folder, kind="corpus")
    drafter_folder, evaluation_folder = layout.drafter(all_keys["train"]), layout.evaluation(all_keys["evaluate"])
    read_manifest(evaluation_folder, kind="evaluation")
    rows = read_metrics(layout.metrics(all_keys["train"]))
    parts = _parts(layout, all_keys)
    return Facts(
        config=config,
        keys=all_keys,
        corpus=corpus,
        buckets=bucket_rows(corpus_folder, corpus),
        parts=parts,
        capture=capture_rates(parts),
        metrics=[row for row in rows if "loss" in row],
        heldout=[row for row in rows if isinstance(row.get("heldout"), dict)],
        drafter=read_manifest(drafter_folder, kind="drafter"),
        export=read_manifest(layout.export(all_keys["export"]), kind="export"),
        evaluation=read_json(evaluation_folder / "results.json"),
    )


def thinned(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many rows, evenly spread; the first and the newest are among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def bucket_rows(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Bounds, conversations and tokens of each length bucket, from the corpus arrays."""
    import numpy as np

    from dflash_offline.corpus import Corpus

    corpus = Corpus.open(folder)
    edges = list(manifest["bucket_edges"])
    rows = []
    for bucket, (low, high) in enumerate(zip([0, *edges], edges, strict=False)):
        mine = np.asarray(corpus.buckets) == bucket
        lengths = np.asarray(corpus.lengths)[mine]
        rows.append(
            {
                "bucket": bucket,
                "low": low,
                "high": high,
                "rows": int(mine.sum()),
                "heldout": int((np.asarray(corpus.heldout) & mine).sum()),
                "tokens": int(lengths.sum()),
                "share": float(lengths.sum() / max(1, np.asarray(corpus.lengths).sum())),
            }
        )
    return rows


def _parts(layout: Layout, all_keys: dict[str, str]) -> list[dict[str, Any]]:
    plan = read_json(layout.plan(all_keys["capture"], all_keys["corpus"]))
    names = [*plan["reused"], *(part["name"] for part in plan["parts"])]
    store = layout.store(all_keys["capture"])
    found = []
    for name in names:
        if (store / name / MANIFEST).is_file():
            manifest = read_manifest(store / name)
            manifest["bytes"] = sum(size for size, _ in manifest.pop("files").values())
            found.append(manifest)
    return found


def capture_rates(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens, seconds and rate of each replica that wrote parts, from the parts' manifests."""
    by_replica: dict[tuple[Any, str, str], dict[str, Any]] = {}
    for part in parts:
        extra = part.get("extra") or {}
        name = (extra.get("replica"), str(extra.get("device", "?")), str(extra.get("host", "")))
        told = dict(zip(("replica", "device", "host"), name, strict=True))
        entry = by_replica.setdefault(name, {**told, "parts": 0, "tokens": 0, "computed": 0, "seconds": 0.0, "bytes": 0})
        entry["parts"] += 1
        entry["tokens"] += part["tokens"]
        entry["bytes"] += part["bytes"]
        entry["seconds"] += float(extra.get("seconds") or 0.0)
        entry["computed"] += extra.get("tokens", part["tokens"])  # fewer than the part's when it was begun by an earlier run
    rows = sorted(by_replica.values(), key=lambda row: (row["host"], row["replica"] is None, row["replica"] or 0))
    for row in rows:
        computed = row.pop("computed")
        row["tokens_per_s"] = computed / row["seconds"] if row["seconds"] else None
    return rows


def capture_remarks(parts: list[dict[str, Any]]) -> str:
    """One or two sentences: packed or padded, waste, waiting for the disk, batches halved for want of memory; "" when nothing is known."""
    extras = [(part["tokens"], extra) for part in parts if "padding" in (extra := part.get("extra") or {})]
    if not extras:
        return ""
    tokens = sum(count for count, _ in extras)
    padding = sum(count * extra["padding"] for count, extra in extras) / max(1, tokens)
    seconds, waited = (sum(float(extra.get(name) or 0.0) for _, extra in extras) for name in ("seconds", "wait_s"))
    packed = {bool(extra.get("packed")) for _, extra in extras}
    how = "packed" if packed == {True} else "padded" if packed == {False} else "packed in some parts and padded in others"
    share = waited / max(seconds, 1e-9)
    text = f"Batches were {how}: {padding:.1%} of what was computed held no token. The target waited {share:.1%} of its time for the disk."
    limits: dict[str, int] = {}
    for _, extra in extras:
        for bucket, limit in (extra.get("tokens_per_batch_halved_to") or {}).items():
            limits[bucket] = min(limit, limits.get(bucket, limit))
    if limits:
        text += (
            " Memory ran out: "
            + ", ".join(f"bucket {bucket} went on with {limit:,} tokens a batch" for bucket, limit in sorted(limits.items()))
            + "."
        )
    return text

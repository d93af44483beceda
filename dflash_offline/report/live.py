"""The numbers of a run while it goes on, for the live page and for Prometheus: one JSON value from its files alone."""

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.figures import finite
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, read_manifest
from dflash_offline.report.facts import bucket_rows, capture_rates, thinned
from dflash_offline.status import Stage, read_status
from dflash_offline.watch.metrics import MetricsTail

POINTS = 400  # of a curve
_FIELDS = ("step", "loss", "acc", "tau", "tokens_per_s", "read_bytes_per_s", "wait_share", "lr", "epoch", "eta_s", "elapsed_s", "heldout")
_HELD = ("loss", "acc", "tau", "tau_replay")


class Live:
    """Looks at a run again and again; what cannot change any more is read once.

    Args:
        fresh_s: a look that is not older than this is given out again, however many ask.
    """

    def __init__(self, config: RunConfig, *, fresh_s: float = 1.0) -> None:
        self.config, self.layout = config, Layout(config.root_dir)
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._looked_at, self._last = float("-inf"), dict[str, Any]()
        self._tails: dict[str, MetricsTail] = {}
        self._parts: dict[Path, dict[str, Any]] = {}
        self._buckets: dict[str, list[dict[str, Any]]] = {}

    def look(self) -> dict[str, Any]:
        """Everything, as JSON values; numbers that are not finite are null."""
        with self._lock:
            if time.monotonic() - self._looked_at >= self._fresh_s:
                self._last, self._looked_at = finite(self._look()), time.monotonic()
            return self._last

    def _look(self) -> dict[str, Any]:
        status = read_status(self.config)
        keys_of = {(stage.name, stage.drafter): stage.key for stage in status.stages if stage.key is not None}
        parts, planned = self._store_parts(keys_of)
        return {
            "time": time.time(),
            "run_file": self.config.source.name,
            "target": self.config.target.model,
            **status.to_dict(),
            "curves": {name: self._curve(key) for (stage, name), key in keys_of.items() if stage == "train"},
            "buckets": self._bucket_table(status.stages),
            "parts": {
                "committed": len(parts),
                "planned": planned,
                "tokens": sum(part["tokens"] for part in parts),
                "bytes": sum(part["bytes"] for part in parts),
            },
            "replicas": capture_rates(parts),
            "evaluations": {
                stage.drafter: found
                for stage in status.stages
                if stage.name == "evaluate" and stage.state == "complete" and (found := self._evaluation(stage)) is not None
            },
        }

    def _curve(self, key: str) -> dict[str, Any]:
        """Steps and evaluations of one training run, at most POINTS of each."""
        tail = self._tails.setdefault(key, MetricsTail(self.layout.metrics(key), keep=_FIELDS))
        rows = tail.read()
        held = [
            {"step": row["step"], **{name: row["heldout"].get(name) for name in _HELD}}
            for row in rows
            if isinstance(row.get("heldout"), dict)
        ]
        return {"steps": thinned([row for row in rows if "loss" in row], POINTS), "heldout": thinned(held, POINTS)}

    def _store_parts(self, keys_of: dict[tuple[str, str], str]) -> tuple[list[dict[str, Any]], int | None]:
        """Committed parts of this corpus's plan, and how many there will be; None before there is a plan."""
        capture, corpus = keys_of.get(("capture", "")), keys_of.get(("corpus", ""))
        if capture is None or corpus is None or not self.layout.plan(capture, corpus).is_file():
            return [], None
        names: list[str] = []
        with contextlib.suppress(DFlashError, OSError):
            plan = read_json(self.layout.plan(capture, corpus))
            names = [*plan["reused"], *(part["name"] for part in plan["parts"])]
        found = []
        for name in names:
            folder = self.layout.store(capture) / name
            if folder not in self._parts and (folder / MANIFEST).is_file():
                with contextlib.suppress(DFlashError, OSError):
                    manifest = read_manifest(folder)
                    size = sum(size for size, _ in manifest["files"].values())
                    self._parts[folder] = {"tokens": manifest["tokens"], "bytes": size, "extra": manifest.get("extra") or {}}
            if folder in self._parts:
                found.append(self._parts[folder])
        return found, len(names)

    def _bucket_table(self, stages: Sequence[Stage]) -> list[dict[str, Any]]:
        corpus = next((stage for stage in stages if stage.name == "corpus"), None)
        if corpus is None or corpus.key is None or corpus.state != "complete":
            return []
        if corpus.key not in self._buckets:
            folder = self.layout.corpus(corpus.key)
            with contextlib.suppress(DFlashError, OSError):
                self._buckets[corpus.key] = bucket_rows(folder, read_manifest(folder, kind="corpus"))
        return self._buckets.get(corpus.key, [])

    def _evaluation(self, stage: Stage) -> dict[str, Any] | None:
        with contextlib.suppress(DFlashError, OSError):
            found = read_json(self.layout.evaluation(str(stage.key)) / "results.json")
            return {name: found[name] for name in ("overall", "datasets", "tau_replay", "device") if name in found}
        return None

    def page(self) -> Path | None:
        """The finished report, if there is one."""
        with contextlib.suppress(DFlashError):
            path = self.layout.report(keys.report_key(self.config)) / "report.html"
            return path if path.is_file() else None
        return None

"""One replica: claim a part nobody works on, run its batches, commit it; until every part of the plan is committed.

The target is loaded when the first part was claimed, so a replica that finds nothing to do never loads it.
"""

import contextlib
import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline import identity, keys, target
from dflash_offline.capture.checks import check_taps
from dflash_offline.capture.forward import Forwarder
from dflash_offline.capture.job import Backlog, LeaseLostError, PartJob, run_batches
from dflash_offline.capture.statistics import channel_statistics
from dflash_offline.codecs import ChannelStatistics
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.errors import StoreBusyError, TargetError
from dflash_offline.figures import counted
from dflash_offline.layout import Layout
from dflash_offline.leases import EXPIRES_S, Lease, Leases
from dflash_offline.plan import CapturePlan, PlannedPart
from dflash_offline.precision import DTYPES
from dflash_offline.progress import Progress
from dflash_offline.store import PartWriter, committed_parts, create_or_open

BACKLOG_BATCHES = 3  # a batch of 16,384 tokens of an 8B target is 0.7 GB of taps
OPEN_PARTS = 2  # the next part starts while the last one is still being written


class Replica:
    """One copy of the target at work on a capture plan.

    Args:
        capture_key: names the store (``keys.capture_key``).
        replica, replicas: this one's number and how many there are, for messages and the estimate of the time left.
        host, lease_expires_s: see ``Leases``.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        capture_key: str,
        replica: int,
        replicas: int,
        progress: Progress,
        host: str | None = None,
        lease_expires_s: float = EXPIRES_S,
    ) -> None:
        self.config, self.replica, self.replicas, self.progress = config, replica, replicas, progress
        layout = Layout(config.root_dir)
        corpus_key = keys.corpus_key(config)
        self.store_path = layout.store(capture_key)
        self.corpus = Corpus.open(layout.corpus(corpus_key), deep=True)
        self.plan = CapturePlan.load(layout.plan(capture_key, corpus_key))
        create_or_open(self.store_path, keys.store_identity(config), url=config.store.location(capture_key))
        beat = min(5.0, lease_expires_s / 4)
        self.leases = Leases(layout.leases(capture_key), what=f"replica {replica}", expires_s=lease_expires_s, heartbeat_s=beat, host=host)
        self.layer_ids = identity.capture_layer_ids(config)
        if config.store.store_last_hidden:
            self.layer_ids = [*self.layer_ids, identity.num_target_layers(config) - 1]
        self.target: target.Target | None = None
        self.backlog = Backlog(BACKLOG_BATCHES)
        self.jobs: list[PartJob] = []
        self.statistics: ChannelStatistics | None = None
        self._facts: target.TargetFacts | None = None
        self._checked = False
        self._seen, self._looked = set[str](), 0.0
        self._computed_tokens, self._started = 0, 0.0
        self._computed_of: dict[str, int] = {}  # tokens of each part, by this process
        self._commit_lines: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Work until every part of the plan is committed, by whomever.

        SIGTERM releases the leases and leaves at once with 143: what was written so far is kept, and nothing that
        takes long has to be saved.
        """
        with contextlib.suppress(ValueError):  # not in the main thread: somebody else takes care of signals
            signal.signal(signal.SIGTERM, self._terminate)
        try:
            while missing := self._missing():
                lease = self._claim(missing)
                if lease is not None:
                    self._capture(lease)
                elif self.jobs:
                    self._settle(leave=0)
                else:
                    self._wait_for_others(missing)
            self._settle(leave=0)
        finally:
            self.leases.close()
        self._report(force=True, text="all parts are committed")

    def _terminate(self, signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_IGN)
        held = [job.lease.name for job in self.jobs if not job.is_done]
        goes_on = "goes on where it is" if len(held) == 1 else "go on where they are"
        self.leases.close()
        with contextlib.suppress(Exception):  # the main thread may be in the middle of a print
            self.progress.say(f"Target {self.replica}: stopped" + (f"; {', '.join(held)} {goes_on} with the next run" if held else ""))
            self.progress.end("stopped")
        os._exit(143)

    # -- which part ---------------------------------------------------------------------------------------------------

    def _missing(self) -> list[str]:
        """Parts of the plan that are not committed, in its order: longest rows first, so that the tail is short."""
        committed = set(committed_parts(self.store_path))
        return [part.name for part in self.plan.parts if part.name not in committed]

    def _claim(self, missing: list[str]) -> Lease | None:
        ours = {job.lease.name for job in self.jobs}
        held = self.leases.all(missing)
        for name in missing:
            if name in ours or (name in held and not held[name].is_free):
                continue
            lease = self.leases.claim(name)
            if lease is None:
                continue
            if name in committed_parts(self.store_path):  # finished between our look and our claim
                lease.discard()
                continue
            if name in held and held[name].age_s < 1e9:  # not a released one, whose time stamp is 0
                self.progress.say(f"Target {self.replica}: takes {name} over from {held[name].owner or 'a process that is gone'}")
            return lease
        return None

    def _wait_for_others(self, missing: list[str]) -> None:
        held = self.leases.all(missing)
        owner = next((str(holding.owner) for holding in held.values() if holding.owner), "another replica")
        self._report(text=f"waiting for {counted(len(missing), 'part')}, {missing[0]} held by {owner}")
        time.sleep(0.5)

    # -- one part -----------------------------------------------------------------------------------------------------

    def _capture(self, lease: Lease) -> None:
        part = next(part for part in self.plan.parts if part.name == lease.name)
        try:
            self._load()
            writer = self._open_writer(part)
            if writer is None:
                lease.release()
                time.sleep(0.5)
                return
            job = PartJob(writer, lease, self.corpus, self.backlog, layer_ids=self.layer_ids, device=self.target.device)
        except BaseException:
            lease.release()
            raise
        self.jobs.append(job)
        self._run_batches(part, job, resume=writer.resume_sample)
        self._settle(leave=OPEN_PARTS - 1)

    def _open_writer(self, part: PlannedPart) -> PartWriter | None:
        """The part's writer, entered; None while a process that lost its lease still has it open on this machine."""
        writer = PartWriter(
            self.store_path,
            part.name,
            store_settings=self.config.store,
            num_taps=len(self.layer_ids),
            hidden_size=self._facts.hidden_size,
            num_tokens=part.tokens,
            num_samples=len(part.rows),
            statistics=self.statistics,
            threads=max(1, min(8, (os.cpu_count() or 1) // max(1, self.replicas))) if self.target.device.type == "cuda" else 1,
        )
        try:
            return writer.__enter__()
        except StoreBusyError:
            return None

    def _run_batches(self, part: PlannedPart, job: PartJob, *, resume: int) -> None:
        waited = self.backlog.waited_s
        self._started = self._started or time.monotonic()
        before = (self.forwarder.tokens, self.forwarder.padded_tokens)

        def first_batch(ids: np.ndarray, taps: list[torch.Tensor]) -> None:
            if not self._checked:
                self._self_check(ids, taps)

        def progress(rows: int, tokens: int) -> None:
            self._computed_tokens += tokens
            self._computed_of[part.name] = self._computed_of.get(part.name, 0) + tokens
            self._report(text=f"{part.name}: {rows} of {len(part.rows)} rows", part_rows_done=rows, part_rows=len(part.rows))

        tokens = run_batches(part, job, self.forwarder, self.corpus, resume=resume, first_batch=first_batch, progress=progress)
        if job.error is not None:
            job.abandon()
            return
        done, padded = self.forwarder.tokens - before[0], self.forwarder.padded_tokens - before[1]
        extra = self._recorded | {
            "tokens": tokens,
            "padding": round(1 - done / padded, 5) if padded else 0.0,
            "wait_s": round(self.backlog.waited_s - waited, 3),
            "resumed_at_sample": resume,
            "tokens_per_batch_halved_to": {str(bucket): limit for bucket, limit in self.forwarder.limits.items()},
            "compiled_graphs": self.forwarder.num_graphs,
        }
        self._commit_lines[part.name] = extra
        job.finish(extra)

    def _settle(self, *, leave: int) -> None:
        """Wait until at most ``leave`` jobs are being written; raise what went wrong in one."""
        while self.jobs and (len(self.jobs) > leave or self.jobs[0].is_done):
            job = self.jobs[0]
            job.wait()
            self.jobs.pop(0)
            if isinstance(job.error, LeaseLostError):
                self.progress.say(f"Target {self.replica}: {job.lease.name} was taken over by another process; its work is left to it")
                self.leases.forget(job.lease)
                continue
            if job.error is not None:
                job.lease.release()
                if isinstance(job.error, torch.OutOfMemoryError):
                    self._make_room(job)
                    continue
                raise job.error
            job.lease.discard()
            self._say_committed(job.lease.name)

    def _make_room(self, job: PartJob) -> None:
        """Rows could not be taken off the GPU: smaller batches from now on; the part is claimed again and goes on where it is."""
        bucket, lengths = job.at
        if not self.forwarder.make_room(bucket, lengths):
            raise TargetError(
                f"{job.lease.name}: no GPU memory is left to take a single row of {lengths[0]} tokens off it; lower [corpus] max_length, "
                "capture fewer layers, or use a GPU with more memory"
            )

    # -- the target -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self.target is not None:
            return
        config = self.config.target
        folder: Path = identity.model_folder(self.config)
        device = torch.device("cpu")
        if config.gpus != "cpu":
            if not torch.cuda.is_available():
                raise TargetError(f'[target] gpus = {config.gpus}: this process sees no GPU; check nvidia-smi, or set gpus = "cpu"')
            device = torch.device("cuda", 0)
        else:
            torch.set_num_threads(1)  # replicas share the cores: more threads each ran several times slower
        self.progress.update(text="loading the target", force=True)
        start = time.monotonic()
        self._facts = target.facts(folder, config.trust_remote_code)
        self.target = target.load_target(
            folder,
            dtype=DTYPES[config.dtype],
            device=device,
            attention=config.attention,
            layer_ids=self.layer_ids,
            trust_remote_code=config.trust_remote_code,
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        name = _device_name(device)
        self.progress.say(
            f"Target {self.replica} on {device}{f' ({name})' if name else ''} loaded in {time.monotonic() - start:.1f} s, "
            f"{self.target.num_bytes / 1e9:.{1 if self.target.num_bytes > 1e8 else 3}f} GB"
        )
        if self._facts.is_hybrid and device.type == "cuda" and importlib.util.find_spec("fla") is None:
            self.progress.say(
                f"Target {self.replica}: its linear-attention layers run in plain PyTorch, several times slower; "
                "`pip install flash-linear-attention causal-conv1d` gives transformers its kernels"
            )
        self.forwarder = Forwarder(
            self.target,
            compile_layers=config.compile,
            is_hybrid=self._facts.is_hybrid,
            vocab_size=self._facts.vocab_size,
            packed=self.plan.packed,
            say=lambda line: self.progress.say(f"Target {self.replica}: {line}"),
        )
        planned = [row for part in self.plan.parts for row in part.rows]
        self.forwarder.prepare(np.unique(np.asarray(self.corpus.lengths)[planned]).tolist())
        self._recorded: dict[str, Any] = {
            "replica": self.replica,
            "host": self.leases.owner.host,
            "device": str(device),
            "gpu": name,
            "dtype": config.dtype,
            "attention": config.attention,
            "compiled": self.forwarder.compiled,
            "packed": self.forwarder.packs,
        }
        self.statistics = channel_statistics(self.config.store.codec, self.store_path, self.plan, self.corpus, self.forwarder)
        self._say_changes()

    def _self_check(self, input_ids: np.ndarray, taps: list[torch.Tensor]) -> None:
        ids = torch.from_numpy(np.asarray(input_ids, dtype=np.int64))
        distance = check_taps(self.target, ids, taps)
        self._checked = True
        self.progress.say(f"Target {self.replica}: self-check passed, taps are at most {distance:.2g} from a plain forward's hidden states")

    def _say_changes(self) -> None:
        """Once, when the store was begun with another GPU, attention implementation or version: allowed, but worth knowing."""
        from dflash_offline.environment import environment
        from dflash_offline.manifest import MANIFEST, read_json

        names = committed_parts(self.store_path)
        if not names:
            return
        found = read_json(self.store_path / names[-1] / MANIFEST)
        then = {**{key: (found.get("extra") or {}).get(key) for key in ("gpu", "attention")}, **(found.get("environment") or {})}
        now = {**self._recorded, **environment()}
        changed = [
            f"{key} {then[key]} -> {now[key]}" for key in ("gpu", "attention", "torch", "transformers") if then.get(key) != now.get(key)
        ]
        changed = [text.replace("GPU-", "") if text.startswith("gpu") else text for text in changed if not _same_gpu_model(text)]
        if changed:
            self.progress.say(f"Target {self.replica}: the store was begun with other means ({', '.join(changed)}); its rows stay valid")

    # -- progress -------------------------------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float:
        return self._computed_tokens / max(time.monotonic() - self._started, 1e-9) if self._started else 0.0

    def _report(self, *, text: str, force: bool = False, **part: float) -> None:
        committed = set(committed_parts(self.store_path)) if force or time.monotonic() - self._looked > 2 else self._seen
        self._seen, self._looked = committed, time.monotonic()
        done = sum(part.name in committed for part in self.plan.parts)
        left = sum(part.tokens for part in self.plan.parts if part.name not in committed)
        numbers: dict[str, float] = {"tokens": self._computed_tokens, "replica": self.replica, "tokens_left": left}
        if rate := self.tokens_per_s:
            replicas = max(1, self.replicas)
            begun = replicas * sum(tokens for name, tokens in self._computed_of.items() if name not in committed)  # others alike
            numbers |= {"tokens_per_s": round(rate, 1), "eta_s": round(max(0, left - begun) / rate / replicas, 1)}
        numbers |= {"writer_queue": self.backlog.waiting, "writer_queue_limit": self.backlog.limit, **part}
        self.progress.update(done=done, total=len(self.plan.parts), text=text, force=force, **numbers)

    def _say_committed(self, name: str) -> None:
        self._looked = 0.0
        self._report(text=f"{name} committed", force=True)
        state, extra = self.progress.state, self._commit_lines.pop(name, {})
        eta, tokens = state["numbers"].get("eta_s", 0.0), next(part.tokens for part in self.plan.parts if part.name == name)
        stored = tokens - extra.get("tokens", 0)
        taken_up = f", {stored:,} of them by an earlier run" if stored else ""
        waited = f", waited {extra['wait_s']:.1f} s for the disk" if extra.get("wait_s", 0) > 0.1 else ""
        self.progress.say(
            f"Target {self.replica}: {name} committed, {tokens:,} tokens{taken_up}; {_rate(self.tokens_per_s)} so far, "
            f"padding {100 * extra.get('padding', 0):.1f} %{waited}; {state['done']}/{state['total']} parts, ETA {_minutes(eta)}"
        )


def _device_name(device: torch.device) -> str:
    """``NVIDIA H200, GPU-0123...``: which physical GPU it is, whatever number it goes by here."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return f"{properties.name}, GPU-{uuid}" if uuid else properties.name


def _same_gpu_model(text: str) -> bool:
    """Another GPU of the same model is no change."""
    if not text.startswith("gpu "):
        return False
    then, _, now = text[4:].partition(" -> ")
    return then.split(",")[0] == now.split(",")[0]


def _rate(tokens_per_s: float) -> str:
    for unit, size in (("Mtok/s", 1e6), ("Ktok/s", 1e3)):
        if tokens_per_s >= size:
            return f"{tokens_per_s / size:.3g} {unit}"
    return f"{tokens_per_s:.0f} tokens/s"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 90 else f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"

"""What a run will cost, before any GPU second: from the run file, the target's sizes and a sample of the corpus."""

import contextlib
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline import identity, keys
from dflash_offline.config import RunConfig
from dflash_offline.config.drafters import own_gpus
from dflash_offline.errors import DFlashError, StoreError
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_manifest
from dflash_offline.prompts import data_sets
from dflash_offline.sharing import shared

if TYPE_CHECKING:
    import numpy as np

    from dflash_offline.corpus import Corpus

_LOSSLESS_AT_MOST = 0.75  # real hidden states take 0.70 of bfloat16; random ones, the worst case seen, 0.73
_TOKEN_BYTES = 5  # token id and loss mask
_SAMPLE_BYTES = 58  # offsets, row number, hash, bucket
# of a drafter's parameter: bfloat16 copy and float32 gradient; float32 master and two moments, divided among the ranks with fsdp
_RANK_COPY_BYTES, _RANK_STATE_BYTES = 6, 12
_REQUIRED_SPARE = 0.02  # of the disk's need: manifests, checkpoints, logs


@dataclass(frozen=True)
class Estimate:
    """Numbers of ``dflash-offline plan``; times are None where no rate is known. Idle GPU hours count both phases' GPUs."""

    rows: int
    rows_read: int
    rows_rejected: int
    is_exact: bool
    tokens: int
    supervised_tokens: int
    captured_rows: int
    tokens_to_capture: int
    parts: int
    bytes_by_codec: dict[str, int]
    needed_bytes: int
    free_bytes: int
    disk: str
    fits: bool
    replica_bytes: int
    rank_bytes: int
    capture_s: float | None
    train_s: float | None
    idle_capture_gpu_h: float | None
    idle_train_gpu_h: float | None
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Corpus:
    rows: int
    rows_read: int
    rows_rejected: int
    is_exact: bool
    tokens: int
    supervised: int
    captured_rows: int
    captured_tokens: int
    parts: int
    is_bound: bool = False


def estimate(
    config: RunConfig, *, sample: int = 2000, capture_tokens_per_s: float | None = None, train_tokens_per_s: float | None = None
) -> Estimate:
    """Estimate a run.

    Args:
        sample: conversations tokenised, unless the corpus is prepared already, which is exact.
        capture_tokens_per_s: of one replica; measured parts under this root when left out.
        train_tokens_per_s: of all ranks of a drafter together; the newest training under this root when left out.

    Raises:
        DFlashError: target or corpus cannot be read, or a later stage would refuse a drafter or a file of prompts.
    """
    from dflash_offline.drafter import check_sizes
    from dflash_offline.plan import num_replicas

    check_sizes(config)
    data_sets(config)
    layout, warnings = Layout(config.root_dir), []
    found = _corpus(config, layout, sample)
    left_tokens, left_rows = found.tokens - found.captured_tokens, found.rows - found.captured_rows
    by_codec = {name: round(left_tokens * size + left_rows * _SAMPLE_BYTES) for name, size in token_bytes(config).items()}
    needed = round(by_codec[config.store.codec] * (1 + _REQUIRED_SPARE))
    if config.store.url is not None:  # here lie parts on their way, two a replica, and the cache
        needed = min(needed, 2 * num_replicas(config) * config.store.part_bytes + config.store.cache_bytes)
    disk = layout.root
    while not disk.exists():
        disk = disk.parent
    free = shutil.disk_usage(disk).free
    replicas = num_replicas(config)
    capture_rate = capture_tokens_per_s or _measured_capture(layout)
    train_rate = train_tokens_per_s or _measured_training(layout)
    capture_s = left_tokens / (capture_rate * replicas) if capture_rate else None
    train_s = _training_s(config, found.tokens, train_rate) if train_rate else None
    if found.is_bound:
        warnings.append(
            "the answers are not written yet: each counts as long as it may become "
            f"([regenerate] max_new_tokens = {config.regenerate.max_new_tokens}), so tokens, bytes and times are upper bounds"
        )
    with contextlib.suppress(DFlashError):  # without the target's weights no key is known
        warnings += shared(config)
    idle_capture, idle_train = _idle_gpus(config)
    if idle_capture or idle_train:
        warnings.append(
            f'{idle_capture} GPUs wait during capture and {idle_train} during training; gpus = "all" in both sections uses them all'
        )
    return Estimate(
        rows=found.rows,
        rows_read=found.rows_read,
        rows_rejected=found.rows_rejected,
        is_exact=found.is_exact,
        tokens=found.tokens,
        supervised_tokens=found.supervised,
        captured_rows=found.captured_rows,
        tokens_to_capture=left_tokens,
        parts=found.parts,
        bytes_by_codec=by_codec,
        needed_bytes=needed,
        free_bytes=free,
        disk=str(disk),
        fits=needed <= free,
        replica_bytes=_replica_bytes(config),
        rank_bytes=max(_rank_bytes(each) for each in config.each_drafter()),
        capture_s=capture_s,
        train_s=train_s,
        idle_capture_gpu_h=None if capture_s is None else idle_capture * capture_s / 3600,
        idle_train_gpu_h=None if train_s is None else idle_train * train_s / 3600,
        warnings=warnings,
    )


def token_bytes(config: RunConfig) -> dict[str, float]:
    """Stored bytes of a token for each codec, all captured layers; lossless is an upper bound, the others are fixed."""
    import numpy as np

    from dflash_offline.codecs import CODECS, ChannelStatistics, make_codec

    hidden, taps = _size(config, "hidden_size"), len(identity.capture_layer_ids(config)) + config.store.store_last_hidden
    statistics = ChannelStatistics(np.ones((taps, hidden), np.float32), num_tokens=1)  # sizes do not depend on them
    sizes: dict[str, float] = {}
    for name in CODECS:
        share = _LOSSLESS_AT_MOST if name == "lossless" else 1.0
        with contextlib.suppress(StoreError):  # a hidden size that this codec cannot pack
            sizes[name] = share * make_codec(name, num_taps=taps, hidden_size=hidden, statistics=statistics).token_bytes + _TOKEN_BYTES
    return sizes


def _size(config: RunConfig, name: str, default: int | None = None) -> int:
    value = identity.text_config(identity.target_config(config)).get(name, default)
    if not isinstance(value, int):
        raise DFlashError(f"{identity.target_folder(config)}/config.json: {name} is {value!r}; a whole number is needed")
    return value


def _corpus(config: RunConfig, layout: Layout, sample: int) -> _Corpus:
    import numpy as np

    from dflash_offline.corpus import Corpus, peek

    folder = layout.corpus(keys.corpus_key(config))
    if not (folder / MANIFEST).exists():
        seen = peek(config, sample)
        share = seen.share_read or 1.0
        supervised, parts = round(seen.supervised_tokens / share), _parts_of_sample(config, seen.lengths, share)
        is_exact = share >= 1.0 and not seen.is_bound
        rows, tokens = seen.estimated_rows, seen.estimated_tokens
        return _Corpus(rows, seen.records, seen.rejected, is_exact, tokens, supervised, 0, 0, parts, seen.is_bound)
    corpus = Corpus.open(folder)
    store = layout.store(keys.capture_key(config))
    held: set[bytes] = set()
    if store.exists():
        from dflash_offline.store import committed_hashes

        held = set(committed_hashes(store))
    captured = np.fromiter((row.tobytes() in held for row in corpus.hashes), dtype=bool, count=len(corpus))
    lengths = np.asarray(corpus.lengths)
    counts = corpus.manifest["counts"]
    captured_tokens = int(lengths[captured].sum())
    parts = _parts_of_corpus(config, layout, corpus, captured)
    return _Corpus(
        len(corpus),
        counts["records"],
        counts["rejected"],
        True,
        int(lengths.sum()),
        counts["supervised_tokens"],
        int(captured.sum()),
        captured_tokens,
        parts,
    )


def _parts_of_sample(config: RunConfig, lengths: "np.ndarray", share: float) -> int:
    """Parts of a corpus of which a share was read: what ``plan.plan_parts`` would cut, with the sample's batches scaled up."""
    import numpy as np

    from dflash_offline.buckets import auto_edges, buckets_of, packed_batches, padded_batches
    from dflash_offline.plan import bytes_per_token, num_replicas, why_padded_batches

    if not len(lengths):
        return 0
    edges, most = config.corpus.bucket_edges, config.corpus.max_length
    if not isinstance(edges, list):
        edges = auto_edges(lengths, num_buckets=config.corpus.num_buckets, max_length=most)
    buckets, padded, batches = buckets_of(lengths, edges), 0, 0
    packed = why_padded_batches(config) is None
    make_batches = packed_batches if packed else padded_batches
    for bucket in sorted(set(buckets.tolist())):
        members = np.flatnonzero(buckets == bucket)
        made = make_batches(members, lengths[members], tokens_per_batch=config.corpus.tokens_per_batch)
        batches, padded = (
            batches + len(made),
            padded + sum(int(lengths[batch].sum()) if packed else int(lengths[batch[0]]) * len(batch) for batch in made),
        )
    wanted = max(2 * num_replicas(config), math.ceil(padded / share * bytes_per_token(config) / config.store.part_bytes))
    return min(math.ceil(batches / share), wanted)


def _parts_of_corpus(config: RunConfig, layout: Layout, corpus: "Corpus", captured: "np.ndarray") -> int:
    """Parts still to be written: those of the capture plan, or of the plan that would be made now."""
    import numpy as np

    from dflash_offline.plan import CapturePlan, bytes_per_token, num_replicas, plan_parts, why_padded_batches

    store, path = layout.store(keys.capture_key(config)), layout.plan(keys.capture_key(config), keys.corpus_key(config))
    if path.is_file():
        return sum(not (store / part.name / MANIFEST).is_file() for part in CapturePlan.load(path).parts) if not captured.all() else 0
    hashes = np.ascontiguousarray(corpus.hashes).view("V32").ravel()
    rows = np.sort(np.unique(hashes, return_index=True)[1])
    parts = plan_parts(
        rows[~captured[rows]],
        np.asarray(corpus.lengths),
        np.asarray(corpus.buckets),
        tokens_per_batch=config.corpus.tokens_per_batch,
        tokens_per_part=max(1, int(config.store.part_bytes / bytes_per_token(config))),
        min_parts=2 * num_replicas(config),
        first_number=0,
        packed=why_padded_batches(config) is None,
    )
    return len(parts)


def _training_s(config: RunConfig, tokens: int, rate: float) -> float:
    """Seconds of training at ``rate`` context tokens per second and drafter; drafters that share GPUs queue for them."""
    from dflash_offline.gpus import visible

    own, shared = [0.0], [0.0]
    with_gpus = {entry["name"] for entry in config.drafters if "gpus" in entry}
    for each in config.each_drafter():
        if _is_trained(each):
            continue
        train = each.train
        trained = tokens * (1 - config.corpus.heldout_fraction) * train.epochs
        if train.max_steps is not None:
            trained = min(trained, train.max_steps * train.micro_batches_per_step * train.tokens_per_batch)
        (own if each.name in with_gpus or not each.name else shared).append(trained / rate)
    gpus = config.train.gpus
    places = len(shared) if gpus == "cpu" else len(set(range(len(visible())) if gpus == "all" else gpus) - set(own_gpus(config.drafters)))
    return max(*own, *shared, sum(shared) / max(1, places))


def _is_trained(config: RunConfig) -> bool:
    with contextlib.suppress(DFlashError, OSError):  # without the target's weights no key is known
        return (Layout(config.root_dir).drafter(keys.train_key(config)) / MANIFEST).is_file()
    return False


def _idle_gpus(config: RunConfig) -> tuple[int, int]:
    """GPUs of the run file that wait during capture, and during training."""
    capture = set(config.target.gpus) if isinstance(config.target.gpus, list) else None
    train = {*config.train.gpus, *own_gpus(config.drafters)} if isinstance(config.train.gpus, list) else None
    if capture is None or train is None:
        return 0, 0
    return len(train - capture), len(capture - train)


def _measured_capture(layout: Layout) -> float | None:
    """Mean rate of one replica over the parts of the newest store under this root."""
    stores = sorted(layout.root.glob("captures/*/hidden_states.zarr"), key=lambda path: path.stat().st_mtime, reverse=True)
    for store in stores:
        tokens = seconds = 0.0
        for path in store.glob(f"part-*/{MANIFEST}"):
            try:
                extra = read_manifest(path.parent).get("extra") or {}
            except DFlashError:
                continue
            if extra.get("seconds") and extra.get("tokens"):
                tokens, seconds = tokens + extra["tokens"], seconds + extra["seconds"]
        if seconds:
            return tokens / seconds
    return None


def _measured_training(layout: Layout) -> float | None:
    """Mean of the last rates that the newest training under this root wrote."""
    from dflash_offline.watch.metrics import read_metrics

    files: list[Path] = sorted(layout.root.glob("drafters/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        rates = [row["tokens_per_s"] for row in read_metrics(path) if row.get("tokens_per_s")][-20:]
        if rates:
            return sum(rates) / len(rates)
    return None


def _replica_bytes(config: RunConfig) -> int:
    """Weights up to the last tap, and working memory of one batch (about 40 vectors a token at once, and the taps)."""
    hidden, layers = _size(config, "hidden_size"), identity.num_target_layers(config)
    last = max(identity.capture_layer_ids(config)) + 1 if not config.store.store_last_hidden else layers
    width = 2 if config.target.dtype == "bfloat16" else 4
    weights = _target_parameters(config) * width
    embedding = _size(config, "vocab_size", 0) * hidden * width
    return round((weights - embedding) * last / layers + embedding + config.corpus.tokens_per_batch * hidden * width * 40)


def _target_parameters(config: RunConfig) -> int:
    """From the sizes of ``config.json``, as a dense decoder; a mixture of experts counts its weight files instead."""
    from dflash_offline.config import DEMO_MODEL

    if config.target.model != DEMO_MODEL:
        folder = identity.target_folder(config)
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file()]
        if files:
            return sum(path.stat().st_size for path in files) // 2  # stored as bfloat16
    hidden, inner, layers = _size(config, "hidden_size"), _size(config, "intermediate_size"), identity.num_target_layers(config)
    return layers * (4 * hidden * hidden + 3 * hidden * inner) + _size(config, "vocab_size") * hidden


def _rank_bytes(config: RunConfig) -> int:
    """Drafter with its optimiser, the target's frozen embedding and head, and working memory of one micro-batch."""
    hidden, vocabulary = _size(config, "hidden_size"), _size(config, "vocab_size")
    drafter, taps = config.drafter, len(identity.drafter_layer_ids(config))
    heads = drafter.num_attention_heads or _size(config, "num_attention_heads")
    kv_heads = drafter.num_key_value_heads or _size(config, "num_key_value_heads", heads)
    head_dim = drafter.head_dim or _size(config, "head_dim", hidden // heads)
    inner = drafter.intermediate_size or _size(config, "intermediate_size", 3 * hidden)
    parameters = taps * hidden * hidden + drafter.layers * (2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * inner)
    width = 2 if config.train.dtype == "bfloat16" else 4
    tokens, slots = config.train.tokens_per_batch, config.train.slots_per_batch
    working = slots * width * drafter.layers * (6 * hidden + 3 * inner) + tokens * width * (taps + 2 * drafter.layers) * hidden
    ranks = len(config.train.gpus) if config.train.fsdp and isinstance(config.train.gpus, list) else 1
    state = parameters * (_RANK_COPY_BYTES + _RANK_STATE_BYTES / ranks)
    return round(state + 2 * vocabulary * hidden * width + working + min(slots, 4096) * vocabulary * 6)

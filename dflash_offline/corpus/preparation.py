"""Files of conversations -> a tokenised corpus: read, render, mask, bucket, split, count."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline import identity
from dflash_offline.buckets import auto_edges, bucket_table, buckets_of
from dflash_offline.config import RunConfig
from dflash_offline.corpus.reading import Block, is_data, read_file
from dflash_offline.corpus.rows import BlockResult, Counts, RowMaker, RowOptions
from dflash_offline.corpus.storage import Corpus, CorpusWriter
from dflash_offline.corpus.template import FIXED_DATE, ChatTemplate, load_source, template_digest
from dflash_offline.corpus.workers import available_cores, run_ordered
from dflash_offline.errors import CorpusError, StoreFullError
from dflash_offline.figures import count_text, counted
from dflash_offline.manifest import MANIFEST, disk_is_full, write_manifest
from dflash_offline.progress import Progress
from dflash_offline.regenerate.parts import answer_files

# Starting a worker takes about two seconds, as long as one core needs for this many bytes of conversations.
_BYTES_PER_WORKER = 2 << 20
_EARLY_RECORDS = 1000
_TEMPLATE_REASONS = ("fewer than two supervised tokens in a row", "answer not found", "refused by the chat template")


def prepare(config: RunConfig, folder: Path, key: str, progress: Progress) -> Corpus:
    """Write the corpus of a run file into ``folder``, its manifest last. A complete one is opened as it is.

    Raises:
        CorpusError: a file cannot be read or changed meanwhile; no row can be used; nothing or everything would be
            trained on; with ``[corpus] strict`` any row that cannot be used.
        ProcessError: a worker process was killed.
        StoreFullError: the disk is full.
    """
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return Corpus.open(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CorpusError(f"{folder}: another process is preparing this corpus; wait for it") from None
        if not (folder / MANIFEST).exists():
            try:
                _prepare(config, folder, key, progress)
            except OSError as error:
                if not disk_is_full(error):
                    raise
                raise StoreFullError(f"{folder}: the disk is full. Make space and run the same command again") from None
    return Corpus.open(folder)


def _prepare(config: RunConfig, folder: Path, key: str, progress: Progress) -> None:
    paths = corpus_files(config)
    digests = identity.files_identity(config, paths)
    source = load_source(config)
    template = ChatTemplate(source)
    total_bytes = sum(path.stat().st_size for path in paths)
    names = [str(path) for path in paths]
    for path in sorted({name for name in names if names.count(name) > 1}):
        progress.say(f"Warning: {path} is named more than once; its conversations count as often")
    for path in (path for path in paths if not path.stat().st_size):
        progress.say(f"Warning: {path} is empty")
    if template.uses_date:
        progress.say(
            f"The chat template prints today's date; rows are rendered with {FIXED_DATE:%d %b %Y}, so that they do not change every day"
        )
    progress.update(done=0, total=total_bytes, text="reading conversations")
    starts = np.concatenate([[0], np.cumsum([path.stat().st_size for path in paths])])
    counts, sources, checked = Counts(), {}, False
    with CorpusWriter(folder) as writer:
        for result in _results(config, RowOptions.of(config, source), paths, digests, total_bytes):
            counts.add(result.counts)
            if config.corpus.strict and counts.rejected:
                raise CorpusError(f"{_first_example(counts)}; [corpus] strict = true refuses the whole corpus for it")
            if result.arrays is not None:
                remap = np.array([sources.setdefault(name, len(sources)) for name in result.sources] + [-1], dtype=np.int16)
                result.arrays["source_index"] = remap[result.arrays["source_index"]]
                writer.append(result.arrays)
            if not checked and counts.records >= _EARLY_RECORDS:  # a wrong template shows at once, not after ten gigabytes
                checked = True
                if writer.num_rows or sum(counts.rejected[reason] for reason in _TEMPLATE_REASONS) == counts.records:
                    _check_supervised(writer, counts, source.name)
            done = int(starts[result.file_index]) + result.position
            progress.update(done=done, rows=counts.conversations, rejected=sum(counts.rejected.values()))
        for path, before, after in zip(paths, digests, identity.files_identity(config, paths), strict=True):
            if before != after:
                raise CorpusError(f"{path}: it changed while it was being read; run the same command again")
        _check_supervised(writer, counts, source.name)
        lengths = writer.read("lengths")
        edges = config.corpus.bucket_edges
        if edges == "auto":
            edges = auto_edges(lengths, num_buckets=config.corpus.num_buckets, max_length=config.corpus.max_length)
        heldout = split_heldout(writer.read("prompt_hashes"), config.corpus.heldout_fraction)
        hashes = writer.read("hashes", columns=8).view(np.uint64)  # 8 of 32 bytes tell rows apart well enough to count
        duplicates = len(hashes) - len(np.unique(hashes))
        files = writer.finish(buckets=buckets_of(lengths, edges), heldout=heldout)
    assert counts.records == counts.conversations + sum(counts.rejected.values())
    content = {
        "counts": {
            "files": len(paths),
            "records": counts.records,
            "blank_lines": counts.blank,
            "conversations": counts.conversations,
            "rejected": sum(counts.rejected.values()),
            "rows": writer.num_rows,
            "tokens": writer.num_tokens,
            "supervised_tokens": writer.num_supervised,
            "heldout_rows": int(heldout.sum()),
            "truncated_rows": counts.truncated,
            "duplicate_rows": duplicates,
        },
        "rejected": dict(counts.rejected.most_common()),
        "rejected_examples": counts.examples,
        "notes": dict(counts.notes.most_common()),
        "mask_methods": dict(counts.methods.most_common()),
        "bucket_edges": list(edges),
        "max_length": config.corpus.max_length,
        "template": {
            "name": source.name,
            "digest": template_digest(source),
            "date": f"{FIXED_DATE:%Y-%m-%d}" if template.uses_date else None,
            "end_markers": sorted(template.enders),
        },
        "chat_template_kwargs": dict(config.corpus.chat_template_kwargs),
        "rows_from": {"files": names, "sources": list(sources)},
    }
    from dflash_offline.plan import why_padded_batches  # which reads corpora, so not above

    packed = why_padded_batches(config) is None
    for line in summary(content, lengths, tokens_per_batch=config.corpus.tokens_per_batch, packed=packed):
        progress.say(line)
    if not heldout.any():
        progress.say(f"Warning: {none_heldout(config)}")
    write_manifest(folder, kind="corpus", key=key, files=files, **content)
    progress.update(done=total_bytes, text="corpus is ready", force=True)


def corpus_files(config: RunConfig) -> list[Path]:
    """The conversation files of a run file, without the README and index files that lie in data folders.

    Raises:
        ConfigError: a pattern matches no file.
        CorpusError: nothing but such files is there.
        RegenerateError: the answers are to be written by the target first.
    """
    if config.regenerates:
        return answer_files(config)
    paths = config.files(config.corpus.files, where="[corpus] files")
    named = {config.path(pattern) for pattern in config.corpus.files}
    kept = [path for path in paths if path in named or is_data(path)]
    if not kept:
        raise CorpusError(f"[corpus] files: none of {', '.join(path.name for path in paths[:5])} holds conversations")
    return kept


def _results(config: RunConfig, options: RowOptions, paths: list[Path], digests: list[str], total_bytes: int) -> Iterator[BlockResult]:
    workers = config.corpus.workers or min(available_cores(), 1 + total_bytes // _BYTES_PER_WORKER)

    def blocks() -> Iterator[Block]:
        for i, path in enumerate(paths):
            yield from read_file(path, i, digest=digests[i])

    return run_ordered(_make_rows, (options, [str(path) for path in paths]), blocks(), workers=workers)


def _make_rows(argument: tuple[RowOptions, list[str]]) -> RowMaker:
    return RowMaker(*argument)


def _first_example(counts: Counts) -> str:
    reason, shown = next(iter(counts.examples.items()))
    where, _, detail = shown[0].partition(": ")
    return f"{where}: {reason}{f' ({detail})' if detail else ''}"


def _check_supervised(writer: CorpusWriter, counts: Counts, template: str) -> None:
    """Refuse a corpus in which no token or every token would be trained on."""
    if not counts.records:
        raise CorpusError("[corpus] files hold no conversation at all: every file is empty")
    reasons = ", ".join(f"{count} x {reason}" for reason, count in counts.rejected.most_common(4))
    if not writer.num_rows:
        share = f"; {template} was used, which left 0 % supervised" if _blames_template(counts) else ""
        raise CorpusError(f"no conversation can be used: {reasons}; the first: {_first_example(counts)}{share}")
    if writer.num_supervised == writer.num_tokens:
        raise CorpusError(
            f"{template}: 100 % of the tokens would be supervised, so the prompt cannot be told from the answer; "
            "check its {% generation %} blocks and its generation prompt, or name another in [corpus] chat_template"
        )


def _blames_template(counts: Counts) -> bool:
    return any(counts.rejected[reason] for reason in _TEMPLATE_REASONS)


def split_heldout(prompt_hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which rows are held out: those whose prompt's hash falls below the fraction, so the same prompt is never on both
    sides and appended rows do not move others. bool [n].

    In a small corpus at least one row is held out (if ``fraction`` > 0 and there are two prompts) and one is not.
    """
    heldout = prompt_hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if fraction > 0 and len(np.unique(prompt_hashes)) > 1:
        if not heldout.any():
            heldout = prompt_hashes == prompt_hashes.min()
        elif heldout.all():
            heldout = prompt_hashes != prompt_hashes.max()
    return heldout


def none_heldout(config: RunConfig) -> str:
    """What is said where no conversation is held out: nothing then tells learning from learning by heart."""
    if config.corpus.heldout_fraction == 0:
        return "no conversation is held out, so there will be no tau_replay; raise [corpus] heldout_fraction"
    return "no conversation is held out, since all have one prompt, so there will be no tau_replay; add conversations with other prompts"


def summary(content: dict[str, Any], lengths: np.ndarray, *, tokens_per_batch: int, packed: bool) -> list[str]:
    """What preparing prints: counts that add up, mask, bucket table."""
    counts = content["counts"]
    lines = [
        f"Read {counted(counts['records'], 'conversation')} from {counted(counts['files'], 'file')}: "
        f"{counts['conversations']} used, {counts['rejected']} rejected"
    ]
    for reason, count in content["rejected"].items():
        lines.append(f"  rejected {count:>7}: {reason}")
        lines.extend(f"    {example}" for example in content["rejected_examples"].get(reason, []))
    lines.extend(f"  note {count:>11}: {note}" for note, count in content["notes"].items())
    methods = ", ".join(f"{method} {count}" for method, count in content["mask_methods"].items())
    share = 100 * counts["supervised_tokens"] / counts["tokens"]
    lines.append(
        f"{counted(counts['rows'], 'row')}, {count_text(counts['tokens'])} tokens, {share:.1f}% supervised "
        f"(answers by mask method: {methods}); "
        f"{counted(counts['truncated_rows'], 'answer')} without end marker (cut short); {counted(counts['heldout_rows'], 'row')} held out; "
        f"{counted(counts['duplicate_rows'], 'duplicate')}"
    )
    lines.extend(bucket_table(lengths, content["bucket_edges"], tokens_per_batch=tokens_per_batch, packed=packed))
    return lines

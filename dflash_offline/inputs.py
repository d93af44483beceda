"""What the file names of a run file stand for: files, folders, globs, standard input, Hugging Face data sets.

``-`` is standard input. A stream can be read once, and a run reads its conversations in several processes, so the
command that starts a run copies it to ``ROOT/inputs/stdin-DIGEST`` first (``take_stdin``); the file's name is its
content, so the same stream is the same file. Commands that only look at a run take the stream copied last.

``owner/name`` that is no file is a data set of the Hugging Face hub, or of its local cache: ``owner/name@config:split``.
The optional package ``datasets`` puts it into Arrow files, which are read like any other. Where those lie is remembered
in ``ROOT/inputs/datasets.json``; later commands neither ask the hub nor need the package.
"""

import contextlib
import fcntl
import glob
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_offline.errors import ConfigError, CorpusError, DFlashError, StoreFullError
from dflash_offline.layout import Layout

if TYPE_CHECKING:
    from dflash_offline.config import RunConfig

STDIN = "-"
_CHUNK = 1 << 20
_DATASET = re.compile(r"(?:hf:)?(?P<path>[\w-][\w.-]*/[\w.-]+)(?:@(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")
_DATA_SUFFIX = re.compile(r"\.(jsonl?|ndjson|parquet|arrow|gz|bz2|xz|zst|zip|csv|txt)\Z", re.I)


def expand(config: "RunConfig", patterns: list[str], *, where: str, only_files: bool = False) -> list[Path]:
    """Names as written in a run file -> existing files, sorted inside each name.

    Args:
        only_files: take no standard input and no data set.

    Hidden files and folders (names that start with a dot) inside a folder are left out, and so is the run's own root.

    Raises:
        ConfigError: a name stands for nothing.
        CorpusError: nothing was ever piped to standard input.
    """
    found: list[Path] = []
    for pattern in patterns:
        path = config.path(pattern)
        if pattern == STDIN and not only_files:
            matched = [stdin_file(config, where=where)]
        elif path.is_dir():
            inside = (entry for entry in path.rglob("*") if not any(part.startswith(".") for part in entry.relative_to(path).parts))
            written = config.root_dir if config.root_dir.is_relative_to(path) else None  # what a run writes is none of its inputs
            matched = sorted(entry for entry in inside if entry.is_file() and (written is None or not entry.is_relative_to(written)))
        elif path.exists():
            matched = [path]
        else:  # root_dir, not a joined pattern: the run file's own folder may have brackets in its name
            names = glob.iglob(str(Path(pattern).expanduser()), root_dir=config.source.parent, recursive=True)  # noqa: PTH207
            matched = _once(entry for entry in map(config.path, names) if entry.is_file())
        if not matched and not only_files and is_dataset_name(pattern, path):
            matched = dataset_files(config, pattern, where=where)
        if not matched:
            raise ConfigError(f"{config.source.name}: {where}: {pattern!r} matches no file (looked for {path})")
        found.extend(matched)
    return found


def _once(paths: Iterable[Path]) -> list[Path]:
    """Sorted; a file that is reached in several ways (``**`` follows links, also into a loop) by the shortest of them."""
    longest_first = sorted(paths, key=lambda path: (len(path.parts), path), reverse=True)
    return sorted({path.resolve(): path for path in longest_first}.values())


def take_stdin(config: "RunConfig", say: Callable[[str], None]) -> None:
    """Copy what is piped to standard input, where the run file reads it. Called once, by the command that starts a run.

    Raises:
        CorpusError: an empty stream, and none was copied before.
        StoreFullError: the disk is full.
    """
    if STDIN not in (*config.corpus.files, *config.regenerate.prompts) or not _is_piped():
        return
    import xxhash

    from dflash_offline.manifest import disk_is_full, write_json

    folder = Layout(config.root_dir).inputs
    digest, size, part = xxhash.xxh3_128(), 0, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".stdin-")
        part = Path(name)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_abandoned(folder)
        with open(descriptor, "wb") as file, open(0, "rb", closefd=False, buffering=0) as stream:  # noqa: PTH123
            while chunk := stream.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(descriptor)
        path = folder / f"stdin-{digest.hexdigest()}"
        if size and not path.exists():  # a copy that is there may be being read
            part.rename(path)
        if size:
            write_json(folder / "stdin.json", {"file": path.name, "bytes": size})
    except OSError as error:
        if not disk_is_full(error):
            raise CorpusError(f"{folder}: standard input cannot be copied there ({error.strerror or error})") from None
        raise StoreFullError(f"{folder}: the disk is full after {size:,} bytes of standard input. Make space and pipe it again") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    if not size:
        remembered = stdin_file(config, where="files")  # raises where there is none
        say(f"Standard input is empty: going on with the {remembered.stat().st_size:,} bytes that were piped in before")


def _remove_abandoned(folder: Path) -> None:
    """Copies that a killed command left unfinished: nobody holds their lock."""
    for path in folder.glob(".stdin-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _is_piped() -> bool:
    """Whether standard input is a pipe, a socket or a file, not a terminal, ``/dev/null`` or closed."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def stdin_file(config: "RunConfig", *, where: str) -> Path:
    """The stream copied last.

    Raises:
        CorpusError: there is none.
    """
    layout = Layout(config.root_dir)
    name = stdin_name(layout)
    if name is None or not (path := layout.inputs / name).is_file():
        raise CorpusError(
            f"{config.source.name}: {where}: '-' is standard input, and nothing was piped in yet: "
            "`cat conversations.jsonl | luigi --module pipelines DFlashAll`"
        )
    return path


def stdin_name(layout: Layout) -> str | None:
    """Name of the file in ``ROOT/inputs`` that holds the stream copied last."""
    from dflash_offline.manifest import read_json

    with contextlib.suppress(OSError, DFlashError, TypeError, KeyError):
        return str(read_json(layout.inputs / "stdin.json")["file"])
    return None


def is_dataset_name(pattern: str, path: Path) -> bool:
    """Whether a name that is no file may be one of the Hugging Face hub. A folder of that owner's name says no."""
    match = _DATASET.fullmatch(pattern)
    if match is None or _DATA_SUFFIX.search(match["path"]):
        return False
    return pattern.startswith("hf:") or not path.parent.is_dir()


def dataset_files(config: "RunConfig", name: str, *, where: str) -> list[Path]:
    """Arrow files of one split of a data set: the split named, else ``train``, else the only one.

    Raises:
        ConfigError: the package is missing, there is no such data set, or it has several splits and none was named.
    """
    from dflash_offline.manifest import read_json, write_json

    memory = Layout(config.root_dir).inputs / "datasets.json"
    known: Any = None
    with contextlib.suppress(OSError, DFlashError):
        known = read_json(memory)
    known = known if isinstance(known, dict) else {}
    files = [Path(path) for path in known.get(name) or []]
    if not files or not all(path.is_file() for path in files):
        files = _load(name, f"{config.source.name}: {where}: {name!r}")
        with contextlib.suppress(OSError, DFlashError):  # on a read-only root every command asks anew
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, known | {name: [str(path) for path in files]})
    return files


def _load(name: str, where: str) -> list[Path]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{where} matches no file; if it is a Hugging Face data set: `pip install datasets`") from None
    match = _DATASET.fullmatch(name)
    assert match is not None
    from huggingface_hub.utils import logging

    datasets.logging.set_verbosity_error()
    logging.set_verbosity_error()
    print(f"{name} is no file here: asking `datasets` for a data set of that name", file=sys.stderr, flush=True)  # may take a while
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(match["path"], match["config"])
    except Exception as error:  # the hub, the network, the cache and the builders raise every kind
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{where} is no file, and the data set cannot be loaded: {reason}") from None
    splits = list(loaded)
    split = match["split"] or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if split not in splits:
        raise ConfigError(f"{where}: its splits are {', '.join(splits)}; name one: {match['path']}:{splits[0]}")
    files = [Path(entry["filename"]) for entry in loaded[split].cache_files]
    if not files:
        raise ConfigError(f"{where}: the package `datasets` kept it in memory only; save it with save_to_disk and name that folder")
    return files

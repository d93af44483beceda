"""The folder of a regeneration: what is asked, what was answered, what is done.

::

    REGENERATE_KEY/
      plan.json                 parts and how many prompts each has; written once, after all of prompts/
      prompts/part-00000.jsonl  what is asked, one prompt a line; gone when everything is answered
      journals/part-00000.jsonl answers of a part that is being worked on, one a line, in the order they came
      parts/part-00000.jsonl    conversations of a finished part, in the order of the prompts
      parts/part-00000.json     its counts, and the rows left out: written last, the part's mark of completion
      leases/                   who is working on which part
      manifest.json             written when every part is marked

A journal is only ever appended to, a whole line at a time, so a process that is killed leaves at most one cut line,
which is taken off by whoever goes on with the part.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from dflash_offline import identity, keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import RegenerateError
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, fsync_folder, read_json, read_manifest, write_bytes, write_json, write_manifest

SYNC_S = 5.0  # a crash of the machine loses at most the answers of so many seconds; one of the process loses none
MAX_NAMED = 10_000  # rows left out that the manifest names; the marks of the parts name them all
PARTS_PER_REPLICA = 4  # at least, in a small run: so that replicas end together


@dataclass(frozen=True)
class PlannedPart:
    """A part: its name and its number of prompts."""

    name: str
    prompts: int


@dataclass(frozen=True)
class Plan:
    """What there is to ask. ``rows == prompts + rejected``."""

    rows: int
    prompts: int
    rejected: dict[str, int]
    rejected_examples: dict[str, list[str]]
    parts: list[PlannedPart]


class Folder:
    """Paths of one regeneration, and how its files are read and written."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    def prompts(self, name: str) -> Path:
        return self.path / "prompts" / f"{name}.jsonl"

    def journal(self, name: str) -> Path:
        return self.path / "journals" / f"{name}.jsonl"

    def conversations(self, name: str) -> Path:
        return self.path / "parts" / f"{name}.jsonl"

    def mark(self, name: str) -> Path:
        return self.path / "parts" / f"{name}.json"

    @property
    def leases(self) -> Path:
        return self.path / "leases"

    @property
    def is_complete(self) -> bool:
        return (self.path / MANIFEST).exists()

    def committed(self) -> set[str]:
        """Names of the finished parts."""
        with contextlib.suppress(FileNotFoundError):
            return {entry.name.removesuffix(".json") for entry in os.scandir(self.path / "parts") if entry.name.endswith(".json")}
        return set()

    def load_plan(self) -> Plan:
        content = read_json(self.plan_path)
        return Plan(**{**content, "parts": [PlannedPart(**part) for part in content["parts"]]})

    def commit(self, name: str, conversations: list[dict[str, Any]], mark: dict[str, Any]) -> None:
        """Write a part's conversations, then its mark."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in conversations]
        write_bytes(self.conversations(name), "".join(lines).encode())
        write_json(self.mark(name), mark)
        self.journal(name).unlink(missing_ok=True)

    def finish(self, key: str, plan: Plan, content: dict[str, Any]) -> dict[str, Any]:
        """Add up the marks of all parts and write the manifest; prompts, journals and leases are not needed any more.

        Raises:
            RegenerateError: not one conversation came out.
        """
        marks = [read_json(self.mark(part.name)) for part in plan.parts]
        total = {name: sum(mark["counts"][name] for mark in marks) for name in marks[0]["counts"]}
        reasons: dict[str, int] = {}
        for mark in marks:
            for left_out in mark["left_out"]:
                reasons[left_out["reason"]] = reasons.get(left_out["reason"], 0) + 1
        named = [left_out for mark in marks for left_out in mark["left_out"]]
        counts = {"rows": plan.rows, "rejected": plan.rows - plan.prompts, "prompts": plan.prompts, **total, "left_out": len(named)}
        assert counts["prompts"] == counts["conversations"] + counts["left_out"]
        if not counts["conversations"]:
            shown = "; ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:4])
            raise RegenerateError(
                f"not one of {counts['prompts']} prompts was answered: {shown}; the first: {named[0]['prompt']}: {named[0]['detail']}. "
                "`dflash-offline reset regenerate` forgets these, so that they are asked again"
            )
        paths = [self.conversations(part.name) for part in plan.parts]
        files = [path.relative_to(self.path).as_posix() for path in paths if path.stat().st_size]
        manifest = write_manifest(
            self.path,
            kind="regeneration",
            key=key,
            files=files,
            **content,
            counts=counts,
            rejected=plan.rejected,
            rejected_examples=plan.rejected_examples,
            left_out=dict(sorted(reasons.items(), key=lambda item: -item[1])),
            left_out_rows=named[:MAX_NAMED],
            by=[{"part": part.name, **mark["by"]} for part, mark in zip(plan.parts, marks, strict=True)],
        )
        for name in ("prompts", "journals", "leases"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        return manifest


class Journal:
    """Answers of one part as they come. Opening it reads what is there and takes off a cut last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        content = b""
        while block := os.read(self._descriptor, 1 << 22):
            content += block
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._descriptor, whole)
        try:
            self.records: list[dict[str, Any]] = [json.loads(line) for line in content[:whole].splitlines()]
        except ValueError as error:
            raise RegenerateError(f"{path}: damaged ({error}); delete the file, and its answers are asked for again") from None
        self._synced_at = time.monotonic()

    def append(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        while line:
            line = line[os.write(self._descriptor, line) :]
        if time.monotonic() - self._synced_at > SYNC_S:
            os.fsync(self._descriptor)
            self._synced_at = time.monotonic()

    def close(self) -> None:
        os.close(self._descriptor)


def make_plan(config: RunConfig, folder: Folder, *, replicas: int) -> Plan:
    """Write what is asked, part by part, and the plan last. What another process has planned is kept as it is.

    Raises:
        RegenerateError: no row asks anything.
    """
    from dflash_offline.regenerate.prompts import PromptCounts, read_prompts

    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path.parent / f".{folder.path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.plan_path.exists():
            return folder.load_plan()
        made = folder.path / "prompts.partial"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        counts = PromptCounts()
        with (made / "all.jsonl").open("w", encoding="utf-8") as file:
            for prompt in read_prompts(config, counts):
                file.write(json.dumps(prompt.to_dict(), ensure_ascii=False) + "\n")
        if not counts.prompts:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in counts.rejected.most_common(4)) or "the files are empty"
            first = next(iter(counts.examples.values()), [""])[0]
            raise RegenerateError(f"[regenerate] prompts: no row asks anything: {reasons}{f'; the first: {first}' if first else ''}")
        with (made / "all.jsonl").open(encoding="utf-8") as file:
            parts = _split(file, made, counts.prompts, most=config.regenerate.part_rows, replicas=replicas)
        (made / "all.jsonl").unlink()
        fsync_folder(made)
        shutil.rmtree(folder.path / "prompts", ignore_errors=True)  # of a process killed before it wrote the plan
        made.replace(folder.path / "prompts")
        for name in ("parts", "journals"):
            (folder.path / name).mkdir(exist_ok=True)
        plan = Plan(counts.rows, counts.prompts, dict(counts.rejected.most_common()), counts.examples, parts)
        write_json(folder.plan_path, asdict(plan))
        return plan


def _split(file: IO[str], made: Path, prompts: int, *, most: int, replicas: int) -> list[PlannedPart]:
    count = max(-(-prompts // most), min(prompts, replicas * PARTS_PER_REPLICA) if replicas > 1 else 1)
    parts = []
    for number in range(count):
        size = (number + 1) * prompts // count - number * prompts // count
        name = f"part-{number:05d}"
        with (made / f"{name}.jsonl").open("w", encoding="utf-8") as part:
            part.writelines(next(file) for _ in range(size))
            part.flush()
            os.fsync(part.fileno())
        parts.append(PlannedPart(name, size))
    return parts


def is_answered(config: RunConfig) -> bool:
    """Whether the run file's regeneration is complete."""
    return (Layout(config.root_dir).regeneration(keys.regenerate_key(config)) / MANIFEST).exists()


def answer_files(config: RunConfig) -> list[Path]:
    """The conversation files that the run file's regeneration wrote, in the order of the prompts.

    Raises:
        RegenerateError: it is not complete yet.
    """
    folder = Layout(config.root_dir).regeneration(keys.regenerate_key(config))
    if not (folder / MANIFEST).exists():
        raise RegenerateError(
            f"{config.source.name}: the answers of [regenerate] are not there yet; run `luigi --module pipelines RegenerateResponses`"
        )
    return [folder / name for name in read_manifest(folder, kind="regeneration")["files"]]


def who(config: RunConfig) -> dict[str, Any]:
    """Target and settings of the answers, as the manifest records them."""
    section = config.regenerate
    return {
        "target": {"model": config.target.model, "dtype": config.target.dtype, **identity.target_identity(config)},
        **identity.tokenizer_identity(config),
        "chat_template_kwargs": dict(config.corpus.chat_template_kwargs),
        "backend": section.backend,
        "sampling": {name: getattr(section, name) for name in ("temperature", "top_p", "max_new_tokens", "max_turns", "seed")},
        "prompt_files": [str(path) for path in config.files(section.prompts, where="[regenerate] prompts")],
    }

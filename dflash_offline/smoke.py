"""A run file on a few conversations, through the whole chain: the same target, GPUs, shapes and settings."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_offline import keys
from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.errors import CorpusError, DFlashError, ProcessError
from dflash_offline.figures import counted
from dflash_offline.layout import Layout
from dflash_offline.manifest import digest, read_json
from dflash_offline.reference import toml_key, toml_text
from dflash_offline.tidy import remove, reset_plan

_PROMPTS, _NEW_TOKENS, _HELDOUT = 2, 32, 4
_ANSWER_TOKENS = 128  # of a regenerated answer


def run_smoke(config: RunConfig, *, rows: int, steps: int, keep: bool, say: Callable[[str], None]) -> None:
    """Write a reduced run file under ``ROOT/smoke``, run the pipeline on it to the report, say what came out.

    Args:
        rows: conversations taken, spread evenly over the corpus files.
        steps: most training steps.
        keep: leave the folder of the smoke run; it is kept anyway when the run fails.

    Raises:
        DFlashError: the run file cannot be used; no folder is left that was not there.
        ProcessError: the run failed.
    """
    folder = config.root_dir / "smoke"
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "conversations.jsonl"
    path = folder / "run.toml"
    try:
        taken = take_rows(config, rows, corpus)
        path.write_text(reduced_run_file(config, corpus=corpus, rows=taken, steps=steps), encoding="utf-8")
    except DFlashError:
        if made:
            corpus.unlink(missing_ok=True)
        for each in made:
            with contextlib.suppress(OSError):  # another command put something there meanwhile
                each.rmdir()
        raise
    goes = "" if keep else "; deleted when all went well, --keep leaves it"
    say(f"{counted(taken, 'conversation')}, at most {counted(steps, 'step')}, in {folder}{goes}")
    begin = time.monotonic()
    task = "DFlashAll" if keep else "WriteReport"  # the same chain; DFlashAll would end with paths that are deleted next
    command = [sys.executable, "-m", "luigi", "--module", "pipelines", task, "--config", str(path)]
    status = subprocess.run(command, check=False).returncode
    if status:
        raise ProcessError(f"the smoke run failed with exit status {status}; its files and logs are in {folder}")
    reduced = RunConfig.load(path)
    layout = Layout(reduced.root_dir)
    lengths = []
    for each in reduced.each_drafter():
        results = read_json(layout.evaluation(keys.evaluate_key(each)) / "results.json")
        if (length := (results.get("overall") or {}).get("acceptance_length")) is not None:
            lengths.append(f"{each.name} {length:.2f}".lstrip())
    several = "drafters" if reduced.drafters else "a drafter"
    accepted = f"; acceptance length {', '.join(lengths)} (of {several} hardly trained)" if lengths else ""
    say(f"smoke run passed in {time.monotonic() - begin:.0f} s{accepted}")
    if keep:
        say(f"kept: {folder}")
    else:
        remove(reset_plan(reduced, "capture"))  # in an object store its objects too
        shutil.rmtree(folder)
        say(f"deleted again: {folder}; --keep leaves it")


def take_rows(config: RunConfig, count: int, destination: Path) -> int:
    """Copy up to ``count`` conversations (prompts with [regenerate]), spread evenly over the files; returns how many."""
    from dflash_offline.corpus import RowRejected, corpus_files
    from dflash_offline.corpus.reading import decode_block, read_file
    from dflash_offline.regenerate import prompt_files

    files = [path for path in (prompt_files(config) if config.regenerates else corpus_files(config)) if path.stat().st_size]
    taken: list[Any] = []
    for number, path in enumerate(files):
        wanted = -(-(count - len(taken)) // (len(files) - number))
        for row in (row for block in read_file(path, number) for _, row in decode_block(block)):
            if wanted <= 0:
                break
            if row is not None and not isinstance(row, RowRejected):
                taken.append(row)
                wanted -= 1
    if not taken:
        where = "[regenerate] prompts hold no row" if config.regenerates else "[corpus] files hold no conversation"
        raise CorpusError(f"{config.source.name}: {where}")
    with destination.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in taken)
    return len(taken)


def reduced_run_file(config: RunConfig, *, corpus: Path, rows: int, steps: int) -> str:
    """The run file with another corpus, fewer steps and prompts, and absolute paths, as TOML."""
    sections: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    sections["root"] = str(corpus.parent / "run")
    target = sections["target"]
    if target["model"] != DEMO_MODEL and config.path(target["model"]).exists():
        target["model"] = str(config.path(target["model"]))
    if config.drafter.init_from is not None and config.path(config.drafter.init_from).exists():
        sections["drafter"]["init_from"] = str(config.path(config.drafter.init_from))
    section = sections["corpus"]
    if config.regenerates:
        answers = min(_ANSWER_TOKENS, config.regenerate.max_new_tokens)
        sections["regenerate"] |= {"prompts": [str(corpus)], "max_new_tokens": answers}
    else:
        section["files"] = [str(corpus)]
    section["heldout_fraction"] = max(config.corpus.heldout_fraction, min(0.5, _HELDOUT / rows))
    if config.store.url is not None:  # a store of its own beside the run's: two roots must not write into one
        sections["store"] |= {"url": f"{config.store.url}/smoke-{digest(str(config.root_dir))[:8]}", "cache_folder": None}
    if config.corpus.chat_template is not None:
        section["chat_template"] = str(config.path(config.corpus.chat_template))
    sections["train"] = sections.get("train", {}) | {
        "max_steps": min(steps, config.train.max_steps or steps),
        "log_every": 1,
        "checkpoint_every": max(1, steps // 2),
        "evaluate_every": max(1, steps),
        "nodes": [],  # this host is tried, not the others
    }
    for entry in sections.get("drafters", []):
        if "init_from" in entry and config.path(entry["init_from"]).exists():
            entry["init_from"] = str(config.path(entry["init_from"]))
        for name in {"max_steps", "log_every", "checkpoint_every", "evaluate_every"} & set(entry):
            del entry[name]
    sections["evaluate"] = sections.get("evaluate", {}) | {
        "prompts": [str(path) for path in config.evaluation_prompts()],
        "max_prompts": min(_PROMPTS, config.evaluate.max_prompts),
        "max_new_tokens": min(_NEW_TOKENS, config.evaluate.max_new_tokens),
        "heldout_rows": min(_HELDOUT, config.evaluate.heldout_rows),
    }
    lines = [f"{name} = {toml_text(value)}" for name, value in sections.items() if not isinstance(value, dict)]
    for name, values in sections.items():
        if isinstance(values, dict):
            lines += ["", f"[{name}]", *(f"{toml_key(key)} = {toml_text(value)}" for key, value in values.items() if value is not None)]
    return "\n".join(lines) + "\n"

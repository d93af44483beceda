"""Texts made from the run file's model: the commented run file of ``dflash-offline init`` and the reference page."""

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dflash_offline import fields
from dflash_offline.config import EMBEDDED, HostConfig, RunConfig
from dflash_offline.config.drafters import OF_THE_WHOLE_RUN

# what stands uncommented in a new run file; everything else is there as a comment with its default
_SHOWN: dict[str, dict[str, Any]] = {
    "target": {"model": "path/to/target-model", "dtype": None, "gpus": None, "capture_layer_ids": None},
    "corpus": {
        "files": ["conversations/*.jsonl"],
        "bucket_edges": None,
        "max_length": None,
        "tokens_per_batch": None,
        "heldout_fraction": None,
    },
    "store": {"codec": None},
    "drafter": {"layers": None, "block_size": None},
    "train": {"gpus": None, "epochs": None, "anchors": None, "lr": None, "seed": None, "checkpoint_every": None},
    "evaluate": {"prompts": ["prompts/*.jsonl"], "max_prompts": None},
    "export": {"formats": None},
}

# sections that are there as a comment from end to end, with the values that stand for an example
_COMMENTED: dict[str, dict[str, Any]] = {"regenerate": {"prompts": ["prompts-train/*.jsonl"]}}

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = """\
# Run file of dflash_offline for a machine with eight GPUs: the target captures on GPUs 0-4, the drafter trains on 5-7.
# Fill in [target] model and [corpus] files (and [evaluate] prompts, or leave them out with []), then:
#
#   dflash-offline doctor                      is this machine fit?
#   dflash-offline plan                        tokens, bytes, free disk, before any GPU second
#   dflash-offline smoke                       64 conversations through the whole chain
#   luigi --module pipelines DFlashAll         the run; the same command again goes on where it stopped
#
# Capture and training follow each other, so a GPU named in one phase only is idle in the other: gpus = "all" uses every one in both.
# Paths are relative to this file. Lines that are commented out show the default.
"""


def _sections() -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def toml_key(name: str) -> str:
    """A key as TOML: quoted where it has to be."""
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def toml_text(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml_key(name)} = {toml_text(item)}" for name, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 100_000:
        return f"{value:_}"
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string, except that TOML has no surrogate pairs


def commented_run_file() -> str:
    """A run file for an 8-GPU machine with every field, its description and its default."""
    root = RunConfig.model_fields["root"]
    parts = [_HEAD, f"\n# {root.description}\nroot = {toml_text(root.default)}\n"]
    for name, section in _sections().items():
        shown, example = _SHOWN.get(name, {}), _COMMENTED.get(name, {})
        parts.append(f"\n{'# ' if name in _COMMENTED else ''}[{name}]\n# {(section.__doc__ or '').strip()}\n")
        for key, field in section.model_fields.items():
            parts.append(_entry(key, field, shown=key in shown, value=shown.get(key, example.get(key))))
    parts.append(f"\n# [[drafters]]\n# {RunConfig.model_fields['drafters'].description}\n")
    parts.append('# name = "deep"\n# layers = 8\n\n# [[drafters]]\n# name = "wide"\n# block_size = 32\n')
    parts.append(f"\n# [hosts.node-1]\n# {(HostConfig.__doc__ or '').strip()}\n")
    parts += [f"# {field.description}\n# {key} = [0, 1, 2, 3]\n" for key, field in HostConfig.model_fields.items()]
    return "".join(parts)


def _entry(key: str, field: FieldInfo, *, shown: bool, value: Any) -> str:
    given = value if value is not None else field.default
    line = f"{key} = {toml_text(given)}" if given is not None else f"{key} =        # unset; {fields.allowed(field)}"
    return f"# {field.description}\n{'' if shown else '# '}{line}\n"


def demo_run_file(folder: Path) -> str:
    """The embedded run file as it has to read in ``folder``: its relative paths lead to the demo data from there."""
    data = (EMBEDDED.parent.parent / "data").resolve()
    folder = folder.resolve()
    shown = os.path.relpath(data, folder) if data.is_relative_to(folder) else str(data)
    return EMBEDDED.read_text(encoding="utf-8").replace('"../data/', f'"{shown}/')


def reference_page() -> str:
    """Markdown: every field of the run file, what it allows, its default."""
    root = RunConfig.model_fields["root"]
    lines = [
        "# Run file",
        "",
        "Made from `dflash_offline/config/` by `python -m dflash_offline.reference`; a test fails when this page is out of date.",
        "",
        "A run file is TOML. Unknown keys are refused. Paths are relative to the run file.",
        "`dflash-offline init > run.toml` writes a commented one for an 8-GPU machine.",
        "",
        f"At the top: `root` (default `{toml_text(root.default)}`): {root.description}",
    ]
    for name, section in _sections().items():
        lines += ["", f"## [{name}]", "", (section.__doc__ or "").strip(), "", "| key | allowed | default | |", "| --- | --- | --- | --- |"]
        for key, field in section.model_fields.items():
            default = "**required**" if field.is_required() else "(unset)" if field.default is None else f"`{toml_text(field.default)}`"
            cells = [f"`{key}`", fields.allowed(field), default, field.description or ""]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## [[drafters]]", "", RunConfig.model_fields["drafters"].description or "", ""]
    lines += [
        "`name`: letters, digits, `-`, `_` and `.`. Besides it any key of [drafter] and [train], except " + _listed(OF_THE_WHOLE_RUN) + "."
    ]
    lines += ["Drafters without `gpus` of their own share those of [train]; the others keep theirs for themselves."]
    lines += ["", "## [hosts.NAME]", "", (HostConfig.__doc__ or "").strip(), "", "| key | allowed | |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {fields.allowed(field)} | {field.description} |" for key, field in HostConfig.model_fields.items()]
    return "\n".join(lines) + "\n"


def _listed(names: set[str]) -> str:
    *first, last = sorted(names)
    return ", ".join(f"`{name}`" for name in first) + f" and `{last}`"


if __name__ == "__main__":
    print(reference_page(), end="")

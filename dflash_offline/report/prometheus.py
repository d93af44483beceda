"""The same numbers in the text format that Prometheus scrapes (version 0.0.4)."""

import re
from collections.abc import Iterator
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("pending", "partial", "queued", "running", "failed", "complete", "deleted", "unknown")

# family -> what it is; all are gauges
_HELP = {
    "dflash_stage_state": "1 for the state that a stage is in, 0 for the others.",
    "dflash_parts_planned": "Parts of the store that this corpus needs.",
    "dflash_parts_committed": "Parts of the store that are written.",
    "dflash_store_tokens": "Tokens in committed parts.",
    "dflash_store_bytes": "Bytes of committed parts.",
    "dflash_process_up": "1 while a model process runs; 0 once it has ended or is gone.",
    "dflash_process_done": "Units done by a process; see its unit label.",
    "dflash_process_total": "Units a process has to do.",
    "dflash_process_age_seconds": "Seconds since a process last told how far it is.",
    "dflash_training_step": "Last logged step.",
    "dflash_training_loss": "Loss of the last logged step, nats.",
    "dflash_training_accuracy": "Accuracy over trained slots, last logged step.",
    "dflash_training_tau": "Mean number of leading right slots of a block plus 1, last logged step.",
    "dflash_training_tokens_per_second": "Context tokens trained per second, all ranks.",
    "dflash_training_read_bytes_per_second": "Stored bytes read per second, all ranks.",
    "dflash_training_wait_ratio": "Share of the time that ranks waited for data.",
    "dflash_training_eta_seconds": "Seconds of training left.",
    "dflash_heldout_loss": "Loss on held-out conversations, last evaluation, nats.",
    "dflash_heldout_tau": "tau on held-out conversations, last evaluation.",
    "dflash_heldout_tau_replay": "tau_replay on held-out conversations, last evaluation.",
    "dflash_acceptance_length": "Emitted tokens per verify step on a prompt set.",
    "dflash_gpu_busy_ratio": "Share of the last moment in which a kernel ran.",
    "dflash_gpu_memory_used_bytes": "GPU memory in use, by anybody.",
    "dflash_gpu_memory_total_bytes": "GPU memory.",
    "dflash_warnings": "Faults, errors and recent warnings of this run.",
}
_TRAINING = {
    "step": "dflash_training_step",
    "loss": "dflash_training_loss",
    "acc": "dflash_training_accuracy",
    "tau": "dflash_training_tau",
    "tokens_per_s": "dflash_training_tokens_per_second",
    "read_bytes_per_s": "dflash_training_read_bytes_per_second",
    "wait_share": "dflash_training_wait_ratio",
    "eta_s": "dflash_training_eta_seconds",
}
_HELDOUT = {"loss": "dflash_heldout_loss", "tau": "dflash_heldout_tau", "tau_replay": "dflash_heldout_tau_replay"}

Sample = tuple[str, dict[str, str], float]


def exposition(look: dict[str, Any]) -> str:
    """``Live.look()`` as text. Numbers that are not known are left out."""
    families: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family, labels, value in _samples(look):
        families.setdefault(family, []).append((labels, value))
    lines = []
    for family, samples in families.items():
        lines.append(f"# HELP {family} {_HELP.get(family, 'A number that processes tell, by its name.')}")
        lines.append(f"# TYPE {family} gauge")
        lines += [f"{family}{_labels(labels)} {float(value)!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _samples(look: dict[str, Any]) -> Iterator[Sample]:
    for stage in look["stages"]:
        for state in STATES:
            yield "dflash_stage_state", {"stage": stage["name"], "drafter": stage["drafter"], "state": state}, stage["state"] == state
    parts = look["parts"]
    if parts["planned"] is not None:
        for name, family in (
            ("planned", "dflash_parts_planned"),
            ("committed", "dflash_parts_committed"),
            ("tokens", "dflash_store_tokens"),
            ("bytes", "dflash_store_bytes"),
        ):
            yield family, {}, parts[name]
    yield from _of_processes(look["processes"])
    for drafter, curve in look["curves"].items():
        for rows, names in ((curve["steps"], _TRAINING), (curve["heldout"], _HELDOUT)):
            for name, family in names.items():
                if rows and isinstance(rows[-1].get(name), int | float):
                    yield family, {"drafter": drafter}, rows[-1][name]
    for drafter, found in look["evaluations"].items():
        for dataset, result in (found.get("datasets") or {}).items():
            if isinstance(result.get("acceptance_length"), int | float):
                yield "dflash_acceptance_length", {"drafter": drafter, "dataset": dataset}, result["acceptance_length"]
    for host in look["hosts"]:
        for gpu in host["gpus"]:
            labels = {"host": host["host"], "gpu": gpu["gpu"], "name": gpu["name"]}
            for name, family in (
                ("busy", "dflash_gpu_busy_ratio"),
                ("used_bytes", "dflash_gpu_memory_used_bytes"),
                ("total_bytes", "dflash_gpu_memory_total_bytes"),
            ):
                if gpu[name] is not None:
                    yield family, labels, gpu[name]
    yield "dflash_warnings", {}, len(look["warnings"])


def _of_processes(processes: list[dict[str, Any]]) -> Iterator[Sample]:
    for process in processes:
        if not process["of_this_run"]:
            continue
        labels = {"process": process["name"], "stage": process["stage"], "host": process["host"]}
        yield "dflash_process_up", labels, not process["ended"] and process["alive"] is not False
        yield "dflash_process_age_seconds", labels, process["age_s"]
        for name in ("done", "total"):
            if process[name] is not None:
                yield f"dflash_process_{name}", labels | {"unit": process["unit"]}, process[name]
        for name, value in process["numbers"].items():
            if value is not None:
                yield f"dflash_process_number_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", labels, value


def _labels(labels: dict[str, str]) -> str:
    kept = [f'{name}="{_escaped(value)}"' for name, value in labels.items() if value != ""]
    return "{" + ",".join(kept) + "}" if kept else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

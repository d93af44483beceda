"""Facts of a run -> the blocks of its page."""

import json
import math
from typing import Any

from dflash_offline.config import RunConfig
from dflash_offline.figures import bytes_text, counted
from dflash_offline.report.facts import Facts, capture_remarks, thinned
from dflash_offline.report.page import Block, Code, Heading, Plot, Table, Text
from dflash_offline.report.plots import learning_curve, slots, training_curves


def number(value: Any, form: str = ",") -> str:
    """A figure for people; a dash where there is none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return format(value, form)


def page_blocks(facts: Facts) -> list[Block]:
    """The whole page: result first, then what it was made from."""
    return [
        Heading(f"DFlash drafter for {target_title(facts)}", 1),
        *result_section(facts),
        *evaluation_section(facts),
        *training_section(facts),
        *capture_section(facts),
        *corpus_section(facts),
        *versions_section(facts),
        *settings_section(facts),
    ]


def target_title(facts: Facts) -> str:
    model = facts.config.target.model
    return facts.config.export.target_name or (model.rstrip("/").rsplit("/", 1)[-1] if model.startswith((".", "/", "~")) else model)


def result_section(facts: Facts) -> list[Block]:
    overall, drafter = facts.evaluation.get("overall") or {}, facts.drafter
    rows: list[list[str]] = []
    if overall.get("acceptance_length") is not None:
        rows.append(["acceptance length", f"{overall['acceptance_length']:.3f} tokens per verify step, mean of the data sets"])
        same = f"{overall.get('identical', 0)} the same, {overall.get('near_ties', 0)} near-ties, {overall.get('different', 0)} different"
        rows.append(["output against the target's own greedy text", same])
    replay = facts.evaluation.get("tau_replay") or {}
    if replay.get("tau") is not None:
        rows.append(["tau_replay on held-out rows", f"{replay['tau']:.3f} over {replay.get('rows', '?')} rows"])
    if replay.get("loop"):
        rows.append(real_loop_row(replay["loop"]))
    if overall.get("speedup") is not None:
        rows.append(["speed-up", f"{overall['speedup']:.2f}x on {facts.evaluation.get('device', '?')}"])
    if facts.parts:
        size, tokens = (sum(part[name] for part in facts.parts) for name in ("bytes", "tokens"))
        rows.append(["store", f"codec {facts.parts[0]['codec']}, {size / tokens:,.0f} bytes a token"])
    rows.append(
        [
            "trained",
            f"{number(drafter.get('steps'))} steps, {number(drafter.get('tokens'))} tokens, {number(drafter.get('seconds'), ',.0f')} s",
        ]
    )
    blocks: list[Block] = [Table(["", ""], rows)]
    if facts.evaluation.get("device") == "cpu":
        blocks.append(
            Text("A CPU shows no speed-up: a block costs it as much as its tokens one by one. Acceptance lengths are the same everywhere.")
        )
    return blocks


def real_loop_row(pair: dict[str, Any]) -> list[str]:
    """The real loop's acceptance length beside ``tau_replay`` on the same answers: ``tau_replay["loop"]`` of ``results.json``."""
    label = f"real loop on {pair['reproduced']:,} of {counted(pair['rows'], 'held-out answer')} that the target writes again token by token"
    if pair["reproduced"] == 0:
        return [label, "not compared with tau_replay; [evaluate] heldout_loop_rows says how many answers are tried"]
    apart = "" if pair["agrees"] else "; too far apart: check layers, template and precision"
    return [label, f"{pair['loop']:.3f} (tau_replay on the same: {pair['replay']:.3f}){apart}"]


def evaluation_section(facts: Facts) -> list[Block]:
    datasets = facts.evaluation.get("datasets") or {}
    blocks: list[Block] = [Heading("Draft and verify on the target")]
    if not datasets:
        return [*blocks, Text("No prompt files were named in [evaluate] prompts.")]
    rows = []
    for name, found in datasets.items():
        interval = found.get("interval")
        rows.append(
            [
                name,
                number(found["acceptance_length"], ".3f"),
                "-" if interval is None else "{:.3f} to {:.3f}".format(*interval),
                number(found.get("acceptance_length_zlab_mean"), ".3f"),
                number(found.get("prompts")),
                number(found.get("tokens")),
                number(found.get("steps")),
                number(found.get("tokens_per_s"), ",.1f"),
                number(found.get("baseline_tokens_per_s"), ",.1f"),
                number(found.get("speedup"), ".2f"),
                f"{number(found.get('draft_share'), '.0%')} / {number(found.get('verify_share'), '.0%')}",
                f"{found.get('identical', 0)} + {found.get('near_ties', 0)} near-ties, {found.get('different', 0)} different",
            ]
        )
    columns = [
        "data set",
        "acceptance length",
        "95 % interval",
        "z-lab mean",
        "prompts",
        "tokens",
        "steps",
        "tokens/s",
        "target alone",
        "speed-up",
    ]
    blocks.append(Table([*columns, "draft / verify time", "same as greedy"], rows, right=range(1, 11)))
    blocks.append(
        Text(
            "Acceptance length: emitted tokens per verify step, pooled over a data set; the prefill's token is not counted. "
            "z-lab mean: the mean over responses of each response's own mean."
        )
    )
    per_slot = {name: [value or 0.0 for value in found.get("accepted_per_slot") or []] for name, found in datasets.items()}
    per_slot = {name: values for name, values in per_slot.items() if values}
    if per_slot:
        longest = max(map(len, per_slot.values()))
        blocks.append(Plot("accepted_per_slot", "Share of steps in which a slot was accepted", slots(per_slot, label="accepted")))
        shown = [[name, *[number(value, ".3f") for value in values], *["-"] * (longest - len(values))] for name, values in per_slot.items()]
        blocks.append(Table(["accepted, slot", *[str(slot) for slot in range(1, longest + 1)]], shown, right=range(1, longest + 1)))
    return blocks


def training_section(facts: Facts) -> list[Block]:
    captions = {
        "loss": "Loss of a step, and on held-out conversations",
        "acceptance": "tau over uniform anchors: a training curve, higher than what a real loop gives",
        "throughput": "Context tokens trained per second, all ranks",
    }
    blocks: list[Block] = [Heading("Training")]
    for name, svg in training_curves(facts.metrics, facts.heldout).items():
        blocks.append(Plot(name, captions[name], svg))
    if (curve := learning_curve(facts.metrics, facts.heldout)) is not None:
        blocks.append(Plot("learning_curve", "Acceptance length on held-out conversations against context tokens trained", curve))
    fields = [
        ("step", ","),
        ("epoch", ".2f"),
        ("loss", ".3f"),
        ("acc", ".3f"),
        ("streak", ".2f"),
        ("tau", ".2f"),
        ("lr", ".1e"),
        ("tokens_per_s", ",.0f"),
    ]
    chosen = thinned(facts.metrics, 8)
    if chosen:
        if len(chosen) < len(facts.metrics):
            blocks.append(Text(f"{len(chosen)} of the {len(facts.metrics):,} logged steps, evenly spread; all are in metrics.jsonl."))
        blocks.append(
            Table(
                [name for name, _ in fields],
                [[number(row.get(name), form) for name, form in fields] for row in chosen],
                right=range(len(fields)),
            )
        )
    held = thinned(facts.heldout, 8)
    if held:
        fields = [("loss", ".3f"), ("acc", ".3f"), ("tau", ".2f"), ("tau_replay", ".3f")]
        rows = [[number(row.get("step")), *[number(row["heldout"].get(name), form) for name, form in fields]] for row in held]
        blocks.append(Table(["held out, step", *[name for name, _ in fields]], rows, right=range(5)))
        per_slot = held[-1]["heldout"].get("acc_per_slot")
        if per_slot:
            values = [value if value is not None else 0.0 for value in per_slot]
            blocks.append(
                Plot("accuracy_per_slot", "Accuracy of each slot on held-out conversations", slots({"held out": values}, label="right"))
            )
    return blocks


def capture_section(facts: Facts) -> list[Block]:
    blocks: list[Block] = [Heading("Capture")]
    tokens, size = (sum(part[name] for part in facts.parts) for name in ("tokens", "bytes"))
    if facts.parts:
        first = facts.parts[0]
        plain = tokens * first["num_taps"] * first["hidden_size"] * 2
        text = (
            f"{counted(len(facts.parts), 'part')}, {counted(tokens, 'token')}, {bytes_text(size)} in codec {first['codec']}: "
            f"{size / tokens:,.0f} bytes a token, {size / plain:.3f} of bfloat16."
        )
        blocks.append(Text(text))
        if remarks := capture_remarks(facts.parts):
            blocks.append(Text(remarks))
    several_hosts = len({row["host"] for row in facts.capture}) > 1
    rows = [
        [
            ("-" if row["replica"] is None else str(row["replica"])) + (f" on {row['host']}" if several_hosts else ""),
            row["device"],
            row["parts"],
            number(row["tokens"]),
            number(row["seconds"], ",.1f"),
            number(row["tokens_per_s"], ",.0f"),
            bytes_text(row["bytes"]),
        ]
        for row in facts.capture
    ]
    blocks.append(Table(["replica", "device", "parts", "tokens", "seconds", "tokens/s", "written"], rows, right=(2, 3, 4, 5, 6)))
    return blocks


def corpus_section(facts: Facts) -> list[Block]:
    rows = [
        [
            row["bucket"],
            f"[{row['low']:,}, {row['high']:,})",
            number(row["rows"]),
            number(row["heldout"]),
            number(row["tokens"]),
            f"{row['share']:.1%}",
        ]
        for row in facts.buckets
    ]
    blocks: list[Block] = [Heading("Corpus")]
    blocks.append(Table(["bucket", "tokens from, below", "conversations", "held out", "tokens", "share of tokens"], rows, right=range(6)))
    rejected = facts.corpus.get("rejected") or {}
    if rejected:
        counts = [[reason, number(count) if isinstance(count, int) else str(count)] for reason, count in sorted(rejected.items())]
        blocks.append(Table(["rows not used, by reason", ""], counts, right=(1,)))
    return blocks


def versions_section(facts: Facts) -> list[Block]:
    environment = dict(facts.drafter.get("environment") or {})
    machine = facts.drafter.get("machine")
    for name, value in (machine or {}).items() if isinstance(machine, dict) else []:
        environment.setdefault(name, value)
    if "+" in environment.get("torch", "") and "cuda" not in environment:
        environment["cuda"] = environment["torch"].split("+")[1]
    rows = [
        [name, json.dumps(value) if isinstance(value, dict | list) else value]
        for name, value in sorted(environment.items())
        if value is not None
    ]
    return [Heading("Versions"), Text("What trained the drafter."), Table(["", ""], rows)]


def settings_section(facts: Facts) -> list[Block]:
    rows = [[name, f"{key}"] for name, key in facts.keys.items()]
    return [
        Heading("Keys and settings"),
        Table(["stage", "key"], rows),
        Text(f"All settings of {facts.config.source.name}, defaults included:"),
        Code(settings_text(facts.config)),
    ]


def settings_text(config: RunConfig) -> str:
    """Every setting of a run file that has a value, defaults included."""
    lines: list[str] = []

    def section(title: str, values: dict[str, Any]) -> None:
        lines.append(title)
        lines.extend(f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None)
        lines.append("")

    dumped = config.model_dump(mode="json", exclude={"root", "drafters", "hosts"})
    for name, values in dumped.items():
        section(f"[{name}]", values)
    for entry in config.drafters:
        section("[[drafters]]", entry)
    for name, host in config.hosts.items():
        section(f"[hosts.{name}]", host.model_dump(mode="json"))
    return "\n".join(lines)

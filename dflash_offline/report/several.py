"""The page of a run file with several drafters: their ranking, then each of them, then what they have in common."""

from dataclasses import replace
from typing import Any

from dflash_offline.config import RunConfig
from dflash_offline.config.drafters import known_settings
from dflash_offline.report.blocks import (
    capture_section,
    corpus_section,
    evaluation_section,
    number,
    result_section,
    settings_text,
    target_title,
    training_section,
    versions_section,
)
from dflash_offline.report.facts import Facts
from dflash_offline.report.page import Block, Code, Heading, Plot, Table, Text
from dflash_offline.report.ranking import Ranked


def page_of_drafters(config: RunConfig, ranked: list[Ranked], facts: dict[str, Facts]) -> list[Block]:
    """The whole page.

    Args:
        config: the run file with all its drafters.
        ranked: the drafters, best first.
        facts: of each drafter, by name.
    """
    shared = facts[ranked[0].name]
    blocks: list[Block] = [Heading(f"{len(ranked)} DFlash drafters for {target_title(shared)}", 1), *ranking_section(config, ranked, facts)]
    for one in ranked:
        blocks += _drafter(one.name, facts[one.name])
    return [*blocks, *capture_section(shared), *corpus_section(shared), *versions_section(shared), *_settings(config, ranked, facts)]


def ranking_section(config: RunConfig, ranked: list[Ranked], facts: dict[str, Facts]) -> list[Block]:
    """The drafters in a table, best first: figures, and what makes each different."""
    rows = []
    for rank, one in enumerate(ranked, 1):
        found = facts[one.name]
        speedup = (found.evaluation.get("overall") or {}).get("speedup")
        rows.append(
            [
                rank,
                one.name,
                number(one.length, ".3f"),
                "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval),
                number(one.replay, ".3f"),
                number(speedup, ".2f"),
                number(found.drafter.get("steps")),
                number(found.drafter.get("seconds"), ",.0f"),
                ", ".join(_differences(config, one)) or "nothing",
            ]
        )
    columns = ["rank", "drafter", "acceptance length", "95 % interval", "tau_replay", "speed-up", "steps", "seconds", "its own settings"]
    return [
        Heading("Ranking"),
        Table(columns, rows, right=(0, 2, 3, 4, 5, 6, 7)),
        Text(
            "Acceptance length: mean of the data sets, with its interval from theirs. Drafters whose intervals overlap may rank either "
            "way. tau_replay is measured on the same held-out conversations for all of them. All were trained from one store."
        ),
    ]


def _differences(config: RunConfig, one: Ranked) -> list[str]:
    """Settings of a drafter that [drafter] and [train] do not have: ``layers = 3``."""
    told = []
    for key, section in known_settings().items():
        mine: Any = getattr(getattr(one.config, section), key)
        if mine != getattr(getattr(config, section), key) and key != "gpus":
            told.append(f"{key} = {mine}")
    return told


def _drafter(name: str, facts: Facts) -> list[Block]:
    """One drafter's part: headings a level down, figures named after it."""
    blocks: list[Block] = [Heading(name)]
    for block in (*result_section(facts), *evaluation_section(facts), *training_section(facts)):
        match block:
            case Heading(text, level):
                blocks.append(Heading(f"{name}: {text[0].lower()}{text[1:]}", level + 1))
            case Plot(plot, caption, svg):
                blocks.append(replace(block, name=f"{name}_{plot}".replace(".", "_"), caption=f"{name}: {caption}", svg=svg))
            case _:
                blocks.append(block)
    return blocks


def _settings(config: RunConfig, ranked: list[Ranked], facts: dict[str, Facts]) -> list[Block]:
    stages = list(facts[ranked[0].name].keys)
    return [
        Heading("Keys and settings"),
        Table(["drafter", *stages], [[one.name, *[facts[one.name].keys[stage] for stage in stages]] for one in ranked]),
        Text(f"All settings of {config.source.name}, defaults included:"),
        Code(settings_text(config)),
    ]

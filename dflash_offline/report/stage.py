"""Write the report of a finished run: ``report.md`` with its plots beside it, ``report.html`` with everything inside."""

import argparse
from pathlib import Path

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, write_bytes, write_manifest
from dflash_offline.progress import Progress


def write_report(config: RunConfig, key: str) -> Path:
    """Gather, write, commit; returns the folder. Several drafters share one page, which ranks them.

    Raises:
        DFlashError: a stage before the report is not complete.
    """
    from dflash_offline.report.blocks import page_blocks
    from dflash_offline.report.facts import gather
    from dflash_offline.report.page import Plot, markdown, self_contained_html
    from dflash_offline.report.ranking import ranked
    from dflash_offline.report.several import page_of_drafters

    facts = {each.name: gather(each) for each in config.each_drafter()}
    placed = ranked(config)
    best = placed[0]
    blocks = page_of_drafters(config, placed, facts) if config.drafters else page_blocks(facts[best.name])
    folder = Layout(config.root_dir).report(key)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    files = {"report.md": markdown(blocks), "report.html": self_contained_html(blocks[0].text, blocks)}  # type: ignore[union-attr]
    files |= {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Plot)}
    for name, text in files.items():
        write_bytes(folder / name, text.encode(), durable=False)
    ranking = [{"drafter": one.name, "acceptance_length": one.length, "interval": one.interval, "tau_replay": one.replay} for one in placed]
    more = {"ranking": ranking} if config.drafters else {}
    write_manifest(folder, kind="report", key=key, files=sorted(files), acceptance_length=best.length, **more)
    return folder


def main(argv: list[str] | None = None) -> None:
    from dflash_offline.stage import run_stage

    def body(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
        progress.update(done=0, total=1, text="writing", force=True)
        folder = write_report(config, arguments.key)
        progress.update(done=1, total=1, text="written", force=True)
        progress.say(f"Report: {folder / 'report.html'}")

    run_stage("report", body, argv, key=keys.report_key)

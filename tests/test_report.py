"""The report: everything asked for is on it, figures are those of the results, the HTML page needs nothing else."""

import html.parser
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, damaged_files, read_json, read_manifest
from dflash_offline.report import write_report
from dflash_offline.report.blocks import number, page_blocks, real_loop_row
from dflash_offline.report.facts import capture_rates, capture_remarks, gather, thinned
from dflash_offline.report.page import Code, Heading, Plot, Table, Text, markdown, self_contained_html
from dflash_offline.report.plots import learning_curve, slots, training_curves


@pytest.fixture(scope="module")
def config(finished_run: Path) -> RunConfig:
    return RunConfig.load(finished_run / "run.toml")


@pytest.fixture(scope="module")
def folder(config: RunConfig) -> Path:
    return Layout(config.root_dir).report(keys.report_key(config))


def test_the_stage_left_a_whole_report(folder: Path) -> None:
    manifest = read_manifest(folder, kind="report")
    assert damaged_files(folder, manifest, deep=True) == []
    assert {"report.md", "report.html", "loss.svg", "acceptance.svg", "accepted_per_slot.svg"} <= set(manifest["files"])


def test_every_section_is_there(folder: Path, config: RunConfig) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    for heading in ("Draft and verify on the target", "Training", "Capture", "Corpus", "Versions", "Keys and settings"):
        assert f"\n## {heading}\n" in text
    for column in ("95 % interval", "z-lab mean", "accepted, slot", "bucket", "replica", "tokens/s", "held out, step"):
        assert column in text
    for package in ("torch", "transformers", "zarr", "git", "python"):
        assert re.search(rf"^\| {package} \| \S", text, flags=re.MULTILINE), package
    for stage in (keys.corpus_key, keys.capture_key, keys.train_key, keys.export_key, keys.evaluate_key):
        assert stage(config) in text
    assert "[drafter]\nlayers = 1\nblock_size = 4" in text
    assert "A CPU shows no speed-up" in text


def test_figures_are_those_of_the_results(folder: Path, config: RunConfig) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    layout = Layout(config.root_dir)
    results = read_json(layout.evaluation(keys.evaluate_key(config)) / "results.json")
    assert f"| acceptance length | {results['overall']['acceptance_length']:.3f} tokens per verify step" in text
    for name, found in results["datasets"].items():
        assert f"| {name} | {found['acceptance_length']:.3f} |" in text
    corpus = read_manifest(layout.corpus(keys.corpus_key(config)))
    rows = re.findall(r"^\| \d+ \| \[[\d,]+, [\d,]+\) \| ([\d,]+) \| [\d,]+ \| ([\d,]+) \|", text, flags=re.MULTILINE)
    assert len(rows) == len(corpus["bucket_edges"])
    assert sum(int(row[0].replace(",", "")) for row in rows) == corpus["counts"]["rows"]
    assert sum(int(row[1].replace(",", "")) for row in rows) == corpus["counts"]["tokens"]


def test_one_part_is_called_so(config: RunConfig) -> None:
    facts = gather(config)
    assert "\n1 part, " in markdown(page_blocks(replace(facts, parts=facts.parts[:1])))


def test_the_real_loop_stands_beside_tau_replay(config: RunConfig) -> None:
    """In both forms of the page; where no answer was written again, that is said."""
    facts = gather(config)
    pair = {"rows": 2, "reproduced": 1, "replay": 1.2184, "loop": 1.2175, "difference": 0.001, "agrees": True}

    def blocks(pair: dict[str, Any] | None) -> list[Any]:
        return page_blocks(replace(facts, evaluation={**facts.evaluation, "tau_replay": {"tau": 1.31, "rows": 7, "loop": pair}}))

    label = "real loop on 1 of 2 held-out answers that the target writes again token by token"
    assert f"| {label} | 1.218 (tau_replay on the same: 1.218) |\n" in markdown(blocks(pair))
    assert f"<td>{label}</td><td>1.218 (" in self_contained_html("run", blocks(pair))
    assert real_loop_row(pair | {"loop": 1.1, "agrees": False})[1].endswith("; too far apart: check layers, template and precision")
    none = pair | {"reproduced": 0, **dict.fromkeys(("replay", "loop", "difference", "agrees"))}
    assert re.search(r"^\| real loop on 0 of 2 .* \| not compared .* \[evaluate\] heldout_loop_rows", markdown(blocks(none)), re.MULTILINE)
    assert "real loop on" not in markdown(blocks(None)), "heldout_loop_rows = 0"


def test_what_is_left_out_is_said_and_what_is_unknown_is_not_shown(config: RunConfig) -> None:
    facts = gather(config)
    rows = [{**facts.metrics[-1], "step": step} for step in range(1, 41)]
    environment = {**facts.drafter["environment"], "cuda": None}
    text = markdown(page_blocks(replace(facts, metrics=rows, drafter={**facts.drafter, "environment": environment})))
    assert "8 of the 40 logged steps, evenly spread" in text
    assert "logged steps" not in markdown(page_blocks(replace(facts, metrics=rows[:8])))
    assert "| cuda |" not in text and "| torch |" in text and "None" not in text


class _Page(html.parser.HTMLParser):
    """Collects tags, attributes that load something, ids and unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "srcset", "data", "action") or (name.endswith("href") and not (value or "").startswith("#")):
                self.loads.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def test_html_is_self_contained_and_well_formed(folder: Path) -> None:
    page = _Page()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert page.tags.count("svg") == len(list(folder.glob("*.svg"))) >= 4
    assert len(page.ids) == len(set(page.ids)), "ids of several figures clash"


def test_references_inside_figures_stay_whole(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'id="([^"]+)"', text))
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used and used <= ids


def test_markdown_links_lead_to_files(folder: Path) -> None:
    names = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (folder / "report.md").read_text(encoding="utf-8"))
    assert names and all((folder / name).is_file() for name in names)


def test_written_again_it_is_the_same(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    folder = Layout(config.root_dir).report(keys.report_key(config))
    assert write_report(config, keys.report_key(config)) == folder
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    write_report(config, keys.report_key(config))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST} == before


def test_an_unfinished_run_has_no_report(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    layout = Layout(config.root_dir)
    (layout.evaluation(keys.evaluate_key(config)) / MANIFEST).unlink()
    shutil.rmtree(layout.report(keys.report_key(config)))
    with pytest.raises(DFlashError, match="not complete"):
        write_report(config, keys.report_key(config))
    assert not layout.report(keys.report_key(config)).exists()


def test_a_run_without_prompts_has_one(finished_run: Path, tmp_path: Path) -> None:
    """[evaluate] prompts = []: evaluation on held-out rows only."""
    shutil.copytree(finished_run, tmp_path / "run")
    config = RunConfig.load(tmp_path / "run" / "run.toml")
    results = Layout(config.root_dir).evaluation(keys.evaluate_key(config)) / "results.json"
    content = read_json(results)
    results.write_text(json.dumps(content | {"datasets": {}, "overall": {"acceptance_length": None}}))
    text = (write_report(config, keys.report_key(config)) / "report.md").read_text(encoding="utf-8")
    assert "No prompt files were named" in text and "| acceptance length |" not in text


def test_blocks_in_both_forms() -> None:
    blocks = [
        Heading("A < B", 1),
        Text("x & y"),
        Table(["a|b", "n"], [["1|2", 3]], right=(1,)),
        Plot("p", "c", "<svg></svg>"),
        Code("k = 1\n"),
    ]
    assert markdown(blocks) == "# A < B\n\nx & y\n\n| a\\|b | n |\n| --- | ---: |\n| 1\\|2 | 3 |\n\n![c](p.svg)\n\n```\nk = 1\n```\n"
    page = self_contained_html("<t>", blocks)
    assert "<h1>A &lt; B</h1>" in page and "<p>x &amp; y</p>" in page and "<title>&lt;t&gt;</title>" in page
    assert '<td class="n">3</td>' in page and "<svg></svg>" in page


def test_plots_are_the_same_for_the_same_data_and_keep_their_text() -> None:
    rows = [{"step": step, "loss": 10 / step, "tau": 1.0, "tokens_per_s": 5.0} for step in range(1, 40)]
    held = [{"step": 20, "heldout": {"loss": 1.0, "tau": 1.2}}]
    first, second = training_curves(rows, held), training_curves(rows, held)
    assert first == second and set(first) == {"loss", "acceptance", "throughput"}
    assert "held out" in first["loss"] and "cross-entropy" in first["loss"]
    assert training_curves([], []) == {}
    assert slots({"a": [0.5, 0.25]}, label="accepted").startswith("<svg")


def test_learning_curve_is_over_the_tokens_trained(config: RunConfig) -> None:
    rows = [{"step": step, "loss": 1.0, "tokens": 5_000 * step} for step in range(10, 60, 10)]
    held = [{"step": step, "heldout": {"tau_replay": step / 10, "tau_replay_interval": [1.0, 5.0]}} for step in (20, 44)]
    curve = learning_curve(rows, held)
    assert curve is not None and "context tokens trained" in curve and "95 % interval" in curve
    assert "200000" in curve and "225000" not in curve, "44 steps are not logged: the tokens of step 40 stand for them"
    assert learning_curve(rows, held[:1]) is None and learning_curve([], held) is None
    assert learning_curve(rows, [{"step": 20, "heldout": {"tau_replay": None}}, *held[1:]]) is None
    facts = gather(config)
    text = markdown(page_blocks(replace(facts, metrics=[{**facts.metrics[-1], **row} for row in rows], heldout=held)))
    assert "learning_curve.svg" in text
    assert re.search(r"\| store \| codec lossless, [\d,]+ bytes a token \|", text)


def test_capture_rates_by_replica() -> None:
    def part(replica: int, tokens: int, seconds: float) -> dict[str, Any]:
        return {"tokens": tokens, "bytes": 10, "extra": {"replica": replica, "device": "cpu", "seconds": seconds}}

    resumed = part(0, 50, 1.0)
    resumed["extra"] |= {"tokens": 20}  # 30 of them were written by an earlier run
    rates = capture_rates([part(1, 100, 2.0), resumed, part(1, 300, 2.0), {"tokens": 5, "bytes": 1, "extra": {}}])
    assert [(row["replica"], row["parts"], row["tokens"], row["tokens_per_s"]) for row in rates] == [
        (0, 1, 50, 20.0),
        (1, 2, 400, 100.0),
        (None, 1, 5, None),
    ]


def test_replicas_of_several_hosts_are_told_apart(config: RunConfig) -> None:
    facts = gather(config)
    rates = [{**facts.capture[0], "host": host} for host in ("one", "two")]
    page = markdown(page_blocks(replace(facts, capture=rates)))
    assert "| 0 on one | cpu |" in page and "| 0 on two | cpu |" in page
    assert "| 0 | cpu |" in markdown(page_blocks(facts))
    parts = [{"tokens": 1, "bytes": 1, "extra": {"replica": 0, "device": "cpu", "host": host}} for host in ("b", "a", "b")]
    assert [(row["host"], row["tokens"]) for row in capture_rates(parts)] == [("a", 1), ("b", 2)]


def test_numbers_andthinned() -> None:
    assert (number(None), number(float("nan")), number(1234), number(0.5, ".0%")) == ("-", "-", "1,234", "50%")
    rows = [{"step": i} for i in range(100)]
    chosen = [row["step"] for row in thinned(rows, 8)]
    assert len(chosen) == 8 and chosen[0] == 0 and chosen[-1] == 99 and chosen == sorted(set(chosen))
    assert thinned(rows[:3], 8) == rows[:3]


def test_remarks_on_capture_weigh_parts_by_tokens_and_name_halved_batches() -> None:
    assert capture_remarks([{"tokens": 5, "extra": {}}]) == ""
    extra = {"padding": 0.0, "seconds": 10.0, "wait_s": 1.0, "packed": True}
    assert capture_remarks([{"tokens": 100, "extra": extra}]) == (
        "Batches were packed: 0.0% of what was computed held no token. The target waited 10.0% of its time for the disk."
    )
    other = {"padding": 0.2, "seconds": 10.0, "wait_s": 0.0, "packed": False, "tokens_per_batch_halved_to": {"2": 4096}}
    text = capture_remarks([{"tokens": 300, "extra": extra}, {"tokens": 100, "extra": other}])
    assert text.startswith("Batches were packed in some parts and padded in others: 5.0% of") and "waited 5.0%" in text
    assert text.endswith("Memory ran out: bucket 2 went on with 4,096 tokens a batch.")

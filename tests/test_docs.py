"""Every command of the documentation runs, its settings exist, and the pages build without a warning."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import shell_blocks

from dflash_offline.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Commands that cannot run in a test, by how they begin, and why
NOT_RUN = {
    "make ": "sets up an environment of its own; it is what runs these tests",
    "pip install": "changes the environment that the tests run in",
    "dflash-offline smoke": "the finished run that the others look at was made by it",
    "for host in": "needs other hosts",
    "sbatch": "needs Slurm",
    "luigid": "stays in the foreground",
    "luigi --module pipelines DFlashAll --scheduler-url": "needs the luigid of the line before it",
}
LONG = ("python benchmarks/",)


def commands() -> list[Any]:
    """Each once; what the README has too is run by its own test."""
    found = []
    seen = set(shell_blocks.commands((ROOT / "README.md").read_text(encoding="utf-8")))
    for page in PAGES:
        for command in shell_blocks.commands(page.read_text(encoding="utf-8")):
            if command not in seen and not command.startswith(tuple(NOT_RUN)):
                seen.add(command)
                marks = [pytest.mark.long] if command.startswith(LONG) else []
                found.append(pytest.param(command, id=f"{page.stem}: {command[:60]}", marks=marks))
    return found


@pytest.fixture(scope="module")
def folder(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("docs") / "run"
    shutil.copytree(finished_run, copy)
    run_file = (copy / "run.toml").read_text(encoding="utf-8")
    assert '"conversations.jsonl"' in run_file
    (copy / "piped.toml").write_text(run_file.replace('"conversations.jsonl"', '"-"'), encoding="utf-8")
    (copy / "benchmarks").symlink_to(ROOT / "benchmarks")
    return copy


@pytest.mark.parametrize("command", commands())
def test_command_runs(folder: Path, command: str) -> None:
    results = {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").iterdir()}
    shell_blocks.run(command.replace("--step STEP", "--step 3"), folder)  # the finished run's last
    assert results == {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").iterdir()}, "a try is no measurement"


def test_every_exception_is_needed() -> None:
    everything = [command for page in PAGES for command in shell_blocks.commands(page.read_text(encoding="utf-8"))]
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for command in everything), f"no page has {beginning!r} any more"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_that_a_page_shows_exist(page: Path) -> None:
    for block in shell_blocks.blocks(page.read_text(encoding="utf-8"), "toml"):
        for name, section in tomllib.loads(block).items():
            assert name in RunConfig.model_fields, f"{page.name}: [{name}]"
            kind: Any = RunConfig.model_fields[name].annotation
            if name not in ("hosts", "drafters", "root"):
                assert set(section) <= set(kind.model_fields), f"{page.name}: [{name}] {section}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_that_a_page_shows_are_scripts(page: Path) -> None:
    for block in shell_blocks.blocks(page.read_text(encoding="utf-8"), "sh"):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    assert sorted(re.findall(r"[\w-]+\.md", nav)) == [page.name for page in PAGES]


def test_pages_build_strictly_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    built = {path.name for path in tmp_path.glob("*.html")}
    assert built >= {f"{page.stem}.html" for page in PAGES}
    for path in tmp_path.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(script|img|iframe)[^>]*\ssrc="https?:', text), path.name
        assert not re.search(r'<link[^>]*rel="stylesheet"[^>]*href="https?:', text), path.name

"""Every command of the README runs, on a finished run of a tiny target; what it points at is there."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import shell_blocks
from click.testing import CliRunner

from dflash_offline.cli import main
from dflash_offline.config import EMBEDDED, RunConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_SMOKE = "dflash-offline smoke"  # the finished run was made by it


def blocks(language: str) -> list[str]:
    return shell_blocks.blocks(README, language)


def commands() -> list[str]:
    """Those of the README; the two that set everything up are CI's own business, and the finished run was made by smoke."""
    return [command for command in shell_blocks.commands(README) if not command.startswith("make ") and command != _SMOKE]


@pytest.fixture(scope="module")
def folder(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("readme") / "run"
    shutil.copytree(finished_run, copy)
    return copy


def test_there_are_commands() -> None:
    assert len(commands()) >= 15
    assert _SMOKE in README and "make demo" in README and "make test" in README
    assert len(blocks("python")) == 2


@pytest.mark.parametrize("command", commands())
def test_command_runs(folder: Path, command: str) -> None:
    done = shell_blocks.run(command, folder)
    if command.startswith("luigi --module pipelines DFlashAll"):
        assert "started on" not in done.stdout, "the finished run has nothing left to do"
    if command.startswith("luigi-deps-tree"):
        assert "COMPLETE" in done.stdout and "DFlashAll" in done.stdout


def test_python_blocks_run_and_agree(folder: Path) -> None:
    """With this package and without it: the same hidden states."""
    package, plain = blocks("python")
    assert "dflash_offline" not in plain
    compared = "import torch\nassert torch.equal(mine, torch.from_numpy(hidden_states))\nprint(mine.shape)"
    code = f"{package}\nmine = sample.hidden_states().float()\n{plain}\n{compared}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size" in done.stdout


def test_first_screen() -> None:
    first = "\n".join(README.splitlines()[:25])
    assert "Acceptance length:" in first and "make demo" in first and "make test" in first
    figure = re.search(r"<!-- demo:acceptance_length -->(.*?)<!-- /demo -->", first)
    assert figure, "the demo's figure has its place"
    assert figure[1] == "not measured yet" or 1.0 <= float(figure[1].strip("* ")) <= 8.0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, options in re.findall(r"`dflash-offline (\w+)([^`\n]*)`", text):
        assert name in main.commands, f"{page.name}: dflash-offline {name}"
        known = CliRunner().invoke(main, [name, "--help"]).output
        for option in re.findall(r"--[\w-]+", options):
            assert option in known, f"{page.name}: dflash-offline {name} {option}"


def test_tree_names_what_is_there() -> None:
    tree = next(block for block in blocks("") if "dflash_offline/" in block)
    for line in tree.splitlines():
        base = ROOT / "dflash_offline" if line.startswith("  ") else ROOT
        for name in re.findall(r"[\w/]+(?:\.py|\.toml|/)(?=\s)", line.strip().split("   ")[0] + " "):
            assert (base / name).exists(), name


def test_package_docstring_maps_every_module() -> None:
    import dflash_offline

    named = set(re.findall(r"``(\w+)``", dflash_offline.__doc__ or ""))
    there = {path.stem for path in (ROOT / "dflash_offline").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there - {"__init__"} - named == set()
    assert named - there - {"pipelines"} == set()


def test_figures_are_quoted_from_results_only() -> None:
    """Between the marks stand only figures that a file of benchmarks/results holds."""
    measured = re.search(r"<!-- measured -->\n(.*?)\n<!-- /measured -->", README, flags=re.DOTALL)
    assert measured
    if measured[1].strip() == "Nothing measured yet.":
        return
    stored: set[str] = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            stored.update({f"{value:.{digits}f}" for digits in range(5)} | {f"{value:,.{digits}f}" for digits in range(5)})
            stored.update(f"{value / 1000:.{digits}f}" for digits in range(3))
            stored.add(f"{abs(value - 1) * 100:.1f}")  # a ratio, said in per cent

    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        collect(json.loads(path.read_text(encoding="utf-8")))
    for line in measured[1].splitlines():
        for figure in re.findall(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.])", line):
            assert figure in stored, f"{figure} is in no file of benchmarks/results: {line}"


def test_demo_data_is_what_its_readme_says(conversations: list[dict[str, Any]]) -> None:
    import hashlib

    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    config = RunConfig.load(EMBEDDED)
    for pattern in (*config.corpus.files, *config.evaluate.prompts):
        path = config.path(pattern).resolve()
        line = next(line for line in text.splitlines() if line.startswith(f"| `{path.name}`"))
        assert hashlib.sha256(path.read_bytes()).hexdigest() in line
    sources = Counter(row["source"] for row in conversations)
    for source, count in sources.items():
        line = next((line for line in text.splitlines() if line.startswith(f"| `{source}` |")), "")
        assert line.startswith(f"| `{source}` | {count} |"), f"{source}: {count} rows"
        assert any(licence in line for licence in ("MIT", "Apache-2.0", "CC-BY-4.0")), source


def test_nothing_here_names_a_place_of_its_making() -> None:
    for page in PAGES:
        assert not re.search(r"/(work|root|home|tmp)/", page.read_text(encoding="utf-8")), page

"""The page about quality: made from the result file alone, and the one in docs/ is what the file gives."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def arm(lengths: dict[str, float], **more: Any) -> dict[str, Any]:
    """An arm of the result file: every prompt of a set took ten steps."""
    totals = {name: " ".join([f"{10 * length:.0f}/10"] * 80) for name, length in lengths.items()}
    plain = {"steps": 1420, "tokens": 14_000_000, "train_s": 100.0, "heldout_acc": 0.25, "anchors": 96, "lr": 6e-4, "loss": "ce"}
    plain |= {"epochs": 4.0, "schedule": "cosine", "ema": None, "tokens_per_batch": 11264, "simulated_tau": 2.0, "real_tau": 2.02}
    plain |= {"tau_difference": 0.0099, "tau_rows": {"reproduced": 60, "common": {"replay": 2.1, "loop": 2.1, "difference": 0.0}}}
    plain |= {"acceptance_length": lengths, "interval": {name: [length - 0.1, length + 0.1] for name, length in lengths.items()}}
    plain |= {"prompts": dict.fromkeys(lengths, 80), "tokens_steps": totals}
    plain |= {kind: dict.fromkeys(lengths, count) for kind, count in (("identical", 30), ("near_ties", 50), ("different", 0))}
    return plain | {"mean_acceptance_length": sum(lengths.values()) / len(lengths)} | more


def test_the_page_compares_what_the_file_holds(benchmark: Any) -> None:
    curve = [
        {"step": 200 * i, "tokens": 2_000_000 * i, "elapsed_s": 90.0 * i, "tau_replay": 1.0 + i / 5, "tau_replay_interval": [1.0, 2.0]}
        for i in (1, 2, 3)
    ]
    arms = {
        "specforge": arm({"gsm8k": 2.5, "mtbench": 1.5}, train_s=222.0, tau_replay_all=1.25),
        "equal": arm({"gsm8k": 2.6, "mtbench": 1.4}, curve=curve),
        "time": arm({"gsm8k": 3.0, "mtbench": 1.8}, train_s=221.0, ema=0.999, loss="dpace", curve=curve),
        "time-kl": arm({"gsm8k": 3.5, "mtbench": 2.0}, train_s=250.0, curve=curve, peer_train_s=240.0),
        "codec-int4": arm({"gsm8k": 1.5, "mtbench": 1.5}, store={"bytes_per_token": 1700.4}),
        "codec-bf16": arm({"gsm8k": 1.6, "mtbench": 1.6}, store={"bytes_per_token": 5800.0}),
    }
    head = benchmark("quality").head_line(arms)
    gain = head["equal_time_over_specforge"]["time"]
    assert gain["ratio"] == pytest.approx(1.2) and gain["within_its_seconds"]
    assert head["equal_over_specforge"]["gsm8k"]["not_below"] and not head["equal_over_specforge"]["mtbench"]["not_below"]
    page = benchmark("quality_page").page({"arms": arms, "device": "some GPU"} | head)
    assert "| gsm8k | 80 | 2.600 (2.500 to 2.700) | 2.500 (2.400 to 2.600) | +4.0% (+4.0% to +4.0%) |" in page
    assert "| `time` | 221 | 1,420 | 3.000 | 1.800 | 2.400 | +20.0% (+20.0% to +20.0%) |" in page
    assert (
        "`time-kl` trained 28 s longer than SpecForge (it was given the 240 s of an earlier run of SpecForge)" in page
        and "`time` trained" not in page
    )
    assert "`time-kl` was at a tau_replay of 1.400 after 180 s, SpecForge at 1.250 when it was done." in page
    assert page.index("| bf16 | 5,800 | 1.600 |") < page.index("| int4 | 1,700 | 1.500 |")
    assert "| time | 60 | 2.000 | 2.020 | 1.0% |" in page and "quality.svg" in page
    assert "Of 160 answers 60 (SpecForge's drafter: 60) are the target's own greedy answer token by token" in page
    assert "| int8 | not measured | - | - |" in page and "## Equal training seconds" in page
    svg = benchmark("quality_page").plot(arms)
    assert svg.startswith("<svg") and "equal" in svg and "context tokens trained" in svg and "codec" not in svg


def test_a_ratio_is_taken_over_the_same_prompts(benchmark: Any) -> None:
    """Prompts differ a hundred times more than the two drafters do: only in pairs is the difference seen."""
    theirs = {"a": " ".join(f"{10 + 40 * (i % 3)}/10" for i in range(60))}
    ours = {"a": " ".join(f"{11 + 44 * (i % 3)}/10" for i in range(60))}
    found = benchmark("quality_decode").ratio(ours, theirs, ["a"])
    assert found["ratio"] == pytest.approx(1.1) and found["interval"] == pytest.approx([1.1, 1.1])
    noisy = {"a": " ".join(f"{10 + 40 * ((i + 1) % 3)}/10" for i in range(60))}
    low, high = benchmark("quality_decode").ratio(noisy, theirs, ["a"])["interval"]
    assert low < 0.9 and high > 1.1


def test_the_page_in_the_documentation_is_what_the_file_gives(benchmark: Any) -> None:
    results, page = ROOT / "benchmarks" / "results" / "quality_h200.json", ROOT / "docs" / "quality.md"
    assert results.exists() == page.exists(), "python benchmarks/quality_page.py writes the page"
    if results.exists():
        assert page.read_text(encoding="utf-8") == benchmark("quality_page").page(json.loads(results.read_text(encoding="utf-8")))

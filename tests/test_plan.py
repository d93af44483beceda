"""The capture plan: what is captured, in which batches, and what is not captured again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_offline import keys, plan
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus, prepare
from dflash_offline.errors import DFlashError, TargetError
from dflash_offline.layout import Layout
from dflash_offline.plan import CapturePlan, bytes_per_token, make_plan, plan_parts, why_padded_batches
from dflash_offline.progress import Progress

RunFile = Callable[..., Path]


def made(path: Path) -> tuple[RunConfig, Corpus, Path]:
    """A prepared corpus of a run file, and where its plan goes."""
    config = RunConfig.load(path)
    key = keys.corpus_key(config)
    corpus = prepare(config, Layout(config.root_dir).corpus(key), key, Progress(None))
    return config, corpus, Layout(config.root_dir).plan("capture", key)


def planned_rows(found: CapturePlan) -> list[int]:
    return [row for part in found.parts for row in part.rows]


def test_every_row_is_planned_once_in_batches_of_one_bucket(run_file: RunFile) -> None:
    config, corpus, path = made(run_file(rows=60))
    found = make_plan(config, corpus, path.parent / "no-store", path)
    assert sorted(planned_rows(found)) == list(range(len(corpus)))
    for part in found.parts:
        assert part.tokens == sum(int(corpus.lengths[row]) for row in part.rows)
        for batch in part.batches:
            assert len({int(corpus.buckets[row]) for row in batch}) == 1
            assert sum(int(corpus.lengths[row]) for row in batch) <= config.corpus.tokens_per_batch
    assert [part.name for part in found.parts] == [f"part-{i:05d}" for i in range(len(found.parts))]
    first, last = found.parts[0].batches[0], found.parts[-1].batches[-1]
    assert corpus.buckets[first[0]] >= corpus.buckets[last[0]]  # longest first
    assert set(found.statistics_rows) <= set(range(len(corpus))) and 0 < len(found.statistics_rows) <= 32
    assert CapturePlan.load(path) == found and found.packed and ", packed" in found.summary()
    assert found.num_rows == len(corpus) and found.num_tokens == int(np.sum(corpus.lengths))


def test_padded_batches_are_planned_where_the_run_file_or_the_target_wants_them(run_file: RunFile) -> None:
    config, corpus, path = made(run_file(rows=60))
    wanted = config.model_copy(update={"target": config.target.model_copy(update={"batches": "padded"})})
    found = make_plan(wanted, corpus, path.parent / "no-store", path)
    assert not found.packed and found.summary().endswith('padded ([target] batches = "padded")')
    for batch in (batch for part in found.parts for batch in part.batches):
        assert max(int(corpus.lengths[row]) for row in batch) * len(batch) <= config.corpus.tokens_per_batch
    eager = config.target.model_copy(update={"attention": "eager"})
    assert "packs nothing" in str(why_padded_batches(config.model_copy(update={"target": eager})))
    with pytest.raises(TargetError, match='batches = "packed".*cannot be packed.*attention = "eager"'):
        why_padded_batches(config.model_copy(update={"target": eager.model_copy(update={"batches": "packed"})}))


def test_a_plan_is_kept_as_it_is(run_file: RunFile) -> None:
    config, corpus, path = made(run_file())
    first = make_plan(config, corpus, path.parent / "no-store", path)
    content = path.read_bytes()
    fewer = config.model_copy(update={"target": config.target.model_copy(update={"replicas": 7})})
    assert make_plan(fewer, corpus, path.parent / "no-store", path) == first
    assert path.read_bytes() == content


def test_replicas_get_two_parts_each_of_a_small_corpus(run_file: RunFile) -> None:
    for replicas in (1, 3):
        config, corpus, path = made(run_file(rows=60, target={"replicas": replicas}))
        found = make_plan(config, corpus, path.parent / "no-store", path.with_name(f"{replicas}.json"))
        assert len(found.parts) == 2 * replicas
        costs = [sum(int(corpus.lengths[batch[0]]) * len(batch) for batch in part.batches) for part in found.parts]
        assert max(costs) - min(costs) <= 2 * config.corpus.tokens_per_batch
        path.with_name(f"{replicas}.json").unlink()


def test_part_bytes_bounds_a_part(run_file: RunFile) -> None:
    config, corpus, path = made(run_file(rows=60, store={"part_bytes": 1_500_000}))
    assert bytes_per_token(config) == 3 * 64 * 2 * 0.70
    found = make_plan(config, corpus, path.parent / "no-store", path)
    assert len(found.parts) > 2
    assert all(part.tokens * bytes_per_token(config) <= 1_500_000 + 1024 * bytes_per_token(config) for part in found.parts)


def test_rows_in_the_store_are_reused_and_numbers_go_on(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    config, corpus, path = made(run_file(rows=30))
    held = {corpus.hashes[row].tobytes(): ("part-00007", i) for i, row in enumerate(range(0, 20))}
    held[b"x" * 32] = ("part-00009", 0)  # of another corpus
    monkeypatch.setattr(plan, "_committed", lambda store: held)
    found = make_plan(config, corpus, path.parent / "store", path)
    assert sorted(planned_rows(found)) == list(range(20, len(corpus)))
    assert found.reused == ["part-00007"]
    assert [part.name for part in found.parts] == ["part-00010", "part-00011"]
    # a second corpus planned beside it must not give out the same names
    other = make_plan(config, corpus, path.parent / "store", path.with_name("other.json"))
    assert [part.name for part in other.parts] == ["part-00012", "part-00013"]


def test_everything_in_the_store_plans_nothing(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    config, corpus, path = made(run_file(rows=10))
    monkeypatch.setattr(plan, "_committed", lambda store: {h.tobytes(): ("part-00000", i) for i, h in enumerate(corpus.hashes)})
    found = make_plan(config, corpus, path.parent / "store", path)
    assert found.parts == [] and found.reused == ["part-00000"]
    assert "0 rows" in found.summary() and "1 part is reused" in found.summary()


def test_duplicates_are_planned_once(run_file: RunFile) -> None:
    path = run_file(rows=10)
    lines = (path.parent / "corpus.jsonl").read_text()
    (path.parent / "corpus.jsonl").write_text(lines + lines)
    config, corpus, plan_path = made(path)
    assert len(corpus) == 20 and corpus.manifest["counts"]["duplicate_rows"] == 10
    found = make_plan(config, corpus, plan_path.parent / "no-store", plan_path)
    hashes = [corpus.hashes[row].tobytes() for row in planned_rows(found)]
    assert len(hashes) == len(set(hashes)) == 10


def test_parts_are_balanced_by_cost() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(10, 500, 2000)
    buckets = (lengths >= 250).astype(np.int16)
    parts = plan_parts(np.arange(2000), lengths, buckets, tokens_per_batch=4096, tokens_per_part=50_000, min_parts=4, first_number=3)
    costs = [sum(int(lengths[batch[0]]) * len(batch) for batch in part.batches) for part in parts]
    assert max(costs) <= 50_000 + 4096 and max(costs) - min(costs) <= 2 * 4096
    assert parts[0].name == "part-00003" and [part.name for part in parts] == sorted(part.name for part in parts)
    assert plan_parts(np.zeros(0, np.int64), lengths, buckets, tokens_per_batch=1, tokens_per_part=1, min_parts=1, first_number=0) == []


def test_damaged_or_missing_plans_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match="no capture plan; run .* again"):
        CapturePlan.load(tmp_path / "p.json")
    contents: list[Any] = [{"parts": [{}]}, [], "x"]
    for content in contents:
        (tmp_path / "p.json").write_text(json.dumps(content))
        with pytest.raises(DFlashError, match="not a capture plan"):
            CapturePlan.load(tmp_path / "p.json")

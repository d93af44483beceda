"""Buckets, their table, batches under budgets, the order of an epoch."""

import itertools

import numpy as np
import pytest

from dflash_offline.buckets import (
    auto_edges,
    bucket_of,
    bucket_range,
    bucket_table,
    buckets_of,
    epoch_order,
    packed_batches,
    padded_batches,
)

EDGES = [770, 1216, 1728, 2432, 3296, 8193]


def test_edges_belong_to_the_bucket_above() -> None:
    assert [bucket_of(length, EDGES) for length in (1, 769, 770, 771, 1215, 1216, 8192)] == [0, 0, 1, 1, 1, 2, 5]
    lengths = np.array([1, 769, 770, 1216, 3295, 3296, 8192])
    assert buckets_of(lengths, EDGES).tolist() == [bucket_of(int(n), EDGES) for n in lengths]
    for length in lengths:
        low, high = bucket_range(bucket_of(int(length), EDGES), EDGES)
        assert low <= length < high
    with pytest.raises(ValueError, match="8193 is not below the last bucket edge 8193"):
        bucket_of(8193, EDGES)


def test_table_has_the_documented_shape() -> None:
    lengths = np.array([1000] * 40 + [100] * 7 + [8192])
    lines = bucket_table(lengths, EDGES, tokens_per_batch=8192)
    assert lines[0].startswith("Bucket 0 [   0, 770):      1 batch   ( 14.3%)        7 rows     700 tokens  padding  0.0%")
    assert lines[1].startswith("Bucket 1 [ 770,1216):      5 batches ( 71.4%)       40 rows   40.0K tokens")
    assert lines[3].startswith("Bucket 3 [1728,2432):      0 batches (  0.0%)        0 rows")
    assert "      1 batch   ( 14.3%)        1 row     8.2K tokens" in lines[5]
    assert len(lines) == 6


def test_table_shows_padding() -> None:
    (line,) = bucket_table(np.array([100, 50, 50]), [101], tokens_per_batch=300)
    assert line.endswith("padding 33.3%")
    (line,) = bucket_table(np.array([100, 50, 50]), [101], tokens_per_batch=300, packed=True)
    assert line.endswith("padding  0.0%")


def test_padded_batches_stay_within_the_budget_and_hold_every_row_once() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 500, 300)
    rows = generator.permutation(1000)[:300]
    batches = padded_batches(rows, lengths, tokens_per_batch=1000)
    length_of = dict(zip(rows.tolist(), lengths.tolist(), strict=True))
    assert sorted(itertools.chain.from_iterable(batch.tolist() for batch in batches)) == sorted(rows.tolist())
    assert all(max(length_of[row] for row in batch.tolist()) * len(batch) <= 1000 for batch in batches)
    assert len(batches) <= 1.2 * lengths.sum() / 1000 + 1  # sorted by length, so hardly anything is padding
    assert [len(batch) for batch in padded_batches(np.array([3]), np.array([5000]), tokens_per_batch=1000)] == [1]


def test_packed_batches_are_full_and_hold_every_row_once() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 500, 3000)
    rows = generator.permutation(10000)[:3000]
    length_of = dict(zip(rows.tolist(), lengths.tolist(), strict=True))
    batches = [batch.tolist() for batch in packed_batches(rows, lengths, tokens_per_batch=1000)]
    assert sorted(itertools.chain.from_iterable(batches)) == sorted(rows.tolist())
    sums = [sum(length_of[row] for row in batch) for batch in batches]
    assert max(sums) <= 1000 and len(batches) <= lengths.sum() / 1000 / 0.99 + 1
    longest = [length_of[batch[0]] for batch in batches]
    assert longest == sorted(longest, reverse=True)
    assert [batch.tolist() for batch in packed_batches(np.array([3, 4]), np.array([5, 5000]), tokens_per_batch=1000)] == [[4], [3]]
    assert packed_batches(np.zeros(0, np.int64), np.zeros(0, np.int64), tokens_per_batch=10) == []


def brute_force_waste(lengths: list[int], num_buckets: int) -> int:
    values = sorted(set(lengths))
    best = None
    for cut in itertools.combinations(values[:-1], min(num_buckets, len(values)) - 1):
        tops = [*cut, values[-1]]
        waste = sum(min(top for top in tops if top >= length) - length for length in lengths)
        best = waste if best is None else min(best, waste)
    assert best is not None
    return best


def test_auto_edges_waste_the_least_padding() -> None:
    generator = np.random.default_rng(1)
    for num_buckets in (1, 2, 3, 4):
        lengths = generator.integers(10, 40, 60)
        edges = auto_edges(lengths, num_buckets=num_buckets, max_length=100)
        assert edges[-1] == 101 and edges == sorted(set(edges)) and len(edges) <= num_buckets
        tops = [edge - 1 for edge in edges[:-1]] + [int(lengths.max())]
        waste = sum(min(top for top in tops if top >= length) - length for length in lengths.tolist())
        assert waste == brute_force_waste(lengths.tolist(), num_buckets)


def test_auto_edges_of_odd_corpora() -> None:
    assert auto_edges(np.array([7]), num_buckets=6, max_length=100) == [101]
    assert auto_edges(np.array([7, 7, 100]), num_buckets=6, max_length=100) == [8, 101]
    many = np.random.default_rng(2).integers(1, 8193, 50_000)
    edges = auto_edges(many, num_buckets=6, max_length=8192)
    assert len(edges) == 6 and edges[-1] == 8193
    assert np.bincount(buckets_of(many, edges), minlength=6).min() > 5000  # even lengths give even buckets


Made = tuple[list[list[np.ndarray]], np.ndarray, np.ndarray, np.ndarray]


def make_order(*, seed: int = 0, epoch: int = 0, group: int = 3, rows: int = 400) -> Made:
    generator = np.random.default_rng(5)
    lengths = generator.integers(20, 1000, rows)
    slots = np.minimum(lengths // 3, 64) * 8
    buckets = buckets_of(lengths, [128, 256, 512, 1001])
    order = epoch_order(
        lengths, slots, buckets, tokens_per_batch=2048, slots_per_batch=2048, micro_batches_per_step=group, seed=seed, epoch=epoch
    )
    return order, lengths, slots, buckets


def test_epoch_holds_every_row_once_within_both_budgets() -> None:
    order, lengths, slots, buckets = make_order()
    batches = [batch for step in order for batch in step]
    assert sorted(np.concatenate(batches).tolist()) == list(range(400))
    for step in order:
        assert 1 <= len(step) <= 3
        assert len({int(buckets[row]) for batch in step for row in batch}) == 1
    assert all(lengths[batch].sum() <= 2048 and slots[batch].sum() <= 2048 for batch in batches)
    short = [sum(len(step) < 3 for step in order if buckets[step[0][0]] == bucket) for bucket in range(4)]
    assert max(short) <= 1  # one partial step a bucket at the most
    least = max(lengths.sum() / 2048, slots.sum() / 2048)
    assert len(batches) <= 1.3 * least  # rows of half a batch cannot all be paired


def test_epoch_is_the_same_each_time_and_mixes_anew_each_epoch() -> None:
    def as_lists(order: list[list[np.ndarray]]) -> list[list[list[int]]]:
        return [[batch.tolist() for batch in step] for step in order]

    first, _, _, buckets = make_order()
    assert as_lists(first) == as_lists(make_order()[0])
    for other in (make_order(epoch=1)[0], make_order(seed=1)[0], make_order(seed=-1)[0]):
        for bucket in range(4):
            mine = {tuple(b.tolist()) for step in first for b in step if buckets[b[0]] == bucket}
            theirs = {tuple(b.tolist()) for step in other for b in step if buckets[b[0]] == bucket}
            assert len(mine) > 1 and len(mine & theirs) < len(mine) / 2  # batches are mixed, not only their order
        assert [int(buckets[step[0][0]]) for step in first] != [int(buckets[step[0][0]]) for step in other]


def test_micro_batches_do_not_depend_on_how_many_make_a_step() -> None:
    def batches(group: int) -> set[tuple[int, ...]]:
        return {tuple(batch.tolist()) for step in make_order(group=group)[0] for batch in step}

    assert batches(1) == batches(3) == batches(7)


def test_order_of_odd_corpora() -> None:
    options = {"tokens_per_batch": 100, "slots_per_batch": 100, "micro_batches_per_step": 2, "seed": 0, "epoch": 0}
    assert epoch_order(np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), **options) == []
    one = epoch_order(np.array([100]), np.array([0]), np.array([3]), **options)
    assert [[batch.tolist() for batch in step] for step in one] == [[[0]]]
    with pytest.raises(ValueError, match="row 1 needs 101, more than tokens_per_batch = 100"):
        epoch_order(np.array([5, 101]), np.array([1, 1]), np.array([0, 0]), **options)
    with pytest.raises(ValueError, match="slots_per_batch"):
        epoch_order(np.array([5]), np.array([200]), np.array([0]), **options)

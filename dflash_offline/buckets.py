"""Length buckets: which bucket a length falls in, their table, batches under a token budget, the order of an epoch.

``edges = [e0, e1, ...]``: bucket 0 holds lengths below ``e0``, bucket i lengths in ``[e_{i-1}, e_i)``. The last edge is
above the longest length allowed, so ``len(edges)`` is the number of buckets.

Two kinds of batches are made here and they cost different things:

- a *capture batch* is fixed by the plan (``plan.py``) and either packed, so that its cost is the sum of the lengths, or
  padded to its longest row, so that its cost is ``longest row x rows`` and rows of like length go together;
- a *micro-batch* of training is packed without padding, so its cost is the sum of the lengths, and it has a second
  budget, of block slots (anchors x block size). Its rows are drawn anew every epoch (``epoch_order``).
"""

from collections.abc import Sequence

import numpy as np

from dflash_offline.figures import count_text

# Open micro-batches a row may still be put into. One leaves half a row of the budget unused in each, eight about a tenth.
_OPEN_MICRO_BATCHES = 8


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """Bucket of a length in tokens.

    Raises:
        ValueError: the length is not below the last edge.
    """
    bucket = int(np.searchsorted(edges, length, side="right"))
    if bucket == len(edges):
        raise ValueError(f"length {length} is not below the last bucket edge {edges[-1]}")
    return bucket


def buckets_of(lengths: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Bucket of each length: int16 [n]. Every length must be below the last edge."""
    found = np.searchsorted(np.asarray(edges), lengths, side="right").astype(np.int16)
    assert not len(found) or found.max() < len(edges), f"a length of {int(np.max(lengths))} is not below the last bucket edge {edges[-1]}"
    return found


def bucket_range(bucket: int, edges: Sequence[int]) -> tuple[int, int]:
    """``[low, high)`` of a bucket."""
    return (0 if bucket == 0 else int(edges[bucket - 1])), int(edges[bucket])


def auto_edges(lengths: np.ndarray, *, num_buckets: int, max_length: int) -> list[int]:
    """Edges that waste the least padding when every row is padded to its bucket's longest allowed length.

    A dynamic programme over at most 512 candidate edges (quantiles of the lengths): ``best[b][j]`` is the least sum of
    ``edge - length`` over all rows up to candidate j with b buckets. Fewer edges come back when fewer lengths exist.

    Args:
        lengths: tokens of each row, [n].
        num_buckets: most buckets wanted.
        max_length: longest length allowed; the last edge is ``max_length + 1``.
    """
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) > 512:
        picked = np.unique(np.quantile(lengths, np.linspace(0, 1, 513)[1:], method="higher").astype(np.int64))
        group = np.searchsorted(picked, values)
        rows = np.bincount(group, weights=counts, minlength=len(picked))
        tokens = np.bincount(group, weights=counts * values, minlength=len(picked))
    else:
        picked, rows, tokens = values.astype(np.int64), counts.astype(np.float64), (counts * values).astype(np.float64)
    rows_to, tokens_to = np.concatenate([[0], np.cumsum(rows)]), np.concatenate([[0], np.cumsum(tokens)])
    n, num_buckets = len(picked), min(num_buckets, len(picked))
    # waste[i, j]: padding when candidates i..j make one bucket, padded to picked[j]
    waste = picked[None, :] * (rows_to[None, 1:] - rows_to[:-1, None]) - (tokens_to[None, 1:] - tokens_to[:-1, None])
    waste[np.tril_indices(n, -1)] = np.inf
    best, came_from = waste[0].copy(), np.zeros((num_buckets, n), dtype=np.int64)
    for b in range(1, num_buckets):
        through = best[:-1, None] + waste[1:, :]  # the last bucket starts at candidate i + 1
        came_from[b] = through.argmin(axis=0) + 1
        best = through.min(axis=0)
    edges, j = [max_length + 1], n - 1
    for b in range(num_buckets - 1, 0, -1):
        i = int(came_from[b, j])
        edges.append(int(picked[i - 1]) + 1)
        j = i - 1
    return sorted(set(edges))


def padded_batches(rows: np.ndarray, lengths: np.ndarray, *, tokens_per_batch: int) -> list[np.ndarray]:
    """Cut rows of one bucket into batches whose padded size, ``longest x rows``, is within the budget.

    Rows are taken longest first (ties in the order given), so each batch holds rows of nearly one length.

    Args:
        rows: row numbers, [n].
        lengths: tokens of these rows, [n].
        tokens_per_batch: budget; at least one row goes into every batch.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    rows, lengths = rows[order], lengths[order]
    batches, start = [], 0
    while start < len(rows):
        stop = start + max(1, tokens_per_batch // int(lengths[start]))
        batches.append(rows[start:stop])
        start = stop
    return batches


def packed_batches(rows: np.ndarray, lengths: np.ndarray, *, tokens_per_batch: int) -> list[np.ndarray]:
    """Batches whose rows' lengths add up to at most ``tokens_per_batch``: the longest row left, then whatever still fits, longest first.

    Args as ``padded_batches``; a row longer than the budget has a batch of its own.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes = lengths[order].astype(np.int64)
    negative = -sizes  # ascending, to search in
    following = list(range(len(rows) + 1))  # next row not taken, at or after a place; paths are shortened as they are walked

    def free(i: int) -> int:
        root = i
        while following[root] != root:
            root = following[root]
        while following[i] != root:
            following[i], i = root, following[i]
        return root

    batches = []
    while (first := free(0)) < len(rows):
        taken, left = [first], tokens_per_batch - int(sizes[first])
        following[first] = first + 1
        while left > 0 and (fits := free(int(np.searchsorted(negative, -left)))) < len(rows):
            taken.append(fits)
            left -= int(sizes[fits])
            following[fits] = fits + 1
        batches.append(rows[order[taken]])
    return batches


def bucket_table(lengths: np.ndarray, edges: Sequence[int], *, tokens_per_batch: int, packed: bool = False) -> list[str]:
    """One line a bucket: ``Bucket 1 [ 770,1216):   4438 batches (  7.4%)   31066 rows   29.9M tokens  padding  1.2%``.

    The share is of all batches; padding is the share of the batches' padded size that holds no token: none where they are packed.
    """
    lengths = np.asarray(lengths)
    buckets, numbers = buckets_of(lengths, edges), np.arange(len(lengths))
    make_batches = packed_batches if packed else padded_batches
    made = [make_batches(numbers[buckets == b], lengths[buckets == b], tokens_per_batch=tokens_per_batch) for b in range(len(edges))]
    total, width, lines = sum(map(len, made)), max(4, len(str(edges[-1]))), []
    for b, batches in enumerate(made):
        low, high = bucket_range(b, edges)
        tokens = int(lengths[buckets == b].sum())
        padded = tokens if packed else sum(int(lengths[batch[0]]) * len(batch) for batch in batches)
        share, waste = 100 * len(batches) / max(1, total), 100 * (1 - tokens / padded) if padded else 0.0
        rows = int((buckets == b).sum())
        batches_word, rows_word = "batch" if len(batches) == 1 else "batches", "row" if rows == 1 else "rows"
        lines.append(
            f"Bucket {b} [{low:>{width}},{high:>{width}}): {len(batches):>6} {batches_word:<7} ({share:>5.1f}%)"
            f" {rows:>8} {rows_word:<4} {count_text(tokens):>7} tokens  padding {waste:>4.1f}%"
        )
    return lines


def epoch_order(
    lengths: np.ndarray,
    slots: np.ndarray,
    buckets: np.ndarray,
    *,
    tokens_per_batch: int,
    slots_per_batch: int,
    micro_batches_per_step: int,
    seed: int,
    epoch: int,
) -> list[list[np.ndarray]]:
    """The bucketed shuffle of one epoch: steps in order, each a list of micro-batches of one bucket.

    Rows are shuffled inside their bucket, packed into micro-batches under both budgets, and the steps of all buckets
    are shuffled together. Everything follows from the arguments: ranks take the micro-batches of a step round-robin
    from this one order, so the same rows make up a step for any number of ranks. Every row comes once. The last step
    of a bucket may hold fewer than ``micro_batches_per_step``.

    Args:
        lengths: context tokens of each row, [n].
        slots: block slots (anchors x block size) of each row, [n].
        buckets: bucket of each row, [n].
        tokens_per_batch: most context tokens in a micro-batch (packed, so the sum of its lengths).
        slots_per_batch: most block slots in a micro-batch.
        micro_batches_per_step: micro-batches in one optimiser step, over all ranks.
        seed, epoch: what the order is drawn from.

    Returns:
        ``order[step][micro_batch]`` = row numbers, int64, ascending.

    Raises:
        ValueError: one row alone is over a budget.
    """
    lengths, slots, buckets = np.asarray(lengths), np.asarray(slots), np.asarray(buckets)
    for values, budget, name in ((lengths, tokens_per_batch, "tokens_per_batch"), (slots, slots_per_batch, "slots_per_batch")):
        if len(values) and values.max() > budget:
            raise ValueError(f"row {int(values.argmax())} needs {int(values.max())}, more than {name} = {budget}")
    steps: list[list[np.ndarray]] = []
    for bucket in np.unique(buckets):
        generator = _generator(seed, epoch, int(bucket) + 1)
        rows = generator.permutation(np.flatnonzero(buckets == bucket))
        packed = _pack(rows, lengths[rows], slots[rows], tokens_per_batch=tokens_per_batch, slots_per_batch=slots_per_batch)
        packed = [packed[i] for i in generator.permutation(len(packed))]  # leftovers of packing are not always the last
        steps.extend(packed[i : i + micro_batches_per_step] for i in range(0, len(packed), micro_batches_per_step))
    return [steps[i] for i in _generator(seed, epoch, 0).permutation(len(steps))]


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % (1 << 64), epoch, stream])))


def _pack(rows: np.ndarray, lengths: np.ndarray, slots: np.ndarray, *, tokens_per_batch: int, slots_per_batch: int) -> list[np.ndarray]:
    """First fit into a few open micro-batches; when none has room the fullest is closed."""
    closed: list[list[int]] = []
    open_batches: list[list] = []  # [tokens left, slots left, rows]
    for row, length, slot in zip(rows.tolist(), lengths.tolist(), slots.tolist(), strict=True):
        for batch in open_batches:
            if batch[0] >= length and batch[1] >= slot:
                break
        else:
            if len(open_batches) == _OPEN_MICRO_BATCHES:
                fullest = min(
                    range(len(open_batches)), key=lambda i: min(open_batches[i][0] / tokens_per_batch, open_batches[i][1] / slots_per_batch)
                )
                closed.append(open_batches.pop(fullest)[2])
            batch = [tokens_per_batch, slots_per_batch, []]
            open_batches.append(batch)
        batch[0] -= length
        batch[1] -= slot
        batch[2].append(row)
    return [np.sort(np.asarray(batch, dtype=np.int64)) for batch in closed + [batch[2] for batch in open_batches]]

"""Triton kernels for blocks that read intervals of the context: forward, query gradient, key/value gradient.

What they use that a general block-sparse kernel cannot:

- The rule is two numbers a row, so a tile is either whole (no mask at all) or an edge, and which is plain from the
  numbers of its rows: no mask function, no list of tiles.
- The query heads of one key/value head share the rule. A row is (slot, head in group), so one anchor of 16 slots and 4
  heads fills 64 rows, and a tile of 128 rows spans two neighbouring anchors: edges are as narrow as they can be, and
  the own-block part is one small extra product.
- Blocks are sorted, so the rows that read a tile of keys are one contiguous range, and so are those that read all of it.

Every result has one writer and a fixed order of summation: runs repeat to the last bit.

Layouts, all contiguous: query, out and their gradients [S, A, D]; context keys and values [C, G, D]; block keys and
values [S, G, D]; normaliser (log2 of the softmax sum) and delta (row sum of out * gradient) float32 [G, S * P], so that
a tile of rows lies in one piece.

Legend: S = N * B slots, C context rows, A query heads, G key/value heads, P = A / G heads of a group, D head width,
DP D padded to a power of two, row r = slot * P + head in group, M rows and K keys of a tile.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
WHOLE, EDGE, OWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # which rule a tile needs


@triton.jit
def _row_bounds(start, end, rows, B: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr):
    """First visible and one past the last visible context row of each row, and its block."""
    block = rows // (B * P)
    high = tl.load(end + block)
    low = tl.load(start + block)
    if WINDOW > 0:
        low = tl.minimum(tl.maximum(low, high + (rows // P) % B - (WINDOW - 1)), high)
    return low, high, block


@triton.jit
def _row_offsets(rows, head, A: tl.constexpr, P: tl.constexpr):
    """Where the rows of one key/value head lie in [S, A]."""
    return (rows // P) * A + head * P + rows % P


@triton.jit
def _load_rows(base, offsets, D: tl.constexpr, DP: tl.constexpr):
    """[len(offsets), DP] rows of width D at ``base + offsets * D``."""
    columns = tl.arange(0, DP)
    pointers = base + offsets[:, None] * D + columns[None, :]
    if D == DP:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@triton.jit
def _load_keys(base, keys, count, head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHECK: tl.constexpr):
    """[len(keys), DP] of one key/value head; keys past ``count`` are zero."""
    columns = tl.arange(0, DP)
    pointers = base + (keys[:, None] * G + head) * D + columns[None, :]
    if D != DP:
        return tl.load(pointers, mask=(keys[:, None] < count) & (columns[None, :] < D), other=0.0)
    if CHECK:
        return tl.load(pointers, mask=keys[:, None] < count, other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_tile(
    base, tile, count, head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr
):
    """[K, DP]: a tile of context keys or values, by the bulk copy engine where ``base`` is a tensor descriptor."""
    # no early return: what follows a return is compiled all the same, and a descriptor is no pointer
    if TMA:  # noqa: SIM108 - two ways of loading, a line each
        rows = base.load([tile * K, head * D])
    else:
        rows = _load_keys(base, tile * K + tl.arange(0, K), count, head, G, D, DP, CHECK)
    return rows


@triton.jit
def _own_block(rows, slots, B: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr):
    """Which slot each row sees of its own block. ``rows`` and ``slots`` broadcast."""
    seen = rows // (B * P) == slots // B
    if WINDOW > 0:
        behind = rows // P - slots
        seen = seen & (behind >= 0) & (behind < WINDOW)
    return seen


@triton.jit
def _softmax_step(query, key, value, seen, total, highest, out, scale, MASKED: tl.constexpr):
    """Take one tile of keys into the running softmax."""
    scores = tl.dot(query, tl.trans(key))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.math.exp2(scores * scale - higher[:, None])
    shrink = tl.math.exp2(highest - higher)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None])
    return total, higher, out


@triton.jit
def forward_kernel(
    query, context_key, context_value, block_key, block_value, out, normaliser, start, end, num_rows, num_context, scale,
    A: tl.constexpr, P: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, OWN_KEYS: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, G); the last row tiles, which read most, go first."""
    G: tl.constexpr = A // P
    head = tl.program_id(1)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    rows = first_row + tl.arange(0, M)
    safe = tl.minimum(rows, num_rows - 1)
    low, high, _ = _row_bounds(start, end, safe, B, P, WINDOW)
    offsets = _row_offsets(safe, head, A, P)
    q = _load_rows(query, offsets, D, DP)
    scale *= LOG2_E

    # the own block comes first: every row sees itself, so the running maximum is finite from here on
    own = first_row // (B * P) * B + tl.arange(0, OWN_KEYS)
    own_key = _load_keys(block_key, own, num_rows // P, head, G, D, DP, True)
    own_value = _load_keys(block_value, own, num_rows // P, head, G, D, DP, True)
    own_seen = _own_block(safe[:, None], own[None, :], B, P, WINDOW)
    total, highest = tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32)
    total, highest, acc = _softmax_step(q, own_key, own_value, own_seen, total, highest, tl.zeros([M, DP], tl.float32), scale, True)

    first, last = tl.min(low, 0) // K, tl.cdiv(tl.max(high, 0), K)  # tiles that any row reads
    whole, whole_end = tl.cdiv(tl.max(low, 0), K), tl.min(high, 0) // K  # tiles that every row reads whole
    whole = tl.minimum(whole, last)
    whole_end = tl.maximum(whole_end, whole)
    for index in range(first, last - (whole_end - whole)):
        tile = tl.where(index < whole, index, index + whole_end - whole)
        keys = tile * K + tl.arange(0, K)
        key = _load_tile(context_key, tile, num_context, head, G, D, DP, K, True, TMA)
        value = _load_tile(context_value, tile, num_context, head, G, D, DP, K, True, TMA)
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        total, highest, acc = _softmax_step(q, key, value, seen, total, highest, acc, scale, True)
    for tile in range(whole, whole_end):
        key = _load_tile(context_key, tile, num_context, head, G, D, DP, K, False, TMA)
        value = _load_tile(context_value, tile, num_context, head, G, D, DP, K, False, TMA)
        total, highest, acc = _softmax_step(q, key, value, own_seen, total, highest, acc, scale, False)

    columns = tl.arange(0, DP)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < D)
    tl.store(out + offsets[:, None] * D + columns[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(normaliser + head * num_rows + rows, highest + tl.math.log2(total), mask=rows < num_rows)


@triton.jit
def _query_step(query, gradient, key, value, seen, normaliser, delta, by_query, scale, MASKED: tl.constexpr):
    """Add what one tile of keys contributes to the query gradient."""
    weights = tl.math.exp2(tl.dot(query, tl.trans(key)) * scale - normaliser[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    by_score = weights * (tl.dot(gradient, tl.trans(value)) - delta[:, None])
    return tl.dot(by_score.to(key.dtype), key, by_query)


@triton.jit
def query_gradient_kernel(
    query, context_key, context_value, block_key, block_value, out, gradient, normaliser, delta, by_query, start, end,
    num_rows, num_context, scale,
    A: tl.constexpr, P: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, OWN_KEYS: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid and tiles of the forward kernel. Also writes ``delta``, which the key/value gradient needs."""
    G: tl.constexpr = A // P
    head = tl.program_id(1)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    rows = first_row + tl.arange(0, M)
    safe = tl.minimum(rows, num_rows - 1)
    low, high, _ = _row_bounds(start, end, safe, B, P, WINDOW)
    offsets = _row_offsets(safe, head, A, P)
    q, do = _load_rows(query, offsets, D, DP), _load_rows(gradient, offsets, D, DP)
    norm = tl.load(normaliser + head * num_rows + safe)
    row_delta = tl.sum(_load_rows(out, offsets, D, DP).to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + head * num_rows + rows, row_delta, mask=rows < num_rows)
    log_scale = scale * LOG2_E

    own = first_row // (B * P) * B + tl.arange(0, OWN_KEYS)
    own_key = _load_keys(block_key, own, num_rows // P, head, G, D, DP, True)
    own_value = _load_keys(block_value, own, num_rows // P, head, G, D, DP, True)
    own_seen = _own_block(safe[:, None], own[None, :], B, P, WINDOW)
    acc = _query_step(q, do, own_key, own_value, own_seen, norm, row_delta, tl.zeros([M, DP], tl.float32), log_scale, True)

    first, last = tl.min(low, 0) // K, tl.cdiv(tl.max(high, 0), K)
    whole, whole_end = tl.cdiv(tl.max(low, 0), K), tl.min(high, 0) // K
    whole = tl.minimum(whole, last)
    whole_end = tl.maximum(whole_end, whole)
    for index in range(first, last - (whole_end - whole)):
        tile = tl.where(index < whole, index, index + whole_end - whole)
        keys = tile * K + tl.arange(0, K)
        key = _load_tile(context_key, tile, num_context, head, G, D, DP, K, True, TMA)
        value = _load_tile(context_value, tile, num_context, head, G, D, DP, K, True, TMA)
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        acc = _query_step(q, do, key, value, seen, norm, row_delta, acc, log_scale, True)
    for tile in range(whole, whole_end):
        key = _load_tile(context_key, tile, num_context, head, G, D, DP, K, False, TMA)
        value = _load_tile(context_value, tile, num_context, head, G, D, DP, K, False, TMA)
        acc = _query_step(q, do, key, value, own_seen, norm, row_delta, acc, log_scale, False)

    columns = tl.arange(0, DP)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < D)
    tl.store(by_query + offsets[:, None] * D + columns[None, :], (acc * scale).to(by_query.dtype.element_ty), mask=inside)


@triton.jit
def _key_step(
    by_key, by_value, key, value, keys, query, gradient, normaliser, delta, start, end, first_row, stop_row, num_rows, head, scale,
    A: tl.constexpr, P: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """Add what one tile of rows, ending before ``stop_row``, contributes to the gradients of a tile of keys."""
    rows = first_row + tl.arange(0, M)
    safe = rows if RULE == WHOLE else tl.minimum(rows, num_rows - 1)
    offsets = _row_offsets(safe, head, A, P)
    q, do = _load_rows(query, offsets, D, DP), _load_rows(gradient, offsets, D, DP)
    norm, row_delta = tl.load(normaliser + head * num_rows + safe), tl.load(delta + head * num_rows + safe)
    weights = tl.math.exp2(tl.dot(key, tl.trans(q)) * scale - norm[None, :])  # [K, M]
    if RULE == EDGE:
        low, high, _ = _row_bounds(start, end, safe, B, P, WINDOW)
        low, high = tl.where(rows < stop_row, low, 0), tl.where(rows < stop_row, high, 0)
        weights = tl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), weights, 0.0)
    if RULE == OWN:
        seen = _own_block(rows[None, :], keys[:, None], B, P, WINDOW) & (rows[None, :] < stop_row)
        weights = tl.where(seen, weights, 0.0)
    by_value = tl.dot(weights.to(do.dtype), do, by_value)
    by_score = weights * (tl.dot(value, tl.trans(do)) - row_delta[None, :])
    return tl.dot(by_score.to(q.dtype), q, by_key), by_value


@triton.jit
def _store_keys(base, values, keys, count, head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    columns = tl.arange(0, DP)
    inside = (keys[:, None] < count) & (columns[None, :] < D)
    tl.store(base + (keys[:, None] * G + head) * D + columns[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def context_gradient_kernel(
    query, key, value, gradient, normaliser, delta, by_key, by_value, start, end, ranges, num_rows, num_context, scale,
    A: tl.constexpr, P: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Gradient of context keys and values. Grid (G * SPLITS, key tiles); each split takes its share of the rows.

    The first key tiles are read by most blocks, so all their programs start first: by head, the long programs of the last
    head would start late and run alone at the end (a quarter of the kernel's time at 24 tiles and 132 processors).
    ``ranges`` int32 [key tiles, 4]: the blocks that read any of the tile, [0] to [1], and all of it, [2] to [3].
    by_* [SPLITS, C, G, D].
    """
    G: tl.constexpr = A // P
    tile, head, split = tl.program_id(1), tl.program_id(0) % G, tl.program_id(0) // G
    keys = tile * K + tl.arange(0, K)
    k = _load_keys(key, keys, num_context, head, G, D, DP, True)
    v = _load_keys(value, keys, num_context, head, G, D, DP, True)
    first_row, last_row = tl.load(ranges + tile * 4) * (B * P), tl.load(ranges + tile * 4 + 1) * (B * P)
    whole_row, whole_end_row = tl.load(ranges + tile * 4 + 2) * (B * P), tl.load(ranges + tile * 4 + 3) * (B * P)
    steps = tl.cdiv(tl.maximum(last_row - first_row, 0), M)
    share = tl.cdiv(steps, SPLITS)
    begin, stop = split * share, tl.minimum(split * share + share, steps)
    # steps [whole, whole_end) see the tile whole; clipped to this split
    whole = tl.minimum(tl.maximum(tl.cdiv(whole_row - first_row, M), begin), stop)
    whole_end = tl.minimum(tl.maximum((whole_end_row - first_row) // M, whole), stop)
    log_scale = scale * LOG2_E
    dk, dv = tl.zeros([K, DP], tl.float32), tl.zeros([K, DP], tl.float32)
    for index in range(begin, stop - (whole_end - whole)):
        step = tl.where(index < whole, index, index + whole_end - whole)
        dk, dv = _key_step(
            dk, dv, k, v, keys, query, gradient, normaliser, delta, start, end, first_row + step * M, last_row, num_rows, head, log_scale,
            A, P, B, D, DP, M, WINDOW, EDGE,
        )  # fmt: skip
    for step in range(whole, whole_end):
        dk, dv = _key_step(
            dk, dv, k, v, keys, query, gradient, normaliser, delta, start, end, first_row + step * M, last_row, num_rows, head, log_scale,
            A, P, B, D, DP, M, WINDOW, WHOLE,
        )  # fmt: skip
    place = split.to(tl.int64) * num_context * (G * D)
    _store_keys(by_key + place, dk * scale, keys, num_context, head, G, D, DP)
    _store_keys(by_value + place, dv, keys, num_context, head, G, D, DP)


@triton.jit
def block_gradient_kernel(
    query, key, value, gradient, normaliser, delta, by_key, by_value, num_rows, scale,
    A: tl.constexpr, P: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradient of the slots' own keys and values. Grid (groups of BLOCKS blocks, G); K >= BLOCKS * B."""
    G: tl.constexpr = A // P
    head, first_block = tl.program_id(1), tl.program_id(0) * BLOCKS
    num_slots = num_rows // P
    keys = first_block * B + tl.arange(0, K)
    last_slot = tl.minimum((first_block + BLOCKS) * B, num_slots)
    k = _load_keys(key, keys, last_slot, head, G, D, DP, True)
    v = _load_keys(value, keys, last_slot, head, G, D, DP, True)
    log_scale = scale * LOG2_E
    dk, dv = tl.zeros([K, DP], tl.float32), tl.zeros([K, DP], tl.float32)
    for row in range(first_block * (B * P), last_slot * P, M):
        dk, dv = _key_step(
            dk, dv, k, v, keys, query, gradient, normaliser, delta, query, query, row, last_slot * P, num_rows, head, log_scale,
            A, P, B, D, DP, M, WINDOW, OWN,
        )  # fmt: skip
    _store_keys(by_key, dk * scale, keys, last_slot, head, G, D, DP)
    _store_keys(by_value, dv, keys, last_slot, head, G, D, DP)

"""The next token of each row out of its logits: the most likely one, or drawn.

The number that a draw uses is worked out from the row's own key and position, so an answer does not depend on which
rows are computed beside it, nor on whether the run was interrupted.

Shapes: R rows, V vocabulary.
"""

import torch

_THRESHOLD_STEPS = 26  # halvings of the interval that the smallest kept probability lies in


def next_tokens(logits: torch.Tensor, *, temperature: float, top_p: float, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Choose a token for each row.

    Args:
        logits: [R, V].
        temperature: 0 is greedy.
        top_p: a token is drawn from the smallest set of most likely tokens with at least this share of the probability.
        keys: int64 [R], see ``uniforms``.
        positions: int64 [R], where the token will stand.

    Returns:
        int64 [R].
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        probabilities = _nucleus(probabilities, top_p)
    cumulated = probabilities.cumsum(-1)
    wanted = uniforms(keys, positions)[:, None] * cumulated[:, -1:]
    # the first token whose cumulated probability exceeds the number: never one of probability zero
    found = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return found.clamp_max(logits.shape[-1] - 1)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set to zero what is not among the most likely tokens that together have ``top_p``.

    Bisects for the largest threshold that keeps enough, which costs a fraction of sorting [R, V].
    """
    low = torch.zeros_like(probabilities[:, :1])
    high = probabilities.amax(-1, keepdim=True)
    for _ in range(_THRESHOLD_STEPS):
        middle = (low + high) / 2
        enough = (probabilities * (probabilities >= middle)).sum(-1, keepdim=True) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return probabilities * (probabilities >= low)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float32, from int64 keys and positions: splitmix64 of their sum of multiples."""
    mixed = keys + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    mixed = mixed ^ _shifted(mixed, 31)
    return (_shifted(mixed, 40)).float() * 2.0**-24


def _shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (values >> count) & ((1 << (64 - count)) - 1)

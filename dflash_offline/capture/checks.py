"""Checks made once at the start, before anything is written: right layer, right token, no leak from padding.

Tensor legend: B rows, T tokens, K taps, H hidden.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

from dflash_offline.errors import TargetError
from dflash_offline.target import Target
from dflash_offline.target.packed import NotPackableError

CHECKED_TOKENS = 256
# Relative L2 distance, median over tokens. In bf16 other shapes mean other kernels: 1-2 % apart, layers 10 % and more.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_TOLERANCE_BF16 = 0.08
_stance = threading.Lock()


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Median over tokens of ``|got - want| / |want|``; both ``[T, H]``."""
    got, want = got.float(), want.float()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-20)).median())


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules as they were written. One thread at a time: the setting is the process's, and put back by each."""
    with _stance, torch.compiler.set_stance("force_eager"):
        yield


def check_taps(target: Target, input_ids: torch.Tensor, taps: list[torch.Tensor]) -> float:
    """Compare one row's taps, taken in the first batch, with a plain forward of that row alone.

    Args:
        input_ids: ``[T]``, the row's tokens (the first ``CHECKED_TOKENS`` are used).
        taps: K tensors ``[T, H]``, in the order of ``target.layer_ids``.

    Returns:
        The largest distance found (see ``_distance``).

    Raises:
        TargetError: a tap is nearer to another layer's ``hidden_states`` entry, or near to none.
    """
    tokens = min(len(input_ids), CHECKED_TOKENS)
    with eager():
        plain = target.plain_hidden_states(input_ids[None, :tokens])
    tolerance, worst = _TOLERANCE.get(target.dtype, _TOLERANCE_BF16), 0.0
    for layer_id, tap in zip(target.layer_ids, taps, strict=True):
        if layer_id + 1 >= len(plain):
            raise TargetError(f"the plain forward gives {len(plain)} hidden states, so layer {layer_id} cannot be checked against it")
        distances = [_distance(tap[:tokens], states[0]) for states in plain]
        found, nearest = distances[layer_id + 1], min(range(len(distances)), key=distances.__getitem__)
        if not found <= tolerance or (nearest != layer_id + 1 and distances[nearest] < found / 2):
            raise TargetError(
                f"self-check: the tap of layer {layer_id} is {found:.3g} away from hidden_states[{layer_id + 1}] of a plain forward and "
                f" nearest to hidden_states[{nearest}] ({distances[nearest]:.3g}; allowed {tolerance:g}); nothing was written. Another "
                '[target] attention, dtype = "float32" or compile = false may tell what is wrong'
            )
        worst = max(worst, found)
    return worst


def check_padding(target: Target, vocab_size: int) -> bool:
    """Whether what pads a row leaves the row's hidden states alone. Asked of targets that carry a state over tokens.

    The same row is padded with two different tokens, in a batch of two: any path from padding to row shows, in any dtype.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (2, 96), generator=generator)
    other = ids.clone()
    other[0, 37:] = (ids[0, 37:] + 1) % vocab_size
    first, second = target.taps(ids), target.taps(other)
    tolerance = _TOLERANCE.get(target.dtype, _TOLERANCE_BF16)
    return all(_distance(a[0, :37], b[0, :37]) <= tolerance for a, b in zip(first, second, strict=True))


def check_packing(target: Target, vocab_size: int) -> str | None:
    """Why rows of this target cannot be packed; None if packed rows come out as they do alone."""
    try:
        distance = target.check_packing(vocab_size)
    except NotPackableError as error:
        return str(error)
    if distance <= _TOLERANCE.get(target.dtype, _TOLERANCE_BF16):
        return None
    return f"packed rows come out {distance:.2g} away from the same rows alone"

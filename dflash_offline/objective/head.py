"""The target's frozen head.

Legend: V vocabulary rows, H hidden size, R rows (slots) of a chunk.
"""

import torch
from torch import Tensor

from dflash_offline.config.train import why_not
from dflash_offline.errors import TrainError

FP8_LARGEST = 448.0  # largest float8_e4m3fn


class FrozenHead:
    """``weight`` [V, H], and with ``precision = "fp8"`` two row-wise scaled copies of it, one for each product."""

    def __init__(self, weight: Tensor, *, precision: str = "bf16") -> None:
        """
        Raises:
            TrainError: fp8 on a device, or for sizes, that it does not work with.
        """
        assert not weight.requires_grad, "the head is the target's and is never trained"
        self.weight, self.precision = weight, precision
        if precision == "fp8":
            capability = torch.cuda.get_device_capability(weight.device) if weight.device.type == "cuda" else None
            if reason := why_not("head_precision", precision, capability):
                raise TrainError(f"[train] {reason}")
            if any(size % 16 for size in weight.shape):
                raise TrainError(
                    f'[train] head_precision = "fp8" needs sizes that are multiples of 16, not {tuple(weight.shape)}; use "bf16"'
                )
            self.rows, self.row_scale = quantise_rows(weight)  # [V, H], [V, 1]
            self.columns, self.column_scale = quantise_rows(weight.t().contiguous())  # [H, V], [H, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] in hidden's precision."""
        if self.precision != "fp8":
            return hidden @ self.weight.t()
        quantised, scale = quantise_rows(hidden)
        return torch._scaled_mm(
            quantised, self.rows.t(), scale_a=scale, scale_b=self.row_scale.t().contiguous(), out_dtype=hidden.dtype, use_fast_accum=True
        )

    def input_gradient(self, gradient: Tensor, scale: Tensor | None, out: Tensor) -> None:
        """out [R, H] = gradient [R, V] @ weight; with fp8, gradient is quantised and ``scale`` [R, 1] undoes it."""
        if scale is None:
            torch.mm(gradient, self.weight, out=out)
        else:
            out.copy_(
                torch._scaled_mm(
                    gradient,
                    self.columns.t(),
                    scale_a=scale,
                    scale_b=self.column_scale.t().contiguous(),
                    out_dtype=out.dtype,
                    use_fast_accum=True,
                )
            )


def quantise_rows(states: Tensor) -> tuple[Tensor, Tensor]:
    """[R, X] -> float8_e4m3fn [R, X] and float32 [R, 1] with states = quantised * scale."""
    scale = states.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / FP8_LARGEST
    return (states.float() / scale).to(torch.float8_e4m3fn), scale

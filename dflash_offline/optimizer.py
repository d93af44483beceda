"""Master weights, their gradients and AdamW, all in one fixed flat layout.

What is unusual here:

- The drafter's parameters are views of one flat buffer in the compute dtype (bf16 on a GPU). Next to it lie a float32
  buffer of master weights and one of gradients, in the same order: the module's own order of parameters. Whatever
  the number of ranks, a gradient always has the same place and is always added and reduced in the same order, so a
  run can be resumed to the last bit. (DDP builds its buckets anew after its first step, and sums change with them.)
- A parameter's gradient is added to the float32 buffer and freed as soon as the backward pass has made it.
- With ``fsdp`` each rank keeps masters, moments and average of one equal share of the flat layout (``Shard``), updates
  it, and all copies are gathered anew from the shares. Gradients are summed whole, in the same buckets as without, so
  both ways train alike.
- Normalising by the sum of weights, clipping and skipping a non-finite step happen on the device: the optimiser never
  waits for a number to come to the host.

Gradients here are sums over a step (not means): ``update`` divides by the step's sum of weights.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

ADAM_EPS = 1e-8
MIN_LR_RATIO = 0.1  # the learning rate ends at this share of its peak
WSD_DECAY = 0.2  # share of the steps in which wsd falls linearly


def _alone(whole: torch.Tensor, own: torch.Tensor) -> None:
    raise AssertionError("the only share is the whole")


@dataclass(frozen=True)
class Shard:
    """Which share of masters, moments and average is kept here: number ``index`` of ``count`` equal ones.

    Attributes:
        gather: ``gather(whole, own)`` fills ``whole`` from the shares of all ranks; all of them call it together.
    """

    index: int = 0
    count: int = 1
    gather: Callable[[torch.Tensor, torch.Tensor], None] = _alone


class Weights:
    """Master weights, gradients and compute copies of a module.

    Args:
        module: its parameters' values become the masters; its parameters become views of the compute buffer.
        device: where everything lives.
        dtype: of the compute copies.
        ema: decay of an average of the masters, None for none.
        shard: the share of masters (and average) that is kept here.

    Attributes:
        master, ema: float32, the share ``[start, start + len(master))`` of the flat layout; all of it without shards. The
            last share may be filled up with zeros.
        gradient, compute: the whole flat layout, with the same filling at its end.
    """

    def __init__(
        self, module: nn.Module, *, device: torch.device, dtype: torch.dtype, ema: float | None = None, shard: Shard | None = None
    ) -> None:
        named = list(module.named_parameters())
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        sizes = [parameter.numel() for _, parameter in named]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.parameters = [parameter for _, parameter in named]
        self.device, self.shard = device, shard or Shard()
        share = -(-self.numel // self.shard.count)
        self.start = self.shard.index * share
        self.master = torch.zeros(share, dtype=torch.float32, device=device)
        self.gradient = torch.zeros(share * self.shard.count, dtype=torch.float32, device=device)
        self.compute = torch.zeros(share * self.shard.count, dtype=dtype, device=device)
        for index, first, last in self.own_pieces():
            inside = slice(first - self.offsets[index], last - self.offsets[index])
            self.own(self.master, first, last).copy_(self.parameters[index].detach().flatten()[inside])
        for compute, parameter in zip(self.views(self.compute), self.parameters, strict=True):
            compute.copy_(parameter.detach())
            parameter.data = compute
        self.ema_decay = ema
        self.ema = self.master.clone() if ema is not None else None
        self.on_gradient: Callable[[int], None] | None = None  # called with a parameter's index once its gradient is added
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views(self.gradient), strict=True)):
            parameter.register_post_accumulate_grad_hook(self._collector(index, view))

    @property
    def numel(self) -> int:
        """Number of trained values."""
        return self.offsets[-1]

    def own_pieces(self) -> Iterator[tuple[int, int, int]]:
        """``(index, first, last)``: the part ``[first, last)`` of the flat layout of each parameter that is in this share."""
        for index in range(len(self.names)):
            first, last = max(self.offsets[index], self.start), min(self.offsets[index + 1], self.start + len(self.master))
            if first < last:
                yield index, first, last

    def own(self, share: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """``[first, last)`` of the flat layout in a tensor that holds this share."""
        return share[first - self.start : last - self.start]

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each parameter's part of a whole flat buffer, in its own shape."""
        for i, shape in enumerate(self.shapes):
            yield flat[self.offsets[i] : self.offsets[i + 1]].view(shape)

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> its part of a flat buffer."""
        return dict(zip(self.names, self.views(flat), strict=True))

    def _collector(self, index: int, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            view.add_(parameter.grad)
            parameter.grad = None
            if self.on_gradient is not None:
                self.on_gradient(index)

        return collect

    def refresh(self, *, averaged: bool = False) -> None:
        """Make the compute copies anew, from the masters or from their average (``averaged``, when there is one)."""
        source = self.ema if averaged and self.ema is not None else self.master
        mine = self.compute[self.start : self.start + len(source)]
        mine.copy_(source)
        if self.shard.count > 1:
            self.shard.gather(self.compute, mine)

    def whole(self, share: torch.Tensor) -> torch.Tensor:
        """A flat tensor kept in shares, put together: [numel] float32. All ranks call it together.

        With shards it lies in the gradient's buffer: between steps only, and ``gradient.zero_()`` has to follow.
        """
        if self.shard.count > 1:
            self.shard.gather(self.gradient, share)
            share = self.gradient
        return share[: self.numel]

    def average(self, step: int) -> None:
        """Move the average towards the masters after optimiser step ``step`` (from 1).

        The decay is ``min(ema, (1 + step) / (10 + step))``: with the full decay from the start, the initial random
        weights would stay in the average for 1 / (1 - ema) steps.
        """
        if self.ema is not None and self.ema_decay is not None:
            self.ema.lerp_(self.master, 1.0 - min(self.ema_decay, (1 + step) / (10 + step)))

    @property
    def final(self) -> torch.Tensor:
        """Weights to evaluate and export: the average when there is one; this share of them (see ``whole``)."""
        return self.master if self.ema is None else self.ema


@dataclass
class _Group:
    """Flat pieces of parameters with one weight decay; item i of each list belongs to the same parameter."""

    weight_decay: float
    masters: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    first_moments: list[torch.Tensor] = field(default_factory=list)
    second_moments: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)


class AdamW:
    """Decoupled AdamW on the masters of a ``Weights``, fused, with weight decay on matrices only.

    Moments are kept flat, in the layout of the masters.
    """

    def __init__(self, weights: Weights, *, betas: tuple[float, float], weight_decay: float) -> None:
        self.weights = weights
        self.first_moment = torch.zeros_like(weights.master)
        self.second_moment = torch.zeros_like(weights.master)
        self.betas = betas
        self._groups = [_Group(weight_decay=weight_decay), _Group(weight_decay=0.0)]
        for index, first, last in weights.own_pieces():
            group = self._groups[0 if len(weights.shapes[index]) >= 2 else 1]
            group.masters.append(weights.own(weights.master, first, last))
            group.gradients.append(weights.gradient[first:last])
            group.first_moments.append(weights.own(self.first_moment, first, last))
            group.second_moments.append(weights.own(self.second_moment, first, last))
            group.steps.append(torch.zeros((), dtype=torch.float32, device=weights.device))

    def update(self, *, lr: float, clip: float, weight_sum: torch.Tensor, loss_sum: torch.Tensor) -> torch.Tensor:
        """One optimiser step from the summed gradients, which are cleared.

        The step is skipped, masters and moments left as they were, when the weights sum to zero (no anchor anywhere)
        or when the loss or a gradient is not finite.

        Args:
            lr: learning rate of this step.
            clip: largest norm of the normalised gradient.
            weight_sum, loss_sum: scalars on the device, over all ranks and micro-batches.

        Returns:
            The norm of the normalised gradient before clipping, a float32 scalar on the device; NaN or infinite when
            the step was skipped for that reason.
        """
        weight = weight_sum.to(torch.float32)
        empty = weight <= 0
        norm = self.weights.gradient.norm() / torch.where(empty, 1.0, weight)
        norm = norm + 0.0 * loss_sum.to(torch.float32)  # a loss that is not finite makes the norm so
        # the fused kernel divides gradients by grad_scale and leaves everything as it is where found_inf is 1
        grad_scale = weight / (clip / (norm + 1e-6)).clamp(max=1.0)
        found_inf = (empty | ~torch.isfinite(norm)).to(torch.float32)
        for group in self._groups:
            # the function, not torch.optim.AdamW: making one of those imports PyTorch's compiler, 0.8 s, which a CPU does without
            adamw(
                group.masters,
                group.gradients,
                group.first_moments,
                group.second_moments,
                [],
                group.steps,
                fused=True,
                grad_scale=grad_scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=ADAM_EPS,
                maximize=False,
            )
        self.weights.gradient.zero_()
        return norm

    @property
    def steps_taken(self) -> torch.Tensor:
        """Updates that were not skipped, a scalar on the device (Adam's bias correction counts these)."""
        return self._steps[0]

    def set_steps_taken(self, steps: int) -> None:
        """Restore the count that ``steps_taken`` gave."""
        for step in self._steps:
            step.fill_(steps)

    @property
    def _steps(self) -> list[torch.Tensor]:
        return [step for group in self._groups for step in group.steps]


def state_tensors(weights: Weights, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint has to hold, as flat tensors (no copies); with shards this rank's share of them."""
    tensors = {"master": weights.master, "first_moment": optimizer.first_moment, "second_moment": optimizer.second_moment}
    return tensors if weights.ema is None else {**tensors, "ema": weights.ema}


def lr_at(step: int, *, total: int, peak: float, warmup_ratio: float, schedule: str) -> float:
    """Learning rate of step ``step`` (0 .. total-1): linear warm-up, then ``cosine`` or ``wsd`` down to 10 % of the peak."""
    warmup = round(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "cosine":
        along = (step - warmup) / max(1, total - 1 - warmup)
        return peak * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * 0.5 * (1 + math.cos(math.pi * min(1.0, along))))
    assert schedule == "wsd", schedule
    decay = max(1, round(WSD_DECAY * total))
    along = max(0.0, (step - (total - decay) + 1) / decay)
    return peak * (1 - (1 - MIN_LR_RATIO) * along)


def noise_at(step: int, *, total: int, peak: float, schedule: str) -> float:
    """Noise on context features at a step, in units of their RMS: ``constant``, or ``linear`` / ``cosine`` down to zero."""
    along = step / max(1, total - 1)
    share: dict[str, Any] = {"constant": 1.0, "linear": 1.0 - along, "cosine": 0.5 * (1 + math.cos(math.pi * along))}
    return float(peak * share[schedule])

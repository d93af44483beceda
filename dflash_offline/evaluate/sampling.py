"""Which drafted tokens the target accepts: greedily, or by the exact rejection rule.

Rejection rule (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): a token x drawn from the
drafter's q is accepted with probability min(1, p(x) / q(x)); at the first refusal the token is drawn from
max(p - q, 0), normalised; when all are accepted, one more is drawn from the target's last p. Every emitted token then
has exactly the target's distribution, whatever the drafter is.

Shapes: B block size, V vocabulary.
"""

import torch


def accept_greedy(drafted: torch.Tensor, logits: torch.Tensor) -> tuple[int, int]:
    """Accept the longest prefix that is the target's own choice.

    Args:
        drafted: [B-1] drafted tokens.
        logits: [B, V] of the target on the block; row i is about the token after slot i.

    Returns:
        Number of accepted tokens and the target's own token after them.
    """
    own = logits.argmax(-1)
    accepted = int((drafted == own[:-1]).long().cumprod(0).sum())
    return accepted, int(own[accepted])


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Softmax at a temperature, float32."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One token from each row of [..., V]."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).reshape(probabilities.shape[:-1])


def accept_sampled(
    drafted: torch.Tensor, drafter: torch.Tensor, target: torch.Tensor, generator: torch.Generator | None
) -> tuple[int, int]:
    """Accept by the rejection rule.

    Args:
        drafted: [B-1] tokens, each drawn from its row of ``drafter``.
        drafter: [B-1, V] probabilities q.
        target: [B, V] probabilities p; row i is about the token after slot i.

    Returns:
        Number of accepted tokens and the token emitted after them.
    """
    slots = torch.arange(len(drafted), device=drafted.device)
    q, p = drafter[slots, drafted], target[slots, drafted]
    coins = torch.rand(len(drafted), generator=generator, device=drafted.device)
    accepted = int((coins * q < p).long().cumprod(0).sum())
    rest = target[accepted]
    if accepted < len(drafted):
        rest = (rest - drafter[accepted]).clamp_min(0)
        if not rest.any():  # p equals q up to rounding, and the coin fell on the last bit
            rest = target[accepted]
    return accepted, int(draw(rest, generator))

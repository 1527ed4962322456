"""Boosting of many clients at once: how good a model is on weighted samples, and what is weighed more in the next."""

import torch
from torch import Tensor

EPSILON = (
    0.01,
    0.49,
)  # a model without a mistake does not rule alone, and one that is no better than chance still counts


def relative(losses: Tensor, real: Tensor) -> Tensor:
    """Each sample's loss as a share of the largest on that client's data, [clients, samples]; padding is 0."""
    losses = losses.where(real, 0.0)
    return losses / losses.amax(1, keepdim=True).clamp(min=torch.finfo(losses.dtype).tiny)


def coefficient(losses: Tensor, weights: Tensor, real: Tensor) -> Tensor:
    """beta of each client, [clients]: half the log-odds of epsilon, the weighted mean of the relative losses."""
    weights = weights.where(real, 0.0)
    epsilon = (weights * relative(losses, real)).sum(1) / weights.sum(1).clamp(min=torch.finfo(weights.dtype).tiny)
    # A model that has diverged is no better than chance.
    return 0.5 * torch.logit(epsilon.nan_to_num(1.0).clamp(*EPSILON)).neg()


def reweighted(weights: Tensor, losses: Tensor, beta: Tensor, real: Tensor, cap: float | None = None) -> Tensor:
    """The samples' weights for the next model: more where the loss is larger; those of a client sum to its samples.

    No weight is above ``cap`` times the mean: what is cut off goes to the others, in proportion.
    """
    grown = weights * (beta[:, None] * relative(losses, real)).exp()
    count = real.sum(1, keepdim=True).to(grown)
    free, capped = real.clone(), torch.zeros_like(real)
    while True:
        rest = count - (cap or 0.0) * capped.sum(1, keepdim=True).to(grown)
        scale = rest / grown.where(free, 0.0).sum(1, keepdim=True).clamp(min=torch.finfo(grown.dtype).tiny)
        over = free & (grown * scale > cap) if cap else torch.zeros_like(free)
        if not over.any():
            return torch.where(capped, cap or 0.0, grown * scale).where(real, 0.0)
        free, capped = free & ~over, capped | over

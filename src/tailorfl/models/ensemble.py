"""Several networks as one: their outputs added up by weight."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Combination = Literal["probabilities", "logits"]


def combine(outputs: Sequence[Tensor], weights: Tensor, combination: Combination) -> Tensor:
    """The weighted mean of outputs, each [..., samples, classes], by weights [..., members].

    Probabilities: the mean of the class probabilities, as logarithms. Logits: the mean of the outputs as they are;
    a regression takes it too.
    """
    share = (weights / weights.sum(-1, keepdim=True)).movedim(-1, 0)[..., None, None]
    stack = torch.stack(list(outputs))
    if combination == "logits":
        return (share * stack).sum(0)
    return torch.logsumexp(stack.log_softmax(-1) + share.log(), 0)


class Ensemble(nn.Module):
    """Networks with a weight each, as one that stands alone."""

    weights: Tensor

    def __init__(self, members: Sequence[nn.Module], weights: Tensor, combination: Combination) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("weights", weights)
        self.combination = combination

    def forward(self, inputs: Tensor) -> Tensor:
        return combine([member(inputs) for member in self.members], self.weights, self.combination)

"""Averages of what clients send, as running sums: no list of updates is ever held."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from tailorfl.exchange.messages import Answers
from tailorfl.models.network import Values
from tailorfl.models.slicing import leading

Weighing = Literal["samples", "uniform"]

WEIGHTS: dict[str, Callable[[Answers], Tensor]] = {
    "samples": lambda answers: answers.samples,
    "uniform": lambda answers: torch.ones_like(answers.samples),
}


def average(answers: Iterable[Answers], values: Values, weighing: Weighing = "samples") -> Values:
    """The weighted average of the clients' tensors, element by element over those that hold the element.

    A client may hold a leading slice of a tensor (fewer channels), or miss a tensor altogether. Elements that nobody
    holds, and everything when nobody answers, keep the given values.
    """
    sums: Values = {}
    totals: Values = {}
    for answer in answers:
        weights = WEIGHTS[weighing](answer)
        for name, stack in answer.tensors.items():
            if name not in values:
                raise ValueError(f"clients sent {name!r}, which the server does not hold: it cannot be averaged")
            weight = weights.to(stack)
            total = sums.setdefault(name, torch.zeros_like(values[name]))
            held = totals.setdefault(name, torch.zeros_like(values[name]))
            leading(total, stack.shape[1:]).add_(torch.tensordot(weight, stack, dims=1))
            leading(held, stack.shape[1:]).add_(weight.sum())
    return {name: torch.where(totals[name] > 0, sums[name] / totals[name], values[name]) for name in sums}

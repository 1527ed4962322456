"""SGD and Adam over stacks of parameters: one set of formulas for one client, many clients and CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rate = float | Tensor


@dataclass(frozen=True)
class Optimizer:
    """A local optimizer. Its state lives as long as one call of ``fit``: it starts anew whenever a client does."""

    kind: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: Literal["all", "weights"] = "all"  # weights: matrices and kernels only, no biases and no norm parameters
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def start(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Fresh state: a list of tensors for each slot (momentum; or Adam's two moments)."""
        slots = 2 if self.kind == "adam" else int(self.momentum > 0)
        return [[torch.zeros_like(p) for p in parameters] for _ in range(slots)]

    @torch.no_grad()
    def step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Sequence[Sequence[Tensor]],
        rates: Sequence[Rate],
        count: Tensor,
        active: Tensor | None = None,
        stacked: bool = True,
    ) -> None:
        """One step in place. ``active`` [clients] is 0 for clients that have finished; ``count`` is 1 at the first."""
        for k, (parameter, gradient, rate) in enumerate(zip(parameters, gradients, rates, strict=True)):
            gradient = self._decayed(parameter, gradient, stacked)
            slots = [slot[k] for slot in state]
            direction = self._adam(gradient, slots, count) if self.kind == "adam" else self._sgd(gradient, slots)
            _move(parameter, direction, rate, active)

    def _decayed(self, parameter: Tensor, gradient: Tensor, stacked: bool) -> Tensor:
        matrix = parameter.dim() - int(stacked) >= 2
        if self.weight_decay and (self.decay == "all" or matrix):
            return gradient.add(parameter, alpha=self.weight_decay)
        return gradient

    def _sgd(self, gradient: Tensor, slots: Sequence[Tensor]) -> Tensor:
        return slots[0].mul_(self.momentum).add_(gradient) if slots else gradient

    def _adam(self, gradient: Tensor, slots: Sequence[Tensor], count: Tensor) -> Tensor:
        first, second = slots
        first.lerp_(gradient, 1 - self.betas[0])
        second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        corrections = [(1 - beta**count).to(gradient.dtype) for beta in self.betas]
        return (first / corrections[0]) / ((second / corrections[1]).sqrt() + self.epsilon)


def _move(parameter: Tensor, direction: Tensor, rate: Rate, active: Tensor | None) -> None:
    if active is None:
        parameter.sub_(direction * rate if isinstance(rate, Tensor) else direction, alpha=_alpha(rate))
        return
    scale = (active * rate).reshape(-1, *[1] * (parameter.dim() - 1))
    parameter.addcmul_(direction, scale, value=-1)


def _alpha(rate: Rate) -> float:
    return 1.0 if isinstance(rate, Tensor) else rate

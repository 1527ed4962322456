"""SGD and Adam over stacks of parameters: one set of formulas for one client, many clients and CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.sgd import sgd


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

    @property
    def adds(self) -> bool:
        """Whether a step begins by adding the gradient to momentum times the velocity, and nothing else."""
        return self.kind == "sgd" and self.momentum > 0 and self.weight_decay == 0

    @torch.no_grad()
    def step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Sequence[Sequence[Tensor]],
        rates: Sequence[float] | Tensor,
        count: Tensor,
    ) -> None:
        """One step in place, of stacks. ``count`` is 1 in the first step.

        A gradient that is the velocity itself has been added to it already.

        ``rates`` has a learning rate for each stack; as a tensor it can change without a new CUDA graph.
        """
        if self.kind == "sgd" and not isinstance(rates, Tensor):
            self._fused(parameters, gradients, state, rates)
            return
        gradients = self._decayed(parameters, gradients)
        directions = self._adam(gradients, state, count) if self.kind == "adam" else self._sgd(gradients, state)
        for k, (parameter, direction) in enumerate(zip(parameters, directions, strict=True)):
            if isinstance(rates, Tensor):
                parameter.addcmul_(direction, rates[k], value=-1)
            else:
                parameter.sub_(direction, alpha=rates[k])

    def _fused(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        state: Sequence[Sequence[Tensor]],
        rates: Sequence[float],
    ) -> None:
        """torch's own SGD: one pass over memory instead of three, which is most of a small network's step."""
        added = [k for k, gradient in enumerate(gradients) if state and gradient is state[0][k]]
        for k in added:
            parameters[k].sub_(state[0][k], alpha=rates[k])
        rest = [k for k in range(len(parameters)) if k not in added]
        for rate, decays in {(rates[k], self._decays(parameters[k])) for k in rest}:
            chosen = [k for k in rest if (rates[k], self._decays(parameters[k])) == (rate, decays)]
            sgd(
                [parameters[k] for k in chosen],
                [_like(gradients[k], parameters[k]) for k in chosen],
                [state[0][k] for k in chosen] if state else [None] * len(chosen),
                weight_decay=self.weight_decay if decays else 0.0,
                momentum=self.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                fused=True,
            )

    def _decayed(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.weight_decay:
            return gradients
        return [
            gradient.add(parameter, alpha=self.weight_decay) if self._decays(parameter) else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    def _decays(self, parameter: Tensor) -> bool:
        return self.decay == "all" or parameter.dim() > 2  # one dimension is the clients'

    def _sgd(self, gradients: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        if not state:
            return gradients
        velocities = list(state[0])
        torch._foreach_mul_(velocities, self.momentum)
        torch._foreach_add_(velocities, list(gradients))
        return velocities

    def _adam(self, gradients: Sequence[Tensor], state: Sequence[Sequence[Tensor]], count: Tensor) -> Sequence[Tensor]:
        first, second = (list(slot) for slot in state)
        torch._foreach_lerp_(first, list(gradients), 1 - self.betas[0])
        torch._foreach_mul_(second, self.betas[1])
        torch._foreach_addcmul_(second, list(gradients), list(gradients), 1 - self.betas[1])
        # In double precision first: 1 - beta is a difference of nearly equal numbers.
        corrections = [(1 - beta ** count.double()).to(gradients[0].dtype) for beta in self.betas]
        return [
            (m / corrections[0]) / ((v / corrections[1]).sqrt() + self.epsilon)
            for m, v in zip(first, second, strict=True)
        ]


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout: mixed layouts make a pass over memory several times slower."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)

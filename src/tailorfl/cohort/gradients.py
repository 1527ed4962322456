"""Gradients of an objective for every client of a stack, or for one client without the stack."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tailorfl.cohort.objective import Batch, Client, Objective
from tailorfl.models.network import Network, Values
from tailorfl.models.stacked import stacked_layers

ABSENT = "absent classes"  # among ``own``: which outputs are out of the question for a client


class Inputs(NamedTuple):
    """What a gradient is computed from; all but ``common`` have a leading client dimension."""

    trained: Values
    fixed: Values
    batch: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the fields of a Batch
    own: Values
    common: Values
    velocity: Values  # to which a gradient may be added right away, for each trained name


Gradients = Callable[[Inputs], tuple[Values, Tensor]]
"""To the gradients of ``trained`` and the losses, both with a leading client dimension.

In place of a gradient it may give back the velocity, with the gradient already added to it.
"""

Kind = Callable[[Network, Objective], Gradients]
"""Of all clients together, or of one: ``stacked_gradients``, or ``single_gradients``."""


def stacked_gradients(network: Network, objective: Objective) -> Gradients:
    """All clients as one tensor program."""

    def loss(trained: Values, fixed: Values, batch: tuple[Tensor, ...], own: Values, common: Values) -> Tensor:
        return objective(_client(network, {**trained, **fixed}, own, common), Batch(*batch))

    mapped = vmap(grad_and_value(loss), in_dims=(0, 0, 0, 0, None))

    def compute(inputs: Inputs) -> tuple[Values, Tensor]:
        # vmap refuses an empty dictionary beside a dimension, hence the stand-in.
        own = inputs.own or {"": inputs.batch[2]}
        with stacked_layers():
            gradients, losses = mapped(inputs.trained, inputs.fixed, inputs.batch, own, inputs.common)
        return gradients, losses

    return compute


def single_gradients(network: Network, objective: Objective) -> Gradients:
    """A cohort of one, by ordinary autograd: for what cannot be stacked, and where a stack does not pay."""

    def compute(inputs: Inputs) -> tuple[Values, Tensor]:
        leaves = {name: tensor[0].detach().requires_grad_() for name, tensor in inputs.trained.items()}
        values = {**leaves, **_first(inputs.fixed)}
        batch = _unpadded(Batch(*(tensor[0] for tensor in inputs.batch)))
        with torch.enable_grad():
            loss = objective(_client(network, values, _first(inputs.own), inputs.common), batch)
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return {name: gradient[None] for name, gradient in zip(leaves, found, strict=True)}, loss.detach()[None]

    return compute


def _client(network: Network, values: Values, own: Values, common: Values) -> Client:
    named = {name: tensor for name, tensor in own.items() if name not in ("", ABSENT)}
    return Client(network, values, named, common, own.get(ABSENT))


def _unpadded(batch: Batch) -> Batch:
    """On a CPU, the batch as anybody would make it for one client: no padding, and images with the channels last."""
    if batch.inputs.device.type != "cpu":
        return batch
    real = max(1, int(batch.valid.sum()))
    inputs, targets, valid, weight = (t[:real] for t in (batch.inputs, batch.targets, batch.valid, batch.weight))
    return Batch(inputs.contiguous(memory_format=layout(inputs)), targets, valid, weight, batch.size)


def layout(tensor: Tensor) -> torch.memory_format:
    """On a CPU convolutions of one client are faster with the channels last; a stack's are not."""
    last = tensor.dim() == 4 and tensor.device.type == "cpu"
    return torch.channels_last if last else torch.contiguous_format


def _first(values: Mapping[str, Tensor]) -> Values:
    return {name: tensor[0] for name, tensor in values.items()}

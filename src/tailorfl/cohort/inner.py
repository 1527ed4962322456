"""Gradients that an objective takes by itself, for methods whose local step is not the gradient of a loss."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import grad_and_value

from tailorfl.cohort.objective import Batch, Client, Objective
from tailorfl.models.network import Values


def weights(client: Client) -> Values:
    """The client's parameters as constants."""
    return {name: client.values[name].detach() for name in client.network.parameters}


def statistics(client: Client, copied: bool = False) -> Values:
    """The client's batch-norm statistics, or copies of them: a forward pass in training changes them in place."""
    found = {name: client.values[name] for name in client.network.buffers}
    return {name: tensor.clone() for name, tensor in found.items()} if copied else found


def inner_gradient(
    loss: Objective, client: Client, batch: Batch, at: Values, moving: Values
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient and the value of a loss at other weights than the client's; moves the statistics ``moving``."""

    def value(parameters: Values, buffers: Values) -> Tensor:
        return loss(replace(client, values={**parameters, **buffers}), batch)

    # The statistics are an argument because torch.func refuses to change what a function merely closes over.
    gradient, found = grad_and_value(value)(at, moving)
    return gradient, found


def with_gradient(value: Tensor, gradient: Mapping[str, Tensor], client: Client) -> Tensor:
    """A scalar of this value whose gradient, by the client's parameters, is the one given."""
    products = [(client.values[name] * wanted.detach()).sum() for name, wanted in gradient.items()]
    slope = torch.stack(products).sum()
    return value.detach() + (slope - slope.detach())

"""Per-FedAvg: a global model that is good after one gradient step on a client's own data."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Batch, Client, Cohort, Objective
from tailorfl.cohort.inner import inner_gradient, statistics, weights, with_gradient
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Network, Values

Variant = Literal["first-order", "hessian-free"]
PARTS: dict[Variant, int] = {"first-order": 2, "hessian-free": 3}


@dataclass(frozen=True)
class AfterOneStep:
    """The gradient of the loss that is left after one inner step, as the variant approximates it; valued there."""

    loss: Objective
    variant: Variant
    inner_lr: float
    delta: float

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        first, second, *third = (part(batch, k, PARTS[self.variant]) for k in range(PARTS[self.variant]))
        start = weights(client)
        # The pass of w itself moves the client's statistics, as if w were trained; the others work on copies.
        slope, _ = inner_gradient(self.loss, client, first, start, statistics(client))
        adapted = _moved(start, slope, -self.inner_lr)
        outer, left = inner_gradient(self.loss, client, second, adapted, statistics(client, copied=True))
        for other in third:
            curvature = self._curvature(client, other, start, outer)
            outer = {name: outer[name] - self.inner_lr * curvature[name] for name in outer}
        return with_gradient(left, outer, client)

    def _curvature(self, client: Client, batch: Batch, start: Values, direction: Values) -> Values:
        """The Hessian times a direction, by the difference of two gradients."""
        ahead, behind = (
            inner_gradient(self.loss, client, batch, _moved(start, direction, step), statistics(client, copied=True))[0]
            for step in (self.delta, -self.delta)
        )
        return {name: (ahead[name] - behind[name]) / (2 * self.delta) for name in ahead}


def _moved(values: Values, direction: Values, step: float) -> Values:
    return {name: tensor + step * direction[name] for name, tensor in values.items()}


def part(batch: Batch, number: int, parts: int) -> Batch:
    """Every so-manieth sample of a batch from the given one on; all real samples where that one is padding.

    Real samples come first in a batch, so all of them then lie before that one.
    """
    lacking = 1 - batch.valid[number : number + 1].sum()

    def chosen(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[number::parts], tensor[:number]])

    counts = torch.cat([torch.ones_like(batch.valid[number::parts]), lacking.expand_as(batch.valid[:number])])
    valid = chosen(batch.valid) * counts
    return Batch(
        chosen(batch.inputs), chosen(batch.targets), valid, chosen(batch.weight) * counts, valid.sum().clamp(min=1)
    )


class PerFedAvg(FedAvg):
    """A model one step away from every client's (Fallah et al., Personalized FL: A MAML Approach, NeurIPS 2020).

    A local step splits its batch into D, D' and, for the Hessian, D''. It goes from w to w' = w - a grad f(w; D) with
    a = ``inner_lr`` (the paper's alpha) and takes the gradient at w' on D'. The variant ``hessian-free`` subtracts a
    times the Hessian's product with it, from two more gradients on D'' at distance ``delta`` from w; ``first-order``
    leaves that out. Evaluated is the received model after ``adapt_steps`` full-batch steps at ``inner_lr`` on the
    client's own training data. With ``inner_lr=0`` it is FedAvg on one part of each batch.
    """

    name: ClassVar[str] = "per-fedavg"
    paper: ClassVar[str] = "Fallah et al. 2020"

    lr: float = Field(0.05, gt=0, description="learning rate of the outer steps, the paper's beta")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the outer steps; the paper has none")
    variant: Variant = Field("first-order", description="whether the outer gradient knows the loss's curvature")
    inner_lr: float = Field(0.05, ge=0, description="rate of the step that adapts, the paper's alpha; 0: FedAvg")
    delta: float = Field(1e-3, gt=0, description="hessian-free: distance of the two gradients that are compared")
    adapt_steps: int = Field(1, ge=0, description="full-batch steps before a client's model is evaluated; not kept")

    def start(self, network: Network) -> Server:
        if network.mixed and self.variant == "hessian-free":
            raise UserError(
                "precision=mixed: variant=hessian-free takes the difference of two gradients that are nearly equal, of "
                "which half precision leaves nothing; allowed: variant=first-order, or precision=float32 or float64"
            )
        return super().start(network)

    def train(self, clients: Cohort, received: Message) -> Values:
        if clients.plan.random and self.variant == "hessian-free":
            raise UserError(
                f"variant=hessian-free compares gradients, and {clients.network.name} draws random numbers (dropout) "
                "for each anew; allowed: variant=first-order"
            )
        clients.load(received.tensors)
        clients.fit(AfterOneStep(clients.loss, self.variant, self.inner_lr, self.delta))
        return clients.take(received.tensors)

    def personalize(self, clients: Cohort, received: Message) -> None:
        self.receive(clients, received)
        for step in range(self.adapt_steps):
            gradient, _ = clients.gradient(purpose=f"adapt {step}")
            for name, slope in gradient.items():
                clients.values[name].sub_(slope, alpha=self.inner_lr)

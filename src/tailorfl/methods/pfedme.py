"""pFedMe: personal models near a global one, which follows them along the gradient of a Moreau envelope."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Batch, Client, Cohort, Objective
from tailorfl.cohort.inner import inner_gradient, statistics, weights, with_gradient
from tailorfl.cohort.optimizer import Optimizer
from tailorfl.errors import UserError
from tailorfl.exchange.aggregation import average
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.methods.fedprox import Proximal
from tailorfl.methods.method import Method
from tailorfl.models.network import Network, Values


@dataclass(frozen=True)
class MoreauEnvelope:
    """The gradient lam (w - theta), where theta minimizes the batch's loss + lam/2 ||theta - w||^2; valued at theta."""

    loss: Objective
    lam: float
    steps: int
    lr: float

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        center = weights(client)
        theta = center
        for step in range(self.steps):
            # The first pass is that of w itself: its statistics are the client's, as if w were trained. Others copy.
            moving = statistics(client, copied=step > 0)
            gradient, _ = inner_gradient(self.loss, client, batch, theta, moving)
            theta = {
                name: tensor - self.lr * (gradient[name] + self.lam * (tensor - center[name]))
                for name, tensor in theta.items()
            }
        reached = self.loss(replace(client, values={**theta, **statistics(client, copied=True)}), batch)
        return with_gradient(reached, {name: self.lam * (center[name] - theta[name]) for name in theta}, client)


class PFedMe(Method):
    """Personal models near a global one (Dinh et al., Personalized FL with Moreau Envelopes, NeurIPS 2020).

    On each batch a client finds theta by ``inner_steps`` gradient steps (the paper's K) on its loss plus
    lam/2 ||theta - w||^2, starting at w, then moves w by lr lam (w - theta). The server moves by ``beta`` towards the
    average of the clients' w. Evaluated is theta, found from the received w on the client's own training data. The
    larger ``lam``, the nearer is theta to the global model; with ``inner_steps=1``, w is trained as in FedAvg.
    """

    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al. 2020"
    shares: ClassVar[str] = "all layers"

    lr: float = Field(0.05, gt=0, description="learning rate of w, the paper's eta; lr lam is how far w goes to theta")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of the steps of w; the paper has none")
    lam: float = Field(15.0, gt=0, description="pull of theta towards w; large: the global model serves everybody")
    inner_steps: int = Field(
        5, ge=1, description="gradient steps to theta on each batch, the paper's K; 1: w is FedAvg's"
    )
    personal_lr: float = Field(0.05, gt=0, description="learning rate of theta; times lam it must stay below 2")
    beta: float = Field(1.0, gt=0, description="how far the server goes to the average; 1: it takes the average")

    def start(self, network: Network) -> Server:
        if self.personal_lr * self.lam >= 2:
            raise UserError(
                f"personal_lr={self.personal_lr:g} with lam={self.lam:g}: theta would run away from w; "
                f"allowed: personal_lr below 2/lam, {2 / self.lam:g}"
            )
        return super().start(network)

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        clients.fit(MoreauEnvelope(clients.loss, self.lam, self.inner_steps, self.personal_lr))
        return clients.take(received.tensors)

    def personalize(self, clients: Cohort, received: Message) -> None:
        self.receive(clients, received)
        center = {name: clients.values[name].clone() for name in clients.network.parameters}
        clients.fit(
            Proximal(clients.loss, self.lam),
            lr=self.personal_lr,
            optimizer=Optimizer(),
            own=center,
            purpose="personalize",
        )

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        kept = frozenset(network.buffers)  # statistics: a variance beyond the clients' could be negative
        averaged = average(answers, server.values, self.aggregation)
        reached = {
            name: target if name in kept else torch.lerp(server.values[name], target, self.beta)
            for name, target in averaged.items()
        }
        self.step(server, reached, kept)

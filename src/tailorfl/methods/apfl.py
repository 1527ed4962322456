"""APFL: a client's model is a mixture of the global one and one of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Batch, Client, Cohort, Objective
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Network, Values

OWN = "own/"  # prefix of the personal model in a client's memory
MIXING = "mixing"  # how much of it is in the mixture


def mixed(network: Network, values: Mapping[str, Tensor]) -> Values:
    """One client's mixture: of parameters; the statistics are those that were measured on it. Only v gets gradients."""
    share = values[MIXING]
    parameters = {name: share * values[OWN + name] + (1 - share) * values[name].detach() for name in network.parameters}
    return parameters | {name: values[OWN + name] for name in network.buffers}


@dataclass(frozen=True)
class MixedLoss:
    """The task's loss of the mixture."""

    loss: Objective

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        return self.loss(replace(client, values=mixed(client.network, client.values)), batch)


@dataclass(frozen=True)
class BothLosses:
    """The loss of the received model plus that of the mixture: each trains its own tensors, in the same steps."""

    loss: Objective

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        received = {name: client.values[name] for name in client.network.names}
        return self.loss(replace(client, values=received), batch) + MixedLoss(self.loss)(client, batch)


class APFL(FedAvg):
    """Mix a global and a personal model (Deng et al., Adaptive Personalized Federated Learning, 2020).

    In each step a client trains the received model w on its loss, and its own model v on the loss of the mixture
    a v + (1 - a) w, where a is ``mixing``, the paper's alpha. It sends w and keeps v. It is evaluated with the mixture
    of v and the current w. If ``adaptive_mixing``, each client takes a gradient step on its a before it trains. With a
    fixed a of 0 it is FedAvg; of 1, local training.
    """

    name: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al. 2020"

    mixing: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the personal model in the mixture; if it is not learnt, 0: FedAvg, 1: local training",
    )
    adaptive_mixing: bool = Field(True, description="whether each client learns its share, from mixing on")

    def memory(self, network: Network) -> Values:
        initial = network.initial()
        share = next(iter(initial.values())).new_tensor(self.mixing)
        return {OWN + name: tensor for name, tensor in initial.items()} | {MIXING: share}

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        both = replace(clients, values=clients.values | clients.memory)  # trained in place
        if self.adaptive_mixing:
            self._adapt(both)
        own = [OWN + name for name in clients.network.parameters]
        both.fit(BothLosses(clients.loss), train=[*clients.network.parameters, *own])
        return clients.take(received.tensors)

    def assemble(self, clients: Cohort) -> None:
        clients.load(torch.vmap(partial(mixed, clients.network))(clients.values | clients.memory))

    def _adapt(self, both: Cohort) -> None:
        """A step of gradient descent on all of a client's data; a share stays a share."""
        gradients, _ = both.gradient(MixedLoss(both.loss), train=[MIXING])
        rate = self.rate(both.round, both.rounds)
        both.values[MIXING].sub_(gradients[MIXING], alpha=rate).clamp_(0, 1)

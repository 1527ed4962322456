"""FedRoD: one body, a generic head for everybody, and a personal head that is added to it."""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from tailorfl.cohort import Batch, Client, Cohort
from tailorfl.cohort.objective import class_losses
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Network, Values

OWN = "own/"  # prefix of the personal head in a client's memory
ABSENT = -1e4  # in place of the logarithm of zero: the same under a softmax, and no NaN when a padded sample weighs it


def two_heads(client: Client, batch: Batch) -> Tensor:
    """The loss of the generic logits under the client's prior, plus the loss of their sum with the personal logits.

    Body and generic head learn from the first loss alone, the personal head from the second.
    """
    model = replace(client, values={name: client.values[name] for name in client.network.names})
    features = model.features(batch)
    generic = class_losses(model.head(features) + client.own["prior"], batch.targets)
    names = client.network.layers[-1].parameters
    both = {name: client.values[name].detach() + client.values[OWN + name] for name in names}
    personalized = class_losses(replace(client, values=both).head(features.detach()), batch.targets)
    return batch.mean(generic) + batch.mean(personalized)


class FedRoD(FedAvg):
    """Two heads on one body (Chen and Chao, On Bridging Generic and Personalized Federated Learning, ICLR 2022).

    Body and generic head are trained with a balanced softmax, which takes the client's own frequencies of the classes
    out of them, and averaged. A personal head, zero at first and kept by the client, learns the plain loss of the sum
    of both heads' logits, with all else fixed. A client is evaluated with that sum; the global model is body and
    generic head. With ``balanced=false`` the global model is FedAvg's. This is the paper's linear variant, without a
    hypernetwork.
    """

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "Chen and Chao 2022"
    classes_only: ClassVar[bool] = True

    balanced: bool = Field(True, description="balanced softmax for what is shared; false: its global model is FedAvg's")

    def memory(self, network: Network) -> Values:
        _check_head(network)
        initial = network.initial()
        return {OWN + name: torch.zeros_like(initial[name]) for name in network.layers[-1].parameters}

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        both = replace(clients, values=clients.values | clients.memory)  # trained in place
        both.fit(two_heads, train=[*clients.network.parameters, *clients.memory], own={"prior": self._prior(clients)})
        return clients.take(received.tensors)

    def assemble(self, clients: Cohort) -> None:
        # The head is linear: to add its weights is to add its logits.
        for name in clients.network.layers[-1].parameters:
            clients.values[name] += clients.memory[OWN + name]

    def _prior(self, clients: Cohort) -> Tensor:
        """What is added to the generic logits: how often each client has each class, as a logarithm."""
        counts = clients.class_counts().to(clients.values[clients.network.parameters[0]].dtype)
        return counts.log().clamp(min=ABSENT) if self.balanced else torch.zeros_like(counts)


def _check_head(network: Network) -> None:
    head = network.module.get_submodule(network.layers[-1].name)
    parts = [part for part in head.modules() if not list(part.children()) and not isinstance(part, nn.Flatten)]
    if len(parts) != 1 or not isinstance(parts[0], nn.Linear):
        raise UserError(
            f"fedrod: the last layer of network {network.name}, {network.layers[-1].name}, is not one linear layer, "
            "to which a personal one can be added; allowed: a network that ends in nn.Linear"
        )

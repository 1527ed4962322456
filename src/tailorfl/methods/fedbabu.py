"""FedBABU: the body is trained under a head that stays as it began; fine-tuning comes last."""

from typing import ClassVar, Literal

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values


class FedBABU(Method):
    """Train and average the body only (Oh et al., FedBABU: Towards Enhanced Representation, ICLR 2022).

    BABU is "body aggregation and body update". The head has the same initial values everywhere and does not train in
    rounds, so it need not travel. A client is evaluated after it fine-tuned the received body and the initial head on
    its own data; with ``finetune_epochs=0`` it is served the global model, the body under the initial head.
    """

    name: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = "Oh et al. 2022"
    shares: ClassVar[str] = "all layers but the head"

    finetune_epochs: int = Field(5, ge=0, description="local epochs before a client's model is evaluated; not kept")
    finetune_part: Literal["all", "head", "body"] = Field(
        "all", description="what fine-tuning trains: the whole model, its head, or its body"
    )

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(1)

    def personal(self, network: Network) -> tuple[str, ...]:
        """What a client keeps. The head's parameters are neither sent nor kept: they are the initial ones."""
        head = set(network.layers[-1].parameters)
        return tuple(name for name in super().personal(network) if name not in head)

    def start(self, network: Network) -> Server:
        if len(network.layers) < 2:
            raise UserError(f"fedbabu: network {network.name} is a head without a body; allowed: two layers or more")
        return super().start(network)

    def global_model(self, server: Server, network: Network) -> Values | None:
        initial = network.initial()
        head = {name: initial[name] for name in network.layers[-1].parameters}
        whole = {**head, **server.values}
        return whole if set(whole) >= set(network.names) else None

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        clients.fit(train=_parts(clients.network)["body"])
        return clients.take(received.tensors)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        chosen = _parts(clients.network)[self.finetune_part]
        clients.fit(train=chosen, epochs=epochs, lr=self.lr, purpose="finetune")


def _parts(network: Network) -> dict[str, tuple[str, ...]]:
    """The parameters of each part of a network that fine-tuning may train."""
    head = network.layers[-1].parameters
    body = tuple(name for name in network.parameters if name not in head)
    return {"all": network.parameters, "head": head, "body": body}

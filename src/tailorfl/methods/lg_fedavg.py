"""LG-FedAvg: a personal base and a shared head, the mirror image of FedPer."""

from typing import ClassVar

import torch
from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Layer, Network, Values


class LGFedAvg(FedAvg):
    """Keep the base, share the head (Liang et al., Think Locally, Act Globally, 2020).

    A client trains its own base and the received upper layers together, sends these, and keeps the base, the paper's
    local representation. It is evaluated with its own base under the current upper layers. With no personal layer it
    is FedAvg; with all layers personal, local training. The first ``fedavg_rounds`` are FedAvg; then every client
    begins its own base from the one that they all trained.
    """

    name: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = "Liang et al. 2020"
    shares: ClassVar[str] = "the upper layers"

    personal_layers: int | None = Field(
        None, ge=0, description="layers at the base that stay with the client; null: half of them; 0: FedAvg"
    )
    fedavg_rounds: int = Field(0, ge=0, description="rounds of FedAvg before clients keep their base; 0: none")

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        half = max(1, len(network.layers) // 2)
        return network.layers[half if self.personal_layers is None else self.personal_layers :]

    def memory(self, network: Network) -> Values:
        """Whether the base that the client keeps is its own: while FedAvg lasts it is not."""
        return {"begun": torch.tensor(0)} if self.fedavg_rounds else {}

    def start(self, network: Network) -> Server:
        return FedAvg(batch_norm=self.batch_norm).start(network) if self.fedavg_rounds else super().start(network)

    def advance(self, server: Server, network: Network) -> None:
        """When FedAvg is over: archive its base, which every client is sent once more, and keep the upper layers."""
        if self.fedavg_rounds and server.round == self.fedavg_rounds + 1:
            upper = self.shared(network)
            server.archive = {name: tensor for name, tensor in server.values.items() if name not in upper}
            server.values = {name: server.values[name] for name in upper}

    def train(self, clients: Cohort, received: Message) -> Values:
        self._begin(clients)
        return super().train(clients, received)

    def receive(self, clients: Cohort, received: Message) -> None:
        self._begin(clients)
        super().receive(clients, received)

    def _begin(self, clients: Cohort) -> None:
        """Give FedAvg's base to clients that have none of their own yet; while FedAvg lasts nothing is archived."""
        if clients.archive:
            late = clients.memory["begun"] == 0
            for name, tensor in clients.archive.items():
                clients.values[name][late] = tensor
            clients.memory["begun"] = torch.ones_like(clients.memory["begun"])

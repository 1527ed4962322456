"""FedPer: a shared body and personal layers at the head."""

from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values


class FedPer(Method):
    """Share the body, keep the head (Arivazhagan et al., Federated Learning with Personalization Layers, 2019).

    A client trains the received body and its own head together, sends the body, and keeps the head. With no personal
    layer it is FedAvg; with all layers personal, local training.
    """

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al. 2019"
    shares: ClassVar[str] = "all layers but the head"

    personal_layers: int = Field(1, ge=0, description="layers at the head that stay with the client; 0: FedAvg")

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(self.personal_layers)

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        clients.fit()
        return clients.take(received.tensors)

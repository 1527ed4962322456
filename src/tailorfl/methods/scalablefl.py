"""ScalableFL: clients with other image sizes and numbers of classes share the convolutions they have in common."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values
from tailorfl.models.slicing import slices


class ScalableFL(Method):
    """Deeper networks for larger images, wider ones for more classes (Nitta et al., Scalable Federated Learning, 2023).

    "Scalable Federated Learning for Clients with Different Input Image Sizes and Numbers of Output Categories". A
    client's shared convolutions are the leading slices of the global ones, of the stages that it has. Batch norms and
    the output layer stay with the client. The server averages every element over the clients that hold it. Where all
    clients are alike it is FedPer with ``batch_norm=local``.
    """

    name: ClassVar[str] = "scalablefl"
    paper: ClassVar[str] = "Nitta et al. 2023"
    shares: ClassVar[str] = "slices of the convolutions"
    mixed: ClassVar[bool] = True

    personal_layers: int = Field(1, ge=1, description="layers at the head that stay with the client")
    batch_norm: Literal["shared", "local", "local-statistics"] = Field(
        "local", description="norm layers: shared like others, kept by the client, or only their statistics"
    )

    def doubts(self, clients: int, per_round: float, rounds: int, selection: str) -> tuple[str, ...]:
        asked = "selection=uniform: the paper asks a share of each group; selection=per-group does so"
        return (asked,) if selection == "uniform" and per_round < clients else ()

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(self.personal_layers)

    def broadcast(self, server: Server) -> Message:
        return Message()

    def individual(self, server: Server, clients: Sequence[int], network: Network) -> Values:
        return slices(server.values, self.shared(network), network.module, len(clients))

    def train(self, clients: Cohort, received: Message) -> Values:
        self.receive(clients, received)
        clients.fit()
        return clients.take(self.shared(clients.network))

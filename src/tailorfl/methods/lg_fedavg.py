"""LG-FedAvg: a personal base and a shared head, the mirror image of FedPer."""

from typing import ClassVar

from pydantic import Field

from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Layer, Network


class LGFedAvg(FedAvg):
    """Keep the base, share the head (Liang et al., Think Locally, Act Globally, 2020).

    A client trains its own base and the received upper layers together, sends these, and keeps the base, the paper's
    local representation. It is evaluated with its own base under the current upper layers. With no personal layer it
    is FedAvg; with all layers personal, local training.
    """

    name: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = "Liang et al. 2020"
    shares: ClassVar[str] = "the upper layers"

    personal_layers: int | None = Field(
        None, ge=0, description="layers at the base that stay with the client; null: half of them; 0: FedAvg"
    )

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        half = max(1, len(network.layers) // 2)
        return network.layers[half if self.personal_layers is None else self.personal_layers :]

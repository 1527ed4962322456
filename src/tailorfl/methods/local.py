"""Local training: every client for itself."""

from typing import ClassVar

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values


class Local(Method):
    """Every client for itself. Nothing travels: each client keeps and trains its own model.

    A client trains in the rounds in which it is selected, so that it does as much work as under other methods.
    """

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "baseline"
    shares: ClassVar[str] = "nothing"
    mixed: ClassVar[bool] = True

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return ()

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.fit()
        return {}

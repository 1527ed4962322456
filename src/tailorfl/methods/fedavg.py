"""FedAvg: one model for all, the average of what clients make of it."""

from typing import ClassVar

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.method import Method
from tailorfl.models.network import Values


class FedAvg(Method):
    """Federated averaging (McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017).

    Every client of a round trains the global model on its own data and sends it back; the server averages. Every
    client is served the global model.
    """

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"
    shares: ClassVar[str] = "all layers"

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        clients.fit()
        return clients.take(received.tensors)

"""Ditto: a global model as FedAvg trains it, and a personal one that is held near it."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedavg import FedAvg
from tailorfl.methods.fedprox import Proximal
from tailorfl.models.network import Network, Values

OWN = "own/"  # prefix of the personal model in a client's memory


class Ditto(FedAvg):
    """A personal model beside the global one (Li et al., Ditto: Fair and Robust Federated Learning, ICML 2021).

    In a round a client trains the received model w as FedAvg does and sends it. Beside it, it trains a model v of its
    own, which it keeps, on its loss plus lam/2 ||v - w||^2, where w is as received. It is evaluated with v. With
    ``lam=0`` the personal models are those of local training; the larger it is, the nearer they are to the global one.
    """

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al. 2021"

    lam: float = Field(1.0, ge=0, description="pull of the personal model towards the global one; 0: local training")
    personal_epochs: int | None = Field(
        None, ge=1, description="passes over the data for the personal model; null: local_epochs"
    )

    def memory(self, network: Network) -> Values:
        return {OWN + name: tensor for name, tensor in network.initial().items()}

    def train(self, clients: Cohort, received: Message) -> Values:
        self._train_own(clients, received)
        clients.load(received.tensors)
        clients.fit(purpose="global")
        return clients.take(received.tensors)

    def assemble(self, clients: Cohort) -> None:
        clients.load(_own(clients))

    def _train_own(self, clients: Cohort, received: Message) -> None:
        centre = {name: received.tensors[name] for name in clients.network.parameters if name in received.tensors}
        own = replace(clients, values=_own(clients))  # trained in place, so in the memory
        if self.lam and centre:
            own.fit(Proximal(clients.loss, self.lam), epochs=self.personal_epochs, common=centre)
        else:  # the plain loss, to the bit as local training: even a term of zero changes how a step is rounded
            own.fit(epochs=self.personal_epochs)


def _own(clients: Cohort) -> Values:
    """The personal models, under the network's names."""
    return {name: clients.memory[OWN + name] for name in clients.network.names}

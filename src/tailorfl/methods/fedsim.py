"""FedSim: the shared and the personal part of a model trained at the same time, each at its own rate."""

from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedper import FedPer
from tailorfl.methods.mixing import LayerMixing
from tailorfl.models.network import Values


class FedSim(LayerMixing, FedPer):
    """Train both parts together (Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022).

    The paper's personal parameters v are the head here, its shared parameters u all below. Both take the same steps,
    each at a learning rate of its own. A client is evaluated with its own head on the current body. Without a
    ``personal_lr`` it is FedPer. With ``mix`` the shared layers are mixed as in pMixFed.
    """

    name: ClassVar[str] = "fedsim"
    paper: ClassVar[str] = "Pillutla et al. 2022"

    personal_lr: float | None = Field(
        None, gt=0, description="learning rate of what stays with the client; null: lr, as FedPer"
    )

    def train_alone(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        personal, shared = self.personal_rate(clients), self.rate(clients.round, clients.rounds)
        rates = {name: shared if name in received.tensors else personal for name in clients.network.parameters}
        clients.fit(lr=rates)
        return clients.take(received.tensors)

    def personal_rate(self, clients: Cohort) -> float:
        """The learning rate of the personal part in this round: under the same schedule as the other."""
        lr = self.lr if self.personal_lr is None else self.personal_lr
        return self.model_copy(update={"lr": lr}).rate(clients.round, clients.rounds)

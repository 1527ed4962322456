"""FedSGD: one gradient step a round, taken on the average of the clients' gradients."""

from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.cohort.optimizer import Optimizer
from tailorfl.exchange.messages import Message
from tailorfl.methods.method import Method
from tailorfl.models.network import Values


class FedSGD(Method):
    """One full-batch step a round (McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017).

    Every client of a round takes one plain gradient step from the global model on all of its data; the server averages
    the results, which is a step along the average gradient. With everybody in the round it is gradient descent on the
    pooled loss. FedAvg with one epoch, ``batch_size=0`` and ``momentum=0`` does the same. Every client is served the
    global model. Fine-tuning takes such steps too, one an epoch.
    """

    name: ClassVar[str] = "fedsgd"
    paper: ClassVar[str] = "McMahan et al. 2017"
    shares: ClassVar[str] = "all layers"

    lr: float = Field(0.2, gt=0, description="learning rate of the one step that a client takes in a round")
    batch_size: int = Field(0, ge=0, description="does not act: a step always takes the full batch")

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        clients.fit(steps=1, batch_size=0, optimizer=self._plain())
        return clients.take(received.tensors)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        clients.fit(epochs=epochs, batch_size=0, lr=self.lr, optimizer=self._plain(), purpose="finetune")

    def _plain(self) -> Optimizer:
        return Optimizer(weight_decay=self.weight_decay, decay=self.decay)

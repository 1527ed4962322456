"""FedAlt: the personal part of a model first, then the shared part."""

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedsim import FedSim
from tailorfl.models.network import Values


class FedAlt(FedSim):
    """Train the parts in turn (Pillutla et al., Federated Learning with Partial Model Personalization, ICML 2022).

    In a round a client first trains its head, the paper's personal parameters v, on the received body; then the body,
    the shared parameters u, under the new head. It sends the body. It is evaluated with its own head on the current
    body; fine-tuning before that, the paper's last step, trains the head alone. With no personal layer it is FedAvg.
    """

    name: ClassVar[str] = "fedalt"

    personal_epochs: int | None = Field(
        None, ge=1, description="passes over the data for what stays with the client; null: local_epochs"
    )

    def train_alone(self, clients: Cohort, received: Message) -> Values:
        return train_in_turn(clients, received, self.personal_epochs, self.personal_rate(clients))

    def finetune(self, clients: Cohort, epochs: int) -> None:
        lr = self.lr if self.personal_lr is None else self.personal_lr
        finetune_part(clients, self.personal(clients.network), epochs, lr)


def train_in_turn(clients: Cohort, received: Message, epochs: int | None, lr: float | None = None) -> Values:
    """What stays with the client for so many epochs, then what travels for ``local_epochs``; the latter is sent."""
    parameters = clients.network.parameters
    clients.load(received.tensors)
    personal = [name for name in parameters if name not in received.tensors]
    clients.fit(train=personal, epochs=epochs, lr=lr, purpose="personal")
    clients.load(received.tensors)  # once more: the statistics of norm layers move whenever a model trains
    clients.fit(train=[name for name in parameters if name in received.tensors])
    return clients.take(received.tensors)


def finetune_part(clients: Cohort, names: Iterable[str], epochs: int, lr: float) -> None:
    """Local training, before evaluation, of these tensors; of all parameters where none of them is one."""
    chosen = set(names)
    part = [name for name in clients.network.parameters if name in chosen]
    clients.fit(train=part or None, epochs=epochs, lr=lr, purpose="finetune")

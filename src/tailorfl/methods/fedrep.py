"""FedRep: a new head for the shared body in every round, then one step forward for the body."""

from typing import ClassVar

from pydantic import Field

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedalt import finetune_part, train_in_turn
from tailorfl.methods.fedper import FedPer
from tailorfl.models.network import Values


class FedRep(FedPer):
    """Learn a common representation (Collins et al., Exploiting Shared Representations, ICML 2021).

    In a round a client trains its head, which it keeps, for many epochs on the received body, the paper's
    representation; then the body for few, and sends that. It is evaluated with its own head on the current body;
    fine-tuning before that trains the head alone. It is FedAlt with ``personal_epochs`` of ``head_epochs``.
    """

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al. 2021"

    head_epochs: int = Field(10, ge=1, description="passes over a client's data for the head, before the body")
    local_epochs: int = Field(1, ge=1, description="passes over a client's data for the body")

    def train(self, clients: Cohort, received: Message) -> Values:
        return train_in_turn(clients, received, self.head_epochs)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        finetune_part(clients, self.personal(clients.network), epochs, self.lr)

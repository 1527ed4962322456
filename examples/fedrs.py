"""FedRS: FedAvg whose clients hardly push down the classes that they do not have.

tailor run fedrs:FedRS data=digits clients=20 scale=0.5
tailor compare fedavg fedrs:FedRS data=digits clients=20 scale=0.5
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Batch, Client, Cohort
from tailorfl.cohort.objective import class_losses
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Values


@dataclass(frozen=True)
class RestrictedSoftmax:
    """The cross-entropy, with the outputs of classes that the client does not have multiplied with ``scale``."""

    scale: float

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        outputs = client.predict(batch)
        outputs = torch.where(client.own["has"], outputs, self.scale * outputs)
        return batch.mean(class_losses(outputs, batch.targets))


class FedRS(FedAvg):
    """Restrict the softmax to a client's classes (Li and Zhan, FedRS: Restricted Softmax, KDD 2021).

    In local training the outputs of classes that a client does not have are multiplied with ``scale``, the paper's
    alpha. Every client is served the global model. With ``scale=1`` it is FedAvg.
    """

    name: ClassVar[str] = "fedrs"
    paper: ClassVar[str] = "Li and Zhan 2021"
    shares: ClassVar[str] = "all layers"
    classes_only: ClassVar[bool] = True

    scale: float = Field(0.5, ge=0, le=1, description="factor for classes that a client does not have; 1: FedAvg")

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        has = clients.class_counts() > 0
        clients.fit(RestrictedSoftmax(self.scale), own={"has": has})
        return clients.take(received.tensors)

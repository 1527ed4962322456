"""FedProx: FedAvg whose clients are held near the global model while they train."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Batch, Client, Cohort, Objective
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.network import Values


@dataclass(frozen=True)
class Proximal:
    """The task's loss plus mu/2 times the squared distance to a centre: ``client.common``, or each client's own."""

    loss: Objective
    mu: float

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        centre = {**client.common, **client.own}
        distances = [(client.values[name] - start).square().sum() for name, start in centre.items()]
        return self.loss(client, batch) + self.mu / 2 * torch.stack(distances).sum()


class FedProx(FedAvg):
    """Stay near the global model (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020).

    A client minimizes its loss plus mu/2 ||w - w_global||^2, the paper's proximal term, over the parameters that it
    received. Every client is served the global model. With ``mu=0`` it is FedAvg. The paper also lets slow clients do
    less work (its gamma-inexactness); here all clients do the same.
    """

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al. 2020"

    mu: float = Field(0.1, ge=0, description="pull towards the global model; 0: FedAvg")

    def train(self, clients: Cohort, received: Message) -> Values:
        clients.load(received.tensors)
        start = {name: received.tensors[name] for name in clients.network.parameters if name in received.tensors}
        pulled = Proximal(clients.loss, self.mu) if self.mu else None  # a pull of zero would only cost time
        clients.fit(pulled, common=start)
        return clients.take(received.tensors)

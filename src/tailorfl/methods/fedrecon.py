"""FedRecon: clients that keep nothing, and rebuild their head whenever they need it."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tailorfl.cohort import Cohort
from tailorfl.exchange.messages import Message
from tailorfl.methods.fedalt import finetune_part
from tailorfl.methods.fedper import FedPer
from tailorfl.models.network import Network, Values
from tailorfl.seeding import generator


class FedRecon(FedPer):
    """Rebuild the head in every round (Singhal et al., Federated Reconstruction, NeurIPS 2021).

    A client trains a head from its initial values on a part of its data, the paper's support set, with the received
    body as it is; then the body on the rest, the query set, under that head; and sends the body. The head is dropped.
    A client is evaluated with a head that it rebuilds on all its training data. With no personal layer and all data
    in both parts it is FedAvg.
    """

    name: ClassVar[str] = "fedrecon"
    paper: ClassVar[str] = "Singhal et al. 2021"

    personal_layers: int = Field(1, ge=0, description="layers at the head that are rebuilt; 0: none, as FedAvg")
    recon_epochs: int = Field(10, ge=1, description="passes over the support set that rebuild the head")
    recon_lr: float | None = Field(None, gt=0, description="learning rate of the head, in all rounds; null: lr")
    support_fraction: float = Field(
        0.5, gt=0, le=1, description="share of a client's data that rebuilds the head; the body trains on the rest"
    )

    def personal(self, network: Network) -> tuple[str, ...]:
        """What a client keeps: norm layers, if these are to stay; never the head."""
        head = self._head(network)
        return tuple(name for name in super().personal(network) if name not in head)

    def train(self, clients: Cohort, received: Message) -> Values:
        support, query = self._parts(clients)
        self.receive(clients, received)
        self._rebuild(clients, received, support)
        head = self._head(clients.network)
        clients.fit(train=[name for name in clients.network.parameters if name not in head], only=query)
        return clients.take(received.tensors)

    def receive(self, clients: Cohort, received: Message) -> None:
        super().receive(clients, received)
        initial = clients.network.initial()
        clients.load({name: initial[name] for name in self._head(clients.network)})

    def personalize(self, clients: Cohort, received: Message) -> None:
        self.receive(clients, received)
        self._rebuild(clients, received)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        lr = self.lr if self.recon_lr is None else self.recon_lr
        finetune_part(clients, self._head(clients.network), epochs, lr)

    def _rebuild(self, clients: Cohort, received: Message, support: Tensor | None = None) -> None:
        """Train the head alone. Its rate follows no schedule: it begins anew in every round."""
        head = self._head(clients.network)
        lr = self.lr if self.recon_lr is None else self.recon_lr
        part = [name for name in clients.network.parameters if name in head]
        clients.fit(train=part, epochs=self.recon_epochs, lr=lr, only=support, purpose="rebuild")
        clients.load(received.tensors)  # once more: the statistics of norm layers move whenever a model trains

    def _head(self, network: Network) -> set[str]:
        kept = self.shared_layers(network)
        return set(network.names_of(layer for layer in network.layers if layer not in kept))

    def _parts(self, clients: Cohort) -> tuple[Tensor | None, Tensor | None]:
        """Which samples of each client are the support and the query set; the same in all rounds. None: all."""
        if self.support_fraction == 1:
            return None, None
        counts = clients.counts.tolist()
        support = torch.zeros(len(counts), max(1, *counts), dtype=torch.bool)
        query = torch.zeros_like(support)
        for row, (client, count) in enumerate(zip(clients.clients, counts, strict=True)):
            order = torch.from_numpy(generator(clients.seed, "support", client).permutation(count))
            # At least one sample for each part; a client with a single one uses it for both.
            size = min(max(1, round(self.support_fraction * count)), max(1, count - 1))
            support[row, order[:size]] = True
            query[row, order[size:] if count > 1 else order] = True
        return support.to(clients.engine.device), query.to(clients.engine.device)

"""FedProto: clients with models of their own agree on a prototype of each class, and send nothing else."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tailorfl.cohort import Batch, Client, Cohort
from tailorfl.cohort.objective import class_losses
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values

PROTOTYPES, COUNTS = "prototypes", "counts"  # [classes, features], and the samples behind each; 0: there is none


@dataclass(frozen=True)
class NearPrototypes:
    """Cross-entropy plus lam times the mean squared distance of features to the prototype of the sample's class."""

    lam: float

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        features = client.features(batch)
        losses = class_losses(client.head(features, batch), batch.targets)
        distances = (features.flatten(1) - client.own[PROTOTYPES][batch.targets]).square().mean(1)
        known = (client.own[COUNTS] > 0)[batch.targets].to(distances.dtype)
        return batch.mean(losses) + self.lam * batch.mean(distances * known)


class NearestPrototype(nn.Module):
    """A network that answers by how near its features, what its head is given, are to each class's prototype."""

    prototypes: Tensor
    known: Tensor

    def __init__(self, network: nn.Module, head: str, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.network, self.head = network, head
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("known", known)

    def forward(self, inputs: Tensor) -> Tensor:
        given: list[Tensor] = []
        head = self.network.get_submodule(self.head)
        hook = head.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
        try:
            self.network(inputs)
        finally:
            hook.remove()
        return nearness(given[0].flatten(1)[None], self.prototypes[None], self.known[None])[0]


class FedProto(Method):
    """Share class prototypes, no weights (Tan et al., FedProto: Federated Prototype Learning, AAAI 2022).

    A prototype is the mean of what the head is given on the samples of a class. A client trains all of its own network
    on its loss plus ``lam`` times the distance of its features to the global prototypes, then sends its own prototypes
    and how many samples they stand for; the server averages them class by class. A client predicts the class of the
    nearest global prototype, or by its own head. With ``lam=0`` and ``prediction=head`` it is local training.
    """

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "Tan et al. 2022"
    shares: ClassVar[str] = "class prototypes"
    classes_only: ClassVar[bool] = True

    lam: float = Field(1.0, ge=0, description="pull of features to the prototypes; 0 and prediction=head: local")
    prediction: Literal["prototypes", "head"] = Field("prototypes", description="nearest global prototype, or own head")

    # What travels: nothing of the network.

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return ()

    def memory(self, network: Network) -> Values:
        """The prototypes that the client received last: it predicts by them."""
        return no_prototypes(network)

    # The server.

    def start(self, network: Network) -> Server:
        return Server(no_prototypes(network))

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        totals = {name: torch.zeros_like(tensor) for name, tensor in server.values.items()}
        weights = torch.zeros_like(totals[COUNTS])
        for answer in answers:
            counts = answer.tensors[COUNTS]
            weight = counts if self.aggregation == "samples" else (counts > 0).to(counts)
            totals[PROTOTYPES] += torch.einsum("kc,kcd->cd", weight, answer.tensors[PROTOTYPES])
            totals[COUNTS] += counts.sum(0)
            weights += weight.sum(0)
        sent = weights > 0  # classes that nobody sends keep the old prototype
        if not sent.any():
            return
        averaged = {
            PROTOTYPES: torch.where(
                sent[:, None], totals[PROTOTYPES] / weights.clamp(min=1)[:, None], server.values[PROTOTYPES]
            ),
            COUNTS: torch.where(sent, totals[COUNTS], server.values[COUNTS]),
        }
        plain = frozenset({COUNTS})
        self.step(server, averaged, plain)

    # The client.

    def receive(self, clients: Cohort, received: Message) -> None:
        for name, tensor in received.tensors.items():
            clients.memory[name] = tensor.to(clients.engine.device).expand(len(clients), *tensor.shape)

    def train(self, clients: Cohort, received: Message) -> Values:
        self.receive(clients, received)
        clients.fit(NearPrototypes(self.lam), own=clients.memory)
        return local_prototypes(clients)

    def finetune(self, clients: Cohort, epochs: int) -> None:
        """With the prototypes in the loss: features that drift from them could not be told by them."""
        clients.fit(NearPrototypes(self.lam), epochs=epochs, lr=self.lr, own=clients.memory, purpose="finetune")

    def predict(self, clients: Cohort, batch: Batch) -> Tensor:
        """By the nearest prototype, where every class that the client trains on has one; else by its head."""
        by_head = clients.predict(batch)
        if self.prediction == "head":
            return by_head
        known = clients.memory[COUNTS] > 0
        scores = nearness(clients.features_of(batch).flatten(2), clients.memory[PROTOTYPES], known)
        return torch.where(_complete(clients)[:, None, None], scores, by_head)

    def deployed(self, clients: Cohort) -> nn.Module:
        if self.prediction == "head" or not _complete(clients).item():
            return super().deployed(clients)
        module, head = self.network_with_values(clients), clients.network.layers[-1].name
        known = clients.memory[COUNTS][0] > 0
        return self.possible(clients, NearestPrototype(module, head, clients.memory[PROTOTYPES][0], known))


def _complete(clients: Cohort) -> Tensor:
    """Whether every class that a client trains on has a prototype, [clients]."""
    known = clients.memory[COUNTS] > 0
    return (known | (clients.class_counts() == 0)).all(1) & known.any(1)


def nearness(features: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Minus half the squared distance to each prototype, [clients, samples, classes]; unknown ones are farthest."""
    scores = -torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    farthest = scores.masked_fill(~known[:, None], torch.inf).amin(-1, keepdim=True)
    return torch.where(known[:, None], scores, farthest - 1)


def local_prototypes(clients: Cohort) -> Values:
    """The mean features of each class of each client, and how many samples they are of; zeros where it has none."""
    features = clients.features("train").flatten(2)
    expected = clients.memory[PROTOTYPES].shape[-1]
    if features.shape[-1] != expected:
        raise UserError(
            f"fedproto: the head of {clients.network.name} is given {features.shape[-1]} features, and its weight "
            f"matrix has {expected} inputs; allowed: a network whose last layer begins with its weight matrix"
        )
    classes = clients.class_members().to(features)
    counts = classes.sum(1)
    sums = classes.mT @ features
    return {PROTOTYPES: sums / counts.clamp(min=1)[..., None], COUNTS: counts}


def no_prototypes(network: Network) -> Values:
    """The tables before anybody has sent a prototype; as wide as the head's weight matrix."""
    initial = network.initial()
    matrices = [initial[name] for name in network.layers[-1].parameters if initial[name].dim() == 2]
    if not matrices:
        raise UserError(f"fedproto: the head of {network.name} has no weight matrix; allowed: a linear head")
    classes = matrices[-1].shape[0]
    return {PROTOTYPES: matrices[0].new_zeros(classes, matrices[0].shape[1]), COUNTS: matrices[0].new_zeros(classes)}

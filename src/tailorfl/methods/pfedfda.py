"""pFedFDA: a shared body under a classifier that follows from where the features of each class lie."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from tailorfl.cohort import Cohort
from tailorfl.cohort.objective import class_losses
from tailorfl.errors import UserError
from tailorfl.exchange.aggregation import average
from tailorfl.exchange.messages import Answers, Message, Server
from tailorfl.methods.method import Method
from tailorfl.models.network import Layer, Network, Values

MEANS, COVARIANCE = "features/means", "features/covariance"  # [classes, features] and [features, features]
RARE = 1e-4  # added to the share of each class, so that one a client has not seen stays possible
AT_A_TIME = 1 << 25  # numbers in one set of estimates and features: clients are adapted in groups that fit


@dataclass(frozen=True)
class Gaussians:
    """Class-conditional Gaussians with a common covariance, of one or many clients; in double precision."""

    means: Tensor  # [..., classes, features]
    covariance: Tensor  # [..., features, features]

    @staticmethod
    def of(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> "Gaussians":
        """The estimates that travel."""
        return Gaussians(tensors[MEANS].to(device).double(), tensors[COVARIANCE].to(device).double())

    def mixed(self, other: "Gaussians", share: Tensor) -> "Gaussians":
        """These estimates, with a share [...] of the others."""
        share = share[..., None, None]
        return Gaussians(
            torch.lerp(self.means, other.means, share), torch.lerp(self.covariance, other.covariance, share)
        )

    def classifier(self, priors: Tensor) -> tuple[Tensor, Tensor]:
        """The linear discriminant: weights [..., classes, features] and biases [..., classes]."""
        # Without checks: the features of a client that diverged are not finite, and must not stop the others.
        factor, _ = torch.linalg.cholesky_ex(self.covariance)
        weight = torch.cholesky_solve(self.means.mT, factor).mT
        return weight, priors.log() - (weight * self.means).sum(-1) / 2


@dataclass(frozen=True)
class Features:
    """What the heads of some clients are given on their training samples."""

    values: Tensor  # [clients, samples, features], zero where a sample is padding
    classes: Tensor  # [clients, samples, classes], one where a real sample is of the class

    def of(self, clients: Tensor) -> "Features":
        """Those of some clients, in double precision."""
        return Features(self.values[clients].double(), self.classes[clients].double())

    def estimate(self, known: Gaussians, ridge: float) -> Gaussians:
        """The means and the pooled covariance; a class without samples has the mean that is known of it."""
        counts = self.classes.sum(1)
        means = self.classes.mT @ self.values / counts.clamp(min=1)[..., None]
        means = torch.where(counts[..., None] > 0, means, known.means)
        centered = (self.values - self.classes @ means) * self.classes.sum(2, keepdim=True)
        scatter = centered.mT @ centered / (counts.sum(1) - 1).clamp(min=1)[:, None, None]
        return Gaussians(means, scatter + ridge * torch.eye(scatter.shape[-1]).to(scatter))

    def losses(self, classifier: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy of each sample, [clients, samples]."""
        weight, bias = classifier
        return class_losses(self.values @ weight.mT + bias[:, None], self.classes.argmax(2))

    def folds(self, number: int) -> list[tuple["Features", Tensor]]:
        """For each fold the samples outside of it, and which are in it [clients, samples]; each class is spread."""
        rank = (self.classes.cumsum(1) * self.classes).sum(2) - 1  # of a sample in its class; -1: padding
        inside = [(rank >= 0) & (rank % number == fold) for fold in range(number)]
        return [(Features(self.values, self.classes * ~held[..., None]), held) for held in inside]


class PFedFDA(Method):
    """A shared body, generative heads (McLaughlin and Su, PFL via Feature Distribution Adaptation, NeurIPS 2024).

    The head is the linear discriminant of Gaussians, one a class, with a common covariance. A client trains the body
    under the head of the global estimates and its own class frequencies, which does not train. It then estimates means
    and covariance of its own features, mixes them with the global ones, and sends body and mixture; the server
    averages. The share of its own estimates is that of ``betas`` with the lowest loss on samples left out, in
    ``folds`` parts. Evaluated is the received body under the head of the client's mixture. With ``betas=[1]`` the
    client's head knows its own features only; with ``betas=[0]`` the Gaussians stay the initial ones.
    """

    name: ClassVar[str] = "pfedfda"
    paper: ClassVar[str] = "McLaughlin and Su 2024"
    shares: ClassVar[str] = "all layers but the head, means and covariance of features"
    classes_only: ClassVar[bool] = True

    betas: tuple[float, ...] = Field(
        (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), min_length=1, description="shares of its own estimates that a client tries"
    )
    folds: int = Field(2, ge=2, description="parts of a client's samples, each left out once to choose among betas")
    ridge: float = Field(1.0, gt=0, description="added to the diagonal of covariances; large: frequency decides")

    @field_validator("betas")
    @classmethod
    def _shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= beta <= 1 for beta in value):
            raise ValueError("allowed: numbers from 0 to 1")
        return tuple(sorted(value))

    def shared_layers(self, network: Network) -> tuple[Layer, ...]:
        return network.below(1)

    # The server.

    def start(self, network: Network) -> Server:
        """The initial means are the initial head's weights, which are random; around them, unit variance and ridge."""
        server = super().start(network)
        means = network.initial()[linear_head(network)[0]]
        server.values |= {MEANS: means, COVARIANCE: (1 + self.ridge) * torch.eye(means.shape[1]).to(means)}
        return server

    def aggregate(self, server: Server, answers: Iterable[Answers], network: Network) -> None:
        averaged = average(answers, server.values, self.aggregation)
        plain = frozenset({*network.buffers, MEANS, COVARIANCE})
        self.step(server, averaged, plain)

    def global_model(self, server: Server, network: Network) -> Values | None:
        """The body under the head of the global estimates, with all classes alike frequent."""
        known = Gaussians.of(server.values)
        head = known.classifier(torch.full_like(known.means[:, 0], 1 / len(known.means)))
        model = {name: tensor for name, tensor in server.values.items() if name in network.names}
        model |= {name: part.to(server.values[MEANS]) for name, part in zip(linear_head(network), head, strict=True)}
        return model if set(model) >= set(network.names) else None

    # The client.

    def receive(self, clients: Cohort, received: Message) -> None:
        """The body, under the head of the global estimates and the client's own class frequencies."""
        clients.load({name: tensor for name, tensor in received.tensors.items() if name in clients.values})
        known = Gaussians.of(received.tensors, clients.engine.device)
        weight, bias = known.classifier(priors(clients.class_counts()))
        clients.load(dict(zip(linear_head(clients.network), (weight, bias), strict=True)))

    def train(self, clients: Cohort, received: Message) -> Values:
        self.receive(clients, received)
        head = linear_head(clients.network)
        clients.fit(train=[name for name in clients.network.parameters if name not in head])
        estimates = self._adapt(clients, received)
        return clients.take(self.shared(clients.network)) | estimates

    def personalize(self, clients: Cohort, received: Message) -> None:
        self.receive(clients, received)
        self._adapt(clients, received)

    def _adapt(self, clients: Cohort, received: Message) -> Values:
        """Give each client the head of its own mixture; what the mixtures are."""
        known = Gaussians.of(received.tensors, clients.engine.device)
        features, counts = training_features(clients), clients.class_counts()
        weight, bias = (clients.values[name] for name in linear_head(clients.network))
        sent = {name: weight.new_empty(len(clients), *received.tensors[name].shape) for name in (MEANS, COVARIANCE)}
        numbers = features.values[0].numel() + known.covariance.numel()
        for group in torch.arange(len(clients), device=weight.device).split(max(1, AT_A_TIME // numbers)):
            own, frequent = features.of(group), priors(counts[group])
            mixture = self._mixture(own, known, frequent)
            weight[group], bias[group] = (part.to(weight) for part in mixture.classifier(frequent))
            sent[MEANS][group], sent[COVARIANCE][group] = mixture.means.to(weight), mixture.covariance.to(weight)
        return sent

    def _mixture(self, own: Features, known: Gaussians, frequent: Tensor) -> Gaussians:
        """The clients' estimates and the global ones, in the shares that do best on samples left out."""
        betas = torch.tensor(self.betas).to(known.means)
        chosen = betas[:1].expand(len(frequent))
        if len(betas) > 1:
            left_out = torch.zeros(len(betas), len(frequent)).to(known.means)
            for rest, inside in own.folds(self.folds):
                estimate = rest.estimate(known, self.ridge)
                for row, beta in enumerate(betas):
                    losses = own.losses(known.mixed(estimate, beta).classifier(frequent))
                    left_out[row] += losses.where(inside, 0.0).sum(1)
            chosen = betas[left_out.argmin(0)]
        return known.mixed(own.estimate(known, self.ridge), chosen)


def training_features(clients: Cohort) -> Features:
    """What each client's head is given on its training samples, in the network's precision."""
    return Features(clients.features("train").flatten(2), clients.class_members())


def priors(counts: Tensor) -> Tensor:
    """How frequent classes are, by how many samples [..., classes] there are of each."""
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1) + RARE
    return shares / shares.sum(-1, keepdim=True)


def linear_head(network: Network) -> tuple[str, str]:
    """The names of the head's weights and biases, which linear discriminants replace."""
    path = network.layers[-1].name
    part = network.module.get_submodule(path)
    if isinstance(part, nn.Sequential):
        *before, (name, last) = part.named_children()
        if all(isinstance(child, nn.Flatten) for _, child in before):
            path, part = f"{path}.{name}", last
    if not isinstance(part, nn.Linear) or part.bias is None:
        raise UserError(f"pfedfda: the head of {network.name} is no linear layer with a bias; allowed: such a head")
    if len(network.layers) == 1:
        raise UserError(f"pfedfda: {network.name} has a head and no body to share; allowed: two layers or more")
    return f"{path}.weight", f"{path}.bias"

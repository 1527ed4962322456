"""What local training minimizes: a function of one client's model and one batch, written without the stack."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tailorfl.detection.multibox import multibox_losses
from tailorfl.models.network import Network
from tailorfl.models.own_classes import without


@dataclass(frozen=True)
class Batch:
    """Samples of one client. Padding rows have ``valid`` 0 and must not count; ``weight`` is 0 there too."""

    inputs: Tensor
    targets: Tensor
    valid: Tensor
    weight: Tensor
    size: Tensor  # how many samples are real, a scalar; 1 where none is

    def mean(self, losses: Tensor) -> Tensor:
        """The weighted mean of one number a sample over the real samples of the batch."""
        return (losses * self.weight).sum() / self.size


@dataclass(frozen=True)
class Client:
    """What an objective sees of a client: its weights as a callable model, and what the method laid beside them."""

    network: Network
    values: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    common: Mapping[str, Tensor]
    absent: Tensor | None = None  # booleans [classes]: those that are out of the question for this client

    def predict(self, batch: Batch) -> Tensor:
        return self._possible(self.network.forward(self.values, batch.inputs, batch.valid, train=True))

    def features(self, batch: Batch, head: int = 1) -> Tensor:
        """What the last layers, so many, are given."""
        return self.network.features(self.values, batch.inputs, batch.valid, train=True, head=head)

    def head(self, features: Tensor, batch: Batch | None = None) -> Tensor:
        """The head on features; with the batch they come from, its norms leave out padding."""
        return self._possible(
            self.network.head(self.values, features, train=True, valid=batch.valid if batch else None)
        )

    def _possible(self, outputs: Tensor) -> Tensor:
        return outputs if self.absent is None else without(outputs, self.absent)


Objective = Callable[[Client, Batch], Tensor]
"""A pure function to a scalar. It must be hashable by value: a function, or a frozen dataclass with ``__call__``."""


def cross_entropy(client: Client, batch: Batch) -> Tensor:
    """The mean cross-entropy of the batch, for classes."""
    return batch.mean(class_losses(client.predict(batch), batch.targets))


def squared_error(client: Client, batch: Batch) -> Tensor:
    """The mean squared error of the batch, for real-valued targets."""
    return batch.mean((client.predict(batch).squeeze(-1) - batch.targets) ** 2)


def multibox(client: Client, batch: Batch) -> Tensor:
    """The mean of SSD's multibox loss over the images of the batch, for objects."""
    return batch.mean(multibox_losses(client.predict(batch), batch.targets, client.network.anchors()))


def class_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each sample; in fewer operations than torch's, which provides for ignored classes."""
    return -F.log_softmax(outputs, dim=-1).gather(-1, targets[..., None]).squeeze(-1)

"""How good models are on samples: by hits and losses, or by the objects that they find in images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tailorfl.data.federated import FederatedData
from tailorfl.detection.detections import detect
from tailorfl.detection.mean_ap import coco, voc07
from tailorfl.detection.multibox import multibox_losses


@dataclass(frozen=True)
class Scores:
    """What an evaluation found for each client of a cohort; sums, so that parts can be added."""

    samples: Tensor  # int64 [clients]
    correct: Tensor  # int64 [clients]; of detectors float64: their mean average precision, times the samples
    loss: Tensor  # summed over the samples, [clients]

    @staticmethod
    def of(each: Sequence[tuple[int, float, float]]) -> "Scores":
        """From the numbers of each client."""
        samples = torch.tensor([number for number, _, _ in each], dtype=torch.int64)
        correct, loss = (torch.tensor([one[k] for one in each], dtype=torch.float64) for k in (1, 2))
        return Scores(samples, correct, loss)


def score(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hits and losses of each sample, [clients, samples]; regression has no hits."""
    if targets.is_floating_point():
        losses = (outputs.squeeze(-1) - targets) ** 2
        return torch.zeros_like(targets, dtype=torch.bool), losses.double()
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape)
    return outputs.argmax(-1) == targets, losses.double()


@dataclass
class Detections:
    """What one detector found in images of some data, by their rows."""

    data: FederatedData
    anchors: Tensor
    found: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def add(self, rows: Tensor, outputs: Tensor) -> None:
        """The detector's outputs on the images of these rows."""
        targets = self.data.targets[rows.to(self.data.targets.device)].to(outputs.device)
        losses = multibox_losses(outputs, targets, self.anchors).tolist()
        for row, objects, loss in zip(rows.tolist(), detect(outputs, self.anchors), losses, strict=True):
            self.found[row], self.losses[row] = objects.cpu(), loss

    def of(self, rows: Tensor) -> tuple[int, float, float]:
        """Images, mean average precision times images, and summed loss; no images where there is no object to find."""
        numbers = rows.tolist()
        precision = mean_average_precision(self.data, rows, [self.found[row] for row in numbers])
        if math.isnan(precision):
            return 0, 0.0, 0.0
        return len(numbers), precision * len(numbers), math.fsum(self.losses[row] for row in numbers)


def mean_average_precision(data: FederatedData, rows: Tensor, found: Sequence[Tensor]) -> float:
    """Of what was found in the images of these rows, by the data's metric; NaN where there is no object to find."""
    truth = list(data.targets[rows.to(data.targets.device)].cpu())
    if data.metric == "coco":
        return coco(found, truth, data.num_classes, data.input_shape[-1])
    return voc07(found, truth, data.num_classes)

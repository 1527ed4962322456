"""Networks that follow their data: wider for more classes, deeper for larger images (ScalableFL)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from tailorfl.errors import UserError
from tailorfl.models.reduction import parameters

TOLERANCE = 1e-4  # of a width ratio that is searched for


@dataclass(frozen=True)
class Kind:
    """What the network of a client depends on."""

    name: str
    input_shape: tuple[int, ...]
    classes: int
    stages: int | None = None  # where they are given; else they follow from the image size


@dataclass(frozen=True)
class Size:
    """A network's width ratio and its stages: the paper's kappa and c."""

    width: float
    stages: int


def width_ratio(classes: int, base_classes: int) -> float:
    """The hidden channel ratio kappa = log10(K) / log10(K0); a detector of one class is as wide as one of two."""
    return math.log(max(classes, 2)) / math.log(max(base_classes, 2))


def depth(side: int, base_size: int) -> int:
    """The number of stages c = ceil(log2(H / H0)), each of which halves the feature map, down to H0 or less."""
    return math.ceil(math.log2(side / base_size))


@dataclass(frozen=True)
class Scaling:
    """The one rule by which all networks of a federation of groups are made."""

    kinds: tuple[Kind, ...]
    build: Callable[[Kind, Size], nn.Module]
    base_classes: int
    base_size: int

    def size(self, kind: Kind) -> Size:
        """By the classes and the image size."""
        stages = kind.stages or depth(kind.input_shape[-1], self.base_size)
        if stages < 1:
            raise UserError(
                f"groups: {kind.name} has images of {kind.input_shape[-1]} pixels, too small for a network whose last "
                f"feature map has {self.base_size}; allowed: a smaller base_size"
            )
        return Size(width_ratio(kind.classes, self.base_classes), stages)

    def sizes(self) -> tuple[Size, ...]:
        return tuple(map(self.size, self.kinds))

    def matched(self, stages: int) -> tuple[Size, ...]:
        """Networks of so many stages for all, as wide as it takes to have as many parameters as by the rule."""
        return tuple(self._matched(kind, stages) for kind in self.kinds)

    def _matched(self, kind: Kind, stages: int) -> Size:
        own = self.size(kind)
        if own.stages == stages:
            return own
        wanted = parameters(self.build(kind, own))
        low, high = 0.0, 1.0
        while self._count(kind, high, stages) < wanted:
            low, high = high, 2 * high
        while high - low > TOLERANCE:
            middle = (low + high) / 2
            low, high = (middle, high) if self._count(kind, middle, stages) <= wanted else (low, middle)
        nearest = min((low or high, high), key=lambda width: abs(self._count(kind, width, stages) - wanted))
        return Size(nearest, stages)

    def _count(self, kind: Kind, width: float, stages: int) -> int:
        return parameters(self.build(kind, Size(width, stages)))

    def largest(self, sizes: Sequence[Size]) -> tuple[Kind, Size]:
        """Of the global model: as wide and as deep as any client's."""
        kind = max(self.kinds, key=lambda one: (one.input_shape[-1], one.classes))
        return kind, Size(max(size.width for size in sizes), max(size.stages for size in sizes))

"""Plots as plain data: what is drawn, in which words and numbers. How is left to the page and to the figures."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

MOST = 400  # points of a line, or columns of a heat map
LONGEST_NAME = 24

Numbers = list[float | None]


@dataclass(frozen=True)
class Axis:
    """What is along it."""

    label: str
    low: float | None = None
    high: float | None = None
    whole: bool = False  # whole numbers only
    log: bool = False
    ticks: tuple[float, ...] = ()  # where there are to be marks, and no others


@dataclass(frozen=True)
class Band:
    """Around a line, and what it is a band over."""

    over: str
    low: Numbers
    high: Numbers


@dataclass(frozen=True)
class Line:
    """``style`` is a place in the palette: the same entry looks alike in all plots."""

    name: str
    style: int
    x: list[float]
    y: Numbers
    bands: tuple[Band, ...] = ()
    text: tuple[str, ...] = ()  # of each point, beside its numbers
    dots: bool = True


@dataclass(frozen=True)
class Points:
    """A cloud of points, each with a name, and of how many it is one."""

    name: str
    style: int
    x: list[float]
    y: list[float]
    text: tuple[str, ...]
    many: tuple[int, ...]  # what lies at the same place is one point, the larger the more


@dataclass(frozen=True)
class Bars:
    """A bar for each of the labels of the axis."""

    name: str
    style: int
    labels: tuple[str, ...]
    y: Numbers


@dataclass(frozen=True)
class HeatMap:
    """[rows][columns]."""

    name: str  # what its numbers are
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: list[Numbers]
    low: float | None = None
    high: float | None = None


Mark = Line | Points | Bars | HeatMap


@dataclass(frozen=True)
class Plot:
    """One picture: a key that is unique within its panel, a title, and a sentence that says what to see."""

    key: str
    title: str
    about: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    panel: str = ""
    diagonal: bool = False  # a line on which both axes are equal
    stacked: bool = False  # bars on top of each other
    legend: bool = False  # also where there is one mark only, which is one of several entries

    @property
    def name(self) -> str:
        """For files and anchors."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.panel}-{self.key}".lower()).strip("-.")


@dataclass(frozen=True)
class Scale:
    """What is on the axis of figures, accuracies in per cent or losses, and how many points a line may have."""

    regression: bool
    most: int = MOST

    @property
    def what(self) -> str:
        return "loss" if self.regression else "accuracy"

    @property
    def unit(self) -> float:
        return 1.0 if self.regression else 100.0

    @property
    def label(self) -> str:
        return "loss" if self.regression else "accuracy, %"


def over_seeds(figures: Sequence[Sequence[float]]) -> Band:
    """One standard deviation below and above the mean of the seeds, for each point of a line."""
    ends: list[Numbers] = []
    for sign in (-1, 1):
        ends.append([fmean(some) + sign * (stdev(some) if len(some) > 1 else 0.0) for some in figures])
    return Band("one deviation over seeds", *ends)


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly spread, the first and the last among them."""
    count = len(values)
    if count <= most or most < 2:
        return list(values[: max(0, most)])
    return [values[round(place * (count - 1) / (most - 1))] for place in range(most)]


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """Each of its lines without its middle, if it is long: names of a kind differ at one of their ends, mostly."""
    return "\n".join(_cut(line, longest) for line in name.split("\n"))


def _cut(line: str, longest: int) -> str:
    end = (longest - 1) // 2
    return line if len(line) <= longest else f"{line[: longest - 1 - end]}…{line[-end:]}"


def ticks(names: Sequence[str]) -> tuple[str, ...]:
    """Names of an axis, as short as they can be told apart; no two alike: those would fall together."""
    longest = LONGEST_NAME
    while len({short(name, longest) for name in names}) < len(set(names)):
        longest += LONGEST_NAME
    found: list[str] = []
    taken: set[str] = set()
    for name in names:
        label = short(name, longest)
        while label in taken:
            label += "'"
        taken.add(label)
        found.append(label)
    return tuple(found)


def drawn(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if any(value is not None for value in line.y))

"""Statistics of results: intervals over seeds, and methods compared client by client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from tailorfl.study.folder import CLIENTS
from tailorfl.study.tidy import read_csv

LEVEL = 0.95
MOST_EXACT = 50  # clients, beyond which the normal distribution is as good
SAME = 1e-12  # of two accuracies: what is left of a sum of equal numbers is no difference


@dataclass(frozen=True)
class Interval:
    """The mean over seeds; with two or more its standard deviation, and half of a 95 % interval and its ends."""

    count: int
    mean: float
    std: float | None = None
    half: float | None = None  # what is written after ±
    low: float | None = None
    high: float | None = None


def interval(values: Sequence[float], possible: tuple[float, float] = (-inf, inf)) -> Interval:
    """By Student's t: seeds are few, so their own spread is uncertain too. Its ends are what a figure can be."""
    count, middle = len(values), fmean(values)
    if count < 2:
        return Interval(count, middle)
    from scipy.special import stdtrit

    spread = stdev(values)
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * spread / sqrt(count)
    low, high = (min(max(end, possible[0]), possible[1]) for end in (middle - half, middle + half))
    return Interval(count, middle, spread, half, low, high)


@dataclass(frozen=True)
class Paired:
    """One method beside another, client by client."""

    clients: int
    difference: float  # the mean over clients
    median: float
    higher: int  # clients with a higher figure than under the other method
    lower: int
    p: float  # Wilcoxon's signed-rank test, two-sided


def paired(mine: Mapping[str, float], theirs: Mapping[str, float]) -> Paired | None:
    """Over the clients that both have; None where there are none."""
    differences = [mine[client] - theirs[client] for client in mine if client in theirs]
    if not differences:
        return None
    differences = [0.0 if abs(one) < SAME else one for one in differences]
    higher, lower = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    return Paired(len(differences), fmean(differences), median(differences), higher, lower, signed_rank(differences))


def signed_rank(differences: Sequence[float]) -> float:
    """The p-value of Wilcoxon's test; clients without a difference say nothing, and if none has one it is 1.

    It is exact for up to 50 clients, and else by the normal distribution, corrected for ties.
    """
    there = [round(one, 12) for one in differences if one]  # rounded, so that equal ones are ties
    if not there:
        return 1.0
    from scipy.stats import rankdata, wilcoxon

    if len(there) > MOST_EXACT:
        return float(wilcoxon(there, method="approx").pvalue)
    ranks = [round(2 * rank) for rank in rankdata([abs(one) for one in there])]  # doubled: ties have halves
    return _exact(ranks, sum(rank for rank, one in zip(ranks, there, strict=True) if one > 0))


def _exact(ranks: Sequence[int], positive: int) -> float:
    """How often signs that fall by chance come to as far a sum of ranks; scipy has it only where no two are tied."""
    ways = np.ones(1)  # in how many ways the positive ranks add up to each sum
    for rank in ranks:
        ways = np.concatenate([ways, np.zeros(rank)]) + np.concatenate([np.zeros(rank), ways])
    tail = min(ways[: positive + 1].sum(), ways[positive:].sum())
    return min(1.0, float(2 * tail / ways.sum()))


def holm(values: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, corrected for their number by Holm's method, in the same order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    corrected, largest = [1.0] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def client_figures(folder: Path, column: str = "accuracy") -> dict[str, float]:
    """How each client of a run is served in the end; not new clients, nor those whose model diverged."""
    rows = read_csv(folder / CLIENTS)
    found = {row["client"]: float(row[column]) for row in rows if row["new"] == "0" and row[column]}
    return {client: value for client, value in found.items() if isfinite(value)}


def over_seeds(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each client over the runs, of clients that are in all of them."""
    first, *others = runs
    return {client: fmean(run[client] for run in runs) for client in first if all(client in run for run in others)}

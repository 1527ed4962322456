"""Several methods on the same federation: the same data, partition, initial weights and sequence of clients."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tailorfl.data.extras import picture
from tailorfl.errors import UserError
from tailorfl.methods import find_method
from tailorfl.study.config import Config, Experiment, configure
from tailorfl.study.folder import ROUNDS, read_lines
from tailorfl.study.grid import Grid, Line, take_seeds
from tailorfl.study.palette import look
from tailorfl.study.statistics import Paired, client_figures, holm, over_seeds, paired
from tailorfl.study.tidy import COMPARISON, STATISTICS, columns_of, flat, write_csv

log = logging.getLogger(__name__)


def plan_comparison(names: Sequence[str], settings: Mapping[str, Any]) -> tuple[list[Line], tuple[int, ...]]:
    """A line a method, and the seeds."""
    seeds, rest = take_seeds(settings)
    configs = configure_all(names, rest)
    lines = [Line(name, name.replace(":", "."), {"method": name}, configs[k]) for k, name in enumerate(names)]
    return lines, seeds or (configs[0].experiment.seed,)


def configure_all(names: Sequence[str], settings: Mapping[str, Any]) -> list[Config]:
    """A configuration for each method; a key that only some of the methods have reaches those."""
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"method {', '.join(sorted(twice))} is named twice; allowed: each method once")
    kinds = {name: find_method(name) for name in names}
    known = set(Experiment.model_fields).union(*(kind.model_fields for kind in kinds.values()))
    configs = []
    for name, kind in kinds.items():
        skipped = known - set(Experiment.model_fields) - set(kind.model_fields)
        configs.append(configure(name, {key: value for key, value in settings.items() if key not in skipped}))
    held_out = {config.experiment.validation_fraction for config in configs}
    if len(held_out) > 1:  # some methods ask for validation data; all are to train on the same rows
        log.info("validation_fraction=%g for all methods, since one of them needs it", max(held_out))
        return configure_all(names, {**settings, "validation_fraction": max(held_out)})
    return configs


def write_table(summaries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """The summaries as one CSV file, a row a method; what is not one figure, such as stages, is in its summary only."""
    write_csv([flat(summary) for summary in summaries], folder / COMPARISON)
    return folder / COMPARISON


def over_runs(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summaries of one method over seeds as one: numbers are means, other values stay where all have the same."""
    first, *others = runs = [flat(summary) for summary in summaries]
    if not others:
        return first
    found: dict[str, Any] = {}
    for key in columns_of(runs):
        there = [run[key] for run in runs if run.get(key) is not None]
        if key == "seed":
            found["seeds"] = " ".join(map(str, there))
        elif len(set(there)) <= 1:
            found[key] = there[0] if there else None
        else:
            found[key] = fmean(there) if all(isinstance(value, int | float) for value in there) else None
    return found


# Client by client.


def pairs(grid: Grid) -> dict[Line, Paired]:
    """Every method beside the first, client by client: means over the seeds that both have."""
    first, *others = grid.lines
    found = {}
    for line in others:
        both = [seed for seed in grid.of(line) if seed in grid.of(first)]
        if both and (pair := paired(_served(grid, line, both), _served(grid, first, both))):
            found[line] = pair
    return found


def _served(grid: Grid, line: Line, seeds: Sequence[int]) -> dict[str, float]:
    column = "loss" if grid.regression else "accuracy"
    return over_seeds([client_figures(grid.path(line, seed), column) for seed in seeds])


def statistics(grid: Grid) -> list[dict[str, Any]]:
    """A row a method: intervals over seeds, and how it compares with the first, client by client."""
    compared = pairs(grid)
    corrected = dict(zip(compared, holm([pair.p for pair in compared.values()]), strict=True))
    rows = []
    for line, row in zip(grid.measured(), grid.statistics(), strict=True):
        pair = compared.get(line)
        beside = {name: getattr(pair, name) if pair else None for name in Paired.__dataclass_fields__}
        reference = grid.lines[0].title if pair else None
        rows.append({**row, "reference": reference, **beside, "p_holm": corrected.get(line)})
    return rows


def write_statistics(grid: Grid) -> list[dict[str, Any]]:
    rows = statistics(grid)
    write_csv(rows, grid.folder / STATISTICS)
    return rows


# Curves.


def draw_curves(runs: Mapping[str, Sequence[Path]], path: Path) -> None:
    """Accuracy in per cent (or loss) over rounds, a line a method, and what a client is served with, sorted.

    Of several seeds the curve is the mean, and the clients of all are sorted together.
    """
    lines = {name: [evaluated_rounds(folder) for folder in folders] for name, folders in runs.items()}
    regression = all(line[-1]["personalized_accuracy"] is None for found in lines.values() for line in found)
    key, label = ("personalized_loss", "loss") if regression else ("personalized_accuracy", "personalized accuracy, %")
    unit = 1 if regression else 100
    with picture(path, (10, 4)) as figure:
        rounds, clients = figure.subplots(1, 2)
        for number, (name, found) in enumerate(lines.items()):
            curve = _mean_curve(found, key)
            values = [unit * value for value in curve.values()]
            rounds.plot(list(curve), values, label=name, **look(number, len(curve)))
            every = [client_figures(folder, "loss" if regression else "accuracy") for folder in runs[name]]
            served = sorted(unit * value for one in every for value in one.values())
            places = [100 * (k + 0.5) / len(served) for k in range(len(served))]
            clients.plot(places, served, **look(number, len(served)))
        rounds.set(xlabel="round", ylabel=label, title="over rounds")
        rounds.locator_params(axis="x", integer=True)
        clients.set(xlabel="share of clients, %", ylabel=label, title="each client, sorted")
        for axes in (rounds, clients):
            axes.grid(alpha=0.3)
        if len(lines) <= 4:  # more would hide the curves
            rounds.legend(frameon=False)
        else:
            legend_below(figure, *rounds.get_legend_handles_labels())


LETTERS = 14  # of a small font in an inch of a picture


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below all plots, with as many names in a line as the picture is wide."""
    longest = max(map(len, labels), default=0) + 6  # each has a sign before it
    across = max(1, min(8, int(LETTERS * figure.get_figwidth()) // longest))
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=across, fontsize="small")


def _mean_curve(runs: Sequence[Sequence[dict[str, Any]]], key: str) -> dict[int, float]:
    """Over the runs that were evaluated after a round."""
    found: dict[int, list[float]] = {}
    for line in (line for lines in runs for line in lines):
        if line[key] is not None:
            found.setdefault(line["round"], []).append(line[key])
    return {number: fmean(found[number]) for number in sorted(found)}


def evaluated_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds that hold an evaluation."""
    return [line for line in read_lines(folder / ROUNDS) if "personalized_loss" in line]

"""Several methods on the same federation: the same data, partition, initial weights and sequence of clients."""

import csv
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import picture
from tailorfl.errors import UserError
from tailorfl.methods import find_method
from tailorfl.study.config import Config, Experiment, configure
from tailorfl.study.run import ROUNDS, read_lines

TABLE, PLOT = "comparison.csv", "comparison.png"

log = logging.getLogger(__name__)


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


def run_all(
    configs: Sequence[Config], folder: Path, run: Callable[[Config, Path], Any], stop: Callable[[], bool] = bool
) -> list[dict[str, Any]] | None:
    """Run each method in a folder of its own; None if it was stopped within a method or between two."""
    summaries: list[dict[str, Any]] = []
    for config in configs:
        if summaries and stop():
            return None
        summary = run(config, folder / config.method_name.replace(":", "."))
        if summary is None:
            return None
        summaries.append(summary)
    return summaries


def write_table(summaries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """The summaries as one CSV file, a row a method; what is not one figure, such as stages, is in its summary only."""
    path = folder / TABLE
    figures = [{key: value for key, value in one.items() if not isinstance(value, list)} for one in summaries]
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for one in figures for key in one)))
        writer.writeheader()
        writer.writerows(figures)
    return path


COLOURS = 10  # of a plot's lines, before they begin again
STYLES = ("-", "--", ":", "-.")


def draw_curves(folders: Mapping[str, Path], path: Path) -> None:
    """Accuracy (or loss) over rounds, a line a method, and the accuracy a client is served with, sorted."""
    lines = {name: evaluated_rounds(folder) for name, folder in folders.items()}
    regression = all(line[-1]["personalized_accuracy"] is None for line in lines.values())
    key, label = ("personalized_loss", "loss") if regression else ("personalized_accuracy", "personalized accuracy")
    with picture(path, (10, 4)) as figure:
        rounds, clients = figure.subplots(1, 2)
        for number, (name, found) in enumerate(lines.items()):
            style = STYLES[number // COLOURS % len(STYLES)]  # where the colours begin again
            rounds.plot(
                [line["round"] for line in found], [line[key] for line in found], style, marker="o", ms=3, label=name
            )
            served = _served(folders[name], "loss" if regression else "accuracy")
            clients.plot([100 * (k + 0.5) / len(served) for k in range(len(served))], served, style)
        rounds.set(xlabel="round", ylabel=label, title="over rounds")
        rounds.locator_params(axis="x", integer=True)
        clients.set(xlabel="share of clients, %", ylabel=label, title="each client, sorted")
        for axes in (rounds, clients):
            axes.grid(alpha=0.3)
        if len(lines) <= 4:  # more would hide the curves
            rounds.legend(frameon=False)
        else:
            figure.legend(frameon=False, loc="outside lower center", ncols=8, fontsize="small")


def evaluated_rounds(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds that hold an evaluation."""
    return [line for line in read_lines(folder / ROUNDS) if "personalized_loss" in line]


def _served(folder: Path, column: str) -> list[float]:
    with (folder / "clients.csv").open() as file:
        return sorted(float(row[column]) for row in csv.DictReader(file) if row[column] and row["new"] == "0")

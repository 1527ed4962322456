"""Pictures of a study: curves over rounds, over the values of a sweep, or of what a method measures."""

import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tailorfl.data.extras import picture
from tailorfl.study.compare import legend_below
from tailorfl.study.folder import MEASURES
from tailorfl.study.outcome import BEST, Outcome, unit
from tailorfl.study.palette import look
from tailorfl.study.plan import Plan
from tailorfl.study.recipe import folder_of
from tailorfl.study.tidy import read_csv

CLOSEST = 0.04  # of a picture's width, between two values of a sweep


def draw(outcome: Outcome, path: Path) -> None:
    """Accuracy over rounds, a panel a column; over the values of a sweep; or what a method measures of its clients.

    Bands are one deviation over seeds.
    """
    plan = outcome.plan
    recipe, sweep = plan.recipe, plan.recipe.kind == "sweep"
    panels = (recipe.over or "",) if sweep else plan.columns
    across = 2 if len(panels) == 4 else min(len(panels), 3)
    down = math.ceil(len(panels) / across)
    with picture(path, (5 * max(across, 1.4), 3.6 * down + 0.6)) as figure:
        grid = list(figure.subplots(down, across, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            if recipe.kind == "measures":
                lines = _measures(outcome, panel)
            else:
                found = _values(outcome) if sweep else _rounds(outcome, panel)
                lines = {row: found.get(row, {}) for row in plan.rows}
            for number, (name, line) in enumerate(lines.items()):
                draw_line(axes, name, number, line)
            axes.set(xlabel=panel if sweep else (recipe.against or "round").replace("_", " "), ylabel=_label(plan))
            axes.set_title(recipe.title if sweep else panel, fontsize="medium")
            axes.grid(alpha=0.3)
            if sweep:
                scale(axes, _places(plan))
            else:
                axes.locator_params(axis="x", integer=True)  # rounds are whole numbers
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles, labels = grid[0].get_legend_handles_labels()
        legend_below(figure, handles, labels)


Line = dict[float, list[float]]  # place on the axis, the figures of the seeds


def _rounds(outcome: Outcome, column: str) -> dict[str, Line]:
    found: dict[str, Line] = {}
    for row, at, seed in outcome.summaries:
        if at == column:
            for number, value in outcome.curve(row, column, seed).items():
                found.setdefault(row, {}).setdefault(number, []).append(value)
    return found


def _measures(outcome: Outcome, column: str) -> dict[str, Line]:
    """Means over the clients that a method measured, evaluations together; rows without a place are left out."""
    recipe = outcome.plan.recipe
    found: dict[str, Line] = {}
    for row, at, seed in outcome.summaries:
        measured = outcome.folder / folder_of(recipe, row, column, seed) / MEASURES
        if at != column or not measured.is_file():
            continue
        every = read_csv(measured)
        first = recipe.since * max((int(one["round"]) for one in every), default=0)
        rows = [one for one in every if int(one["round"]) > first and float(one[recipe.against or ""] or -1) >= 0]
        for line in recipe.lines:
            groups: Line = {}
            for one in rows:
                groups.setdefault(float(one[recipe.against or ""]), []).append(float(one[line]))
            name = line.replace("_", " ") if len(outcome.plan.rows) == 1 else f"{row}, {line.replace('_', ' ')}"
            for place, values in groups.items():
                if len(values) >= recipe.least:
                    found.setdefault(name, {}).setdefault(place, []).append(unit(recipe) * mean(values))
    return found


def _values(outcome: Outcome) -> dict[str, Line]:
    places = _places(outcome.plan)
    found: dict[str, Line] = {}
    for row, column, _ in outcome.summaries:
        found.setdefault(row, {})[places[column]] = list(outcome.scores((row, column)).values())
    return found


def _places(plan: Plan) -> dict[str, float]:
    settings = {column: plan.recipe.columns[column].settings for column in plan.columns}
    return place_values({column: own.get(plan.recipe.over or "") for column, own in settings.items()})


# For all pictures.


def place_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Where values of a sweep lie, by name: numbers by size where that leaves room, others one after the other."""
    if in_numbers(values):
        places = {name: float(value) for name, value in values.items()}
        if _apart(places.values()):
            return places
    return {name: float(number) for number, name in enumerate(values)}


def in_numbers(values: Mapping[str, Any]) -> bool:
    """Whether all values of a key are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())


def _apart(places: Collection[float]) -> bool:
    """Whether no two ticks are so near that what is written below them would overlap."""
    on_axis = sorted(map(math.log, places) if logarithmic(places) else places)
    gaps = [later - sooner for sooner, later in pairwise(on_axis)]
    return not gaps or min(gaps) >= CLOSEST * (on_axis[-1] - on_axis[0])


def logarithmic(places: Collection[float]) -> bool:
    """Whether values lie so far apart that equal steps of an axis should be equal factors."""
    return min(places) > 0 and max(places) >= 10 * min(places)


def draw_line(axes: Any, name: str, number: int, line: Line) -> None:
    """The means over seeds, and a band of one deviation."""
    places = sorted(line)
    style = look(number, len(places))
    middle = [mean(line[place]) for place in places]
    axes.plot(places, middle, label=name, **style)
    spread = [stdev(line[place]) if len(line[place]) > 1 else 0.0 for place in places]
    lower, upper = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(places, lower, upper, color=style["color"], alpha=0.15, linewidth=0)


def scale(axes: Any, places: Mapping[str, float]) -> None:
    """A sweep shows its values, on a logarithmic axis where they lie far apart."""
    if logarithmic(places.values()):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(places), rotation=90 if len(places) > 10 else 0)
    axes.minorticks_off()


def _label(plan: Plan) -> str:
    recipe = plan.recipe
    named = {recipe.measure_of(row, column) for row in recipe.rows for column in recipe.columns}
    what = {name.replace("_", " ") for name in ({"accuracy"} if recipe.kind == "measures" else named)}
    label = what.pop() if len(what) == 1 else "accuracy" if recipe.percent else ""
    best = f", {BEST}" if plan.figure == "best" and recipe.kind == "sweep" else ""
    return f"{label}, %{best}" if recipe.percent else f"{label}{best}"

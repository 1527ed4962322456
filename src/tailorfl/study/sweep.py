"""A method over a grid of settings: every combination of the values that keys are given."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import yaml

from tailorfl.data.extras import picture
from tailorfl.errors import UserError
from tailorfl.study.compare import legend_below
from tailorfl.study.config import check_new, configure, parse_yaml, read_settings, shown
from tailorfl.study.grid import Grid, Line, take_seeds
from tailorfl.study.panels import draw_line, in_numbers, place_values, scale
from tailorfl.study.recipe import SAFE
from tailorfl.study.tables import number, percent
from tailorfl.study.tidy import STATISTICS, write_csv

Name = TypeVar("Name")

LONGEST = 120  # letters in the name of a folder
HELD_OUT = "validation_fraction"


def read_values(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each ``key=value,value``: commas outside of brackets, braces and quotes part them."""
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        check_new(key, found)
        try:
            values = parse_yaml(f"[{text}]") if equals and key else None
        except yaml.YAMLError:
            values = None
        # What is no list of values may be one, or is refused.
        found[key] = values or list(read_settings([pair]).values())
    return found


def plan_sweep(
    method: str, values: Mapping[str, Sequence[Any]], base: Mapping[str, Any]
) -> tuple[list[Line], tuple[int, ...]]:
    """A line for each combination, the last key running fastest, and the seeds; ``base`` is set for all."""
    swept = {key: list(some) for key, some in values.items() if len(some) > 1 and key != "seeds"}
    single = {key: some[0] for key, some in values.items() if len(some) == 1}
    if len(values.get("seeds", ())) > 1:  # seeds=0,1 is seeds=[0,1]
        single["seeds"] = list(values["seeds"])
    seeds, rest = take_seeds({**base, **single})
    _check(swept)
    lines = [_line(method, dict(zip(swept, point, strict=True)), rest) for point in product(*swept.values())]
    for place, line in enumerate(lines):
        if line.settings in [other.settings for other in lines[:place]]:
            raise UserError(f"{line.title} is named twice; allowed: each value once")
    held_out = {line.config.experiment.validation_fraction for line in lines}
    if len(held_out) > 1 and HELD_OUT not in swept:  # some settings ask for validation data; all train on the same rows
        return plan_sweep(method, values, {**base, HELD_OUT: max(held_out)})
    return lines, seeds or (lines[0].config.experiment.seed,)


def _check(swept: Mapping[str, Sequence[Any]]) -> None:
    if not swept:
        raise UserError("no key has several values; allowed: tailor sweep METHOD key=a,b [key=c,d] [key=value ...]")
    for key, instead in (("seed", "seeds=[...]"), ("method", "tailor compare METHOD METHOD")):
        if key in swept:
            raise UserError(f"{key}={shown(swept[key])}: not a setting to choose; allowed: {instead}")
    for key, values in swept.items():
        twice = [value for place, value in enumerate(values) if value in values[:place]]
        if twice:
            raise UserError(f"{key}={shown(values)}: {shown(twice[0])} is named twice; allowed: each value once")


def _line(method: str, point: Mapping[str, Any], rest: Mapping[str, Any]) -> Line:
    config = configure(method, {**rest, **point})
    # A number in words to YAML, such as 1e-3, is known by its value, so that other spellings of it are the same.
    flat = config.flat()
    meant = {
        key: flat[key] if isinstance(value, str) and _is_number(flat.get(key)) else value
        for key, value in point.items()
    }
    said = [f"{key}={shown(value)}" for key, value in meant.items()]
    return Line(" ".join(said), _folder(",".join(said)), {"method": method, **meant}, config)


def _folder(name: str) -> str:
    """The name of a setting's folder, whatever other settings there are: a digest tells what is cut or replaced."""
    safe = "".join(letter if SAFE.fullmatch(letter) or letter in "=,._+-" else "-" for letter in name)
    if safe == name and len(name) <= LONGEST:
        return name
    return f"{safe[:LONGEST]}-{sha256(name.encode()).hexdigest()[:8]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def swept_keys(lines: Sequence[Line]) -> list[str]:
    return [key for key in lines[0].settings if key != "method"]


def _competing(grid: Grid) -> dict[Line, list[Any]]:
    """Of each setting of which no run is missing, what it is chosen by, for every seed."""
    measure = _measure(grid)
    found = {line: [one.get(measure) for one in runs.values()] for line, runs in grid.measured().items()}
    return {line: some for line, some in found.items() if len(some) == len(grid.seeds) and None not in some}


def _leading(values: Mapping[Name, Sequence[float]], regression: bool) -> list[Name]:
    """Those whose mean over seeds no other one surpasses."""
    means = {name: fmean(some) for name, some in values.items()}
    top = (min if regression else max)(means.values(), default=None)
    return [name for name, mean in means.items() if mean == top]


def _measure(grid: Grid) -> str:
    """What settings are chosen by."""
    return "validation_loss" if grid.regression else "validation_accuracy"


def best_of(values: Mapping[str, Sequence[float]], regression: bool) -> str:
    """Which setting has the highest accuracy on validation data, of a regression the lowest loss, in a line.

    Empty where there are none. It is never chosen by test data.
    """
    leading = _leading(values, regression)
    if not leading:
        return ""
    chosen, ties = leading[0], len(leading) - 1
    mean, seeds = fmean(values[chosen]), len(values[chosen])
    what, found = ("loss", number(mean)) if regression else ("accuracy", f"{percent(mean)} %")
    over = f", mean over {seeds} seeds" if seeds > 1 else ""
    also = f"; {ties} other{'s have' if ties > 1 else ' has'} the same, the first is named" if ties else ""
    return f"best by validation {what}: {chosen} ({found}{over}{also})"


def choice(grid: Grid) -> str:
    """The best setting in a line, or why none can be named."""
    said = best_of({line.title: some for line, some in _competing(grid).items()}, grid.regression)
    if said:
        return said
    if any(one.get(_measure(grid)) is not None for one in grid.summaries.values()):
        return "no setting is chosen: of each a run is missing"
    return (
        "no setting is chosen: there is no validation data, and test data is not to choose by; "
        "allowed: a validation_fraction above 0"
    )


def write_statistics(grid: Grid) -> None:
    """A row a setting: intervals over seeds."""
    write_csv(grid.statistics(), grid.folder / STATISTICS)


def draw_sweep(grid: Grid, path: Path) -> None:
    """How clients are served over the values of a key; of several keys a line for each combination of the others."""
    found, keys = grid.measured(), swept_keys(grid.lines)
    values = {key: {shown(line.settings[key]): line.settings[key] for line in found} for key in keys}
    along = max(keys, key=lambda key: (in_numbers(values[key]), len(values[key])))
    others = [key for key in keys if key != along]
    places = place_values(values[along])
    with picture(path, (6, 4)) as figure:
        axes = figure.subplots()
        for number, (name, own) in enumerate(_figures(grid, others).items()):
            draw_line(axes, name, number, {places[shown(line.settings[along])]: some for line, some in own.items()})
        axes.set(xlabel=along, ylabel="loss" if grid.regression else "accuracy, %")
        axes.set_title("test data" if others else "", fontsize="medium")
        axes.grid(alpha=0.3)
        if others:
            legend_below(figure, *axes.get_legend_handles_labels())
        else:
            axes.legend(frameon=False)
        scale(axes, places)


def _figures(grid: Grid, others: Sequence[str]) -> dict[str, dict[Line, list[float]]]:
    """By what a line is called: of one key on test and validation data, else on test data by the other keys' values."""
    test, found = "personalized_loss" if grid.regression else "personalized_accuracy", grid.measured()
    unit = 1 if grid.regression else 100
    named = {"": test} if others else {"test": test, "validation": _measure(grid)}
    figures: dict[str, dict[Line, list[float]]] = {}
    for (name, measure), (line, runs) in product(named.items(), found.items()):
        own: list[Any] = [one.get(measure) for one in runs.values()]
        called = name or ", ".join(f"{key}={shown(line.settings[key])}" for key in others)
        if None not in own:
            figures.setdefault(called, {})[line] = [unit * value for value in own]
    return figures

"""The settings of results, and the commands that repeat them."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

from tailorfl.errors import UserError
from tailorfl.report.asked import grid_of
from tailorfl.report.results import Entry, Results, settings_of, shown
from tailorfl.study.compare import configure_all, plan_comparison
from tailorfl.study.config import Config, Experiment, configure
from tailorfl.study.grid import Grid, Line
from tailorfl.study.recipe_files import recipes
from tailorfl.study.sweep import plan_sweep

Settings = dict[str, Any]

UNSET = object()  # unlike every value


@dataclass(frozen=True)
class Repeat:
    """What makes some of the results again, and the complete configuration of the first run among them."""

    label: str
    command: str
    config: str  # YAML


def common_settings(results: Results) -> dict[str, str]:
    """What all runs have alike and is not everybody's default."""
    first, *others = [run.config for run in results.runs]
    alike = [key for key in first if all(key in one and one[key] == first[key] for one in others)]
    chosen = {key: value for run in results.runs for key, value in _chosen(run.config).items()}
    return {key: shown(chosen[key]) for key in alike if key in chosen}


def untold(entries: Sequence[Entry]) -> dict[str, list[str | None]]:
    """The keys that entries share, but not with one value, and that neither names nor methods tell: values of each."""
    configs = [{**settings_of(entry.first), **seeds} for entry, seeds in zip(entries, _own_seeds(entries), strict=True)]
    usual = {entry.method: _usual(entry.method) for entry in entries}
    found: dict[str, list[str | None]] = {}
    for key in dict.fromkeys(key for config in configs for key in config if key != "method"):
        having = [(entry, config[key]) for entry, config in zip(entries, configs, strict=True) if key in config]
        differ = len({repr(value) for _, value in having}) > 1
        if differ and any(usual[entry.method].get(key, UNSET) != value for entry, value in having):
            values = [shown(config[key]) if key in config else None for config in configs]
            if not all(f", {key}={value}" in entry.label for entry, value in zip(entries, values, strict=True)):
                found[key] = values
    return found


def _own_seeds(entries: Sequence[Entry]) -> list[Settings]:
    """The seeds of each where there is none that all have: their clients differ then."""
    every = [sorted({run.seed for run in entry.runs}) for entry in entries]
    if set.intersection(*map(set, every)):
        return [{} for _ in entries]
    return [{"seed": own[0] if len(own) == 1 else own} for own in every]


def repeats(results: Results) -> list[Repeat]:
    """One command for all where there is one, else a command for each entry."""
    grid = grid_of(results)
    planned = {cell.folder: cell.config.flat() for cell in grid.cells} if grid else {}
    asked = [entry for entry in results.entries if _is_of(planned, entry)]
    others = [entry for entry in results.entries if entry not in asked]
    command = _asked(grid) if grid else ""
    whole = _study(results) or _comparison(others) or _sweep(others, results.swept)
    return [
        Repeat(
            _title(entry),
            command if entry in asked else whole or _comparison([entry]) or _run(entry),
            yaml.safe_dump(entry.first.config, sort_keys=False, allow_unicode=True),
        )
        for entry in results.entries
    ]


def _is_of(planned: Mapping[Path, Settings], entry: Entry) -> bool:
    """Whether a comparison or a sweep that is run as it was asked for makes these runs, in these folders."""
    return all(run.folder in planned and _same(planned[run.folder], run.config) for run in entry.runs)


def _title(entry: Entry) -> str:
    return f"{entry.panel}: {entry.label}" if entry.panel else entry.label


# What a command says, and what comes by itself.


def _chosen(config: Settings, needed: Sequence[str] = ()) -> Settings:
    """The settings that a command must name to come to this configuration, beside those that it names in any case."""
    name, own = str(config["method"]), {key: config[key] for key in config if key not in ("method", "seed")}
    usual = _usual(name)
    chosen = {key: value for key, value in own.items() if key in needed or key not in usual or usual[key] != value}
    if (again := _configured(name, chosen)) is None:  # of another version
        return chosen
    # A preset, or another option, may bring a value that is not the usual one.
    chosen |= {key: value for key, value in own.items() if again.get(key) != value}
    for key in [key for key in chosen if key not in needed]:  # and options may follow from others
        fewer = {other: value for other, value in chosen.items() if other != key}
        if (again := _configured(name, fewer)) and _same(again, own):
            chosen = fewer
    plain = {key: _plain(value) for key, value in chosen.items()}
    return plain if (again := _configured(name, plain)) and _same(again, own) else chosen


def _usual(name: str) -> Settings:
    """What is so where nothing is said."""
    try:
        return configure(name, {}).flat()
    except UserError:  # a method of another package, which is not installed here
        return Experiment().model_dump(mode="json")


def _plain(value: Any) -> Any:
    """Without what is null in the mappings of a list, such as groups: nobody types it."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


def _configured(name: str, settings: Settings) -> Settings | None:
    try:
        return configure(name, settings).flat()
    except UserError:
        return None


def _same(again: Settings, config: Settings) -> bool:
    """Whether it comes to this configuration, whatever the seed."""
    return all(key in again and again[key] == value for key, value in config.items() if key != "seed")


# Commands.


def _run(entry: Entry) -> str:
    """A single run, of the first seed."""
    seed = {"seed": entry.first.seed} if entry.first.seed else {}
    return _line(["run", entry.method], {**_chosen(entry.first.config), **seed})


def _study(results: Results) -> str:
    if results.kind != "study":
        return ""
    options = results.options
    pairs = []
    for key in ("column", "methods"):
        names = options.get(key)
        if isinstance(names, list) and names:
            pairs.append(f"{key}={','.join(map(str, names)) if len(names) > 1 else shown(str(names[0]))}")
    name = str(options.get("file") or options["study"])
    usual = recipes()[name].figure if name in recipes() else None
    said = {"figure": options["figure"]} if options.get("figure") not in (None, usual) else {}
    said |= {"seeds": options["seeds"]} if options.get("seeds") else {}
    changes = options.get("settings")
    rest = changes if isinstance(changes, Mapping) else {}
    return _line(["reproduce", name], {**said, **rest}, pairs)


def _asked(grid: Grid) -> str:
    """What was typed, and what a file said that is not everybody's default; of what has not run, too."""
    asked, methods = grid.asked, {line.config.method_name for line in grid.lines}
    usual = [_usual(name) for name in methods]
    settings = {key: value for key, value in asked["settings"].items() if key != "method"}
    chosen = {key: value for key, value in settings.items() if any(own.get(key, UNSET) != value for own in usual)}
    if "methods" in asked:
        names = list(map(str, asked["methods"]))
        same = _plans_alike(lambda: plan_comparison(names, chosen)[0], grid)
        return _line(["compare", *names], chosen if same else settings)
    values: dict[str, list[Any]] = asked["values"]
    same = _plans_alike(lambda: plan_sweep(asked["method"], values, chosen)[0], grid)
    pairs = [f"{key}={','.join(map(shown, some))}" for key, some in values.items()]
    return _line(["sweep", asked["method"]], chosen if same else settings, pairs)


def _plans_alike(plan: Callable[[], Sequence[Line]], grid: Grid) -> bool:
    try:
        return [line.config for line in plan()] == [line.config for line in grid.lines]
    except UserError:
        return False


def _comparison(entries: Sequence[Entry]) -> str:
    """Several runs of different methods that have every key alike which they share."""
    methods, configs = [entry.method for entry in entries], [entry.first.config for entry in entries]
    if sum(len(entry.runs) for entry in entries) < 2 or len(set(methods)) < len(methods):
        return ""
    together: Settings = {}
    for config in configs:
        together |= _chosen(config)
    try:
        planned = configure_all(methods, together)
    except UserError:
        return ""
    return _line(["compare", *methods], {**together, **_seeds(entries)}) if _alike(planned, configs) else ""


def _sweep(entries: Sequence[Entry], named: Sequence[str] = ()) -> str:
    """Entries of one method that are every combination of some values; of a sweep its keys are known by name."""
    configs = [_without_seed(entry.first.config) for entry in entries]
    if len(entries) < 2 or len({entry.method for entry in entries}) > 1 or len({frozenset(one) for one in configs}) > 1:
        return ""
    values = {key: _unique(config[key] for config in configs) for key in configs[0]}
    differ = [key for key, several in values.items() if len(several) > 1]
    swept = {key: values[key] for key in named or differ if key in values}
    if prod(map(len, swept.values())) != len(entries):
        return ""
    same = {key: value for key, value in _chosen(configs[0], needed=tuple(swept)).items() if key not in swept}
    try:
        lines, _ = plan_sweep(entries[0].method, swept, same)
    except UserError:
        return ""
    if not _alike([line.config for line in lines], configs):
        return ""
    pairs = [f"{key}={','.join(map(shown, several))}" for key, several in swept.items()]
    return _line(["sweep", entries[0].method], {**same, **_seeds(entries)}, pairs)


def _alike(planned: Sequence[Config], configs: Sequence[Settings]) -> bool:
    """Whether each of these is planned, in whatever order."""
    found = [config.flat() for config in planned]
    return all(any(_same(again, config) for again in found) for config in configs)


def _without_seed(config: Settings) -> Settings:
    return {key: value for key, value in config.items() if key != "seed"}


def _unique(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _seeds(entries: Sequence[Entry]) -> Settings:
    """One seed, unless it is 0, or a list."""
    seeds = sorted({run.seed for entry in entries for run in entry.runs})
    if len(seeds) > 1:
        return {"seeds": seeds}
    return {"seed": seeds[0]} if seeds[0] else {}


def _line(words: Sequence[str], settings: Mapping[str, Any], pairs: Sequence[str] = ()) -> str:
    said = [*pairs, *(f"{key}={shown(value)}" for key, value in settings.items())]
    return " ".join(map(shlex.quote, ["tailor", *words, *said]))

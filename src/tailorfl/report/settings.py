"""The settings of results, and the commands that repeat them."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import yaml

from tailorfl.errors import UserError
from tailorfl.report.results import Entry, Results, shown
from tailorfl.study.compare import configure_all
from tailorfl.study.config import Config, Experiment, configure
from tailorfl.study.recipe_files import recipes
from tailorfl.study.sweep import plan_sweep

Settings = dict[str, Any]


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


def repeats(results: Results) -> list[Repeat]:
    """One command for all where there is one, else a command for each entry."""
    whole = _study(results) or _comparison(results.entries) or _sweep(results.entries)
    return [
        Repeat(
            _title(entry),
            whole or _comparison([entry]) or _run(entry),
            yaml.safe_dump(entry.first.config, sort_keys=False, allow_unicode=True),
        )
        for entry in results.entries
    ]


def _title(entry: Entry) -> str:
    return f"{entry.panel}: {entry.label}" if entry.panel else entry.label


# What a command says, and what comes by itself.


def _chosen(config: Settings) -> Settings:
    """The settings that a command must name to come to this configuration."""
    name, own = str(config["method"]), {key: config[key] for key in config if key not in ("method", "seed")}
    try:
        usual = configure(name, {}).flat()
    except UserError:  # a method of another package, which is not installed here
        usual = Experiment().model_dump(mode="json")
    chosen = {key: value for key, value in own.items() if key not in usual or usual[key] != value}
    if (again := _configured(name, chosen)) is None:  # of another version
        return chosen
    # A preset, or another option, may bring a value that is not the usual one.
    chosen |= {key: value for key, value in own.items() if again.get(key) != value}
    for key in list(chosen):  # and options may follow from others
        fewer = {other: value for other, value in chosen.items() if other != key}
        if (again := _configured(name, fewer)) and _same(again, own):
            chosen = fewer
    plain = {key: _plain(value) for key, value in chosen.items()}
    return plain if (again := _configured(name, plain)) and _same(again, own) else chosen


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


def _sweep(entries: Sequence[Entry]) -> str:
    """Entries of one method that are every combination of some values."""
    configs = [_without_seed(entry.first.config) for entry in entries]
    if len(entries) < 2 or len({entry.method for entry in entries}) > 1 or len({frozenset(one) for one in configs}) > 1:
        return ""
    values = {key: _unique(config[key] for config in configs) for key in configs[0]}
    swept = {key: several for key, several in values.items() if len(several) > 1}
    if prod(map(len, swept.values())) != len(entries):
        return ""
    same = {key: value for key, value in _chosen(configs[0]).items() if key not in swept}
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

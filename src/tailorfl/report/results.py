"""Results on disk as plain values: runs, also ones that are still being written, and what a folder of runs is."""

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from tailorfl.errors import UserError
from tailorfl.study.run import (
    CHECKPOINTS,
    CLASSES,
    CLIENTS,
    CONFIG,
    ERROR,
    EXPORTS,
    FEDERATION,
    MAY_CHANGE,
    MEASURES,
    NOTES,
    ROUNDS,
    SUMMARY,
)
from tailorfl.study.tidy import OPTIONS, RESULTS

Kind = Literal["run", "comparison", "study", "several"]
Notes = dict[int, dict[str, dict[str, float]]]  # round, client, name

DEEPEST = 4  # folders below the one that is named in which runs are looked for
INNER = {CHECKPOINTS, EXPORTS, FEDERATION}  # folders of a run
MOST_KEYS = 3  # settings that a label names; runs that differ in more are called by their folder
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many runs are read again and again while one is watched
LARGEST = 1e100  # what is beyond it was not measured; sums and squares of such numbers are no longer finite
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")


@dataclass(frozen=True)
class ClientResult:
    """A row of ``clients.csv``; None where a figure does not exist."""

    name: str
    new: bool
    train: int
    test: int
    accuracy: float | None
    loss: float | None
    global_accuracy: float | None


@dataclass(frozen=True)
class ClassCounts:
    """Who has how many training rows of which class: [clients][classes]."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    train: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RunResult:
    """A run's folder; without a summary, and with fewer rounds, while it trains or where it was stopped."""

    folder: Path
    config: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    clients: list[ClientResult] = field(default_factory=list)
    classes: ClassCounts | None = None
    measures: list[dict[str, str]] = field(default_factory=list)  # round, client, and what a method measures
    notes: Notes = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    error: str = ""  # why it failed, in a line

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(number(self.config.get("seed")) or 0)

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def evaluated(self) -> list[dict[str, Any]]:
        """The lines of rounds after which clients were evaluated."""
        return [line for line in self.rounds if "personalized_loss" in line]

    @property
    def regression(self) -> bool:
        """Whether there are losses only."""
        last = self.evaluated[-1:] or ([self.summary] if self.summary else [])
        return bool(last) and all(number(line.get("personalized_accuracy")) is None for line in last)

    @property
    def figures(self) -> dict[str, Any]:
        """The summary, or what can be said so far."""
        if self.summary is not None:
            return self.summary
        said = self.evaluated[-1] if self.evaluated else {}
        return {
            **said,
            "method": self.method,
            "data": self.config.get("data"),
            "seed": self.seed,
            "rounds": len(self.rounds),
            **{key: self.total(key) for key in ("bytes_up", "bytes_down")},
            "seconds_training": self.total("seconds"),
            "seconds_evaluation": self.total("seconds_evaluation"),
        }

    def total(self, key: str) -> float:
        """A figure of the rounds, added up."""
        return sum(number(line.get(key)) or 0.0 for line in self.rounds)

    @property
    def served(self) -> list[ClientResult]:
        """The clients that take part in training; empty while the run goes on."""
        return [client for client in self.clients if not client.new]

    @cached_property
    def federation(self) -> tuple[Any, ...]:
        """What two runs have in common whose clients can be compared one by one; empty while it is not known."""
        return tuple((client.name, client.train, client.test) for client in self.served)

    def is_like(self, other: "RunResult") -> bool:
        """Whether the clients of both can be compared one by one."""
        return bool(self.federation) and self.seed == other.seed and self.federation == other.federation

    @property
    def planned(self) -> int:
        """Rounds to do; a run that was finished early, or by other means, has done all of its own."""
        return len(self.rounds) if self.finished else max(len(self.rounds), int(number(self.config.get("rounds")) or 0))


@dataclass(frozen=True)
class Entry:
    """What one line of a plot shows: runs that differ in nothing but the seed."""

    label: str
    runs: tuple[RunResult, ...]
    panel: str = ""  # the column of a study

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def first(self) -> RunResult:
        return self.runs[0]


@dataclass(frozen=True)
class Results:
    """What a page is about."""

    title: str
    kind: Kind
    entries: tuple[Entry, ...]
    folder: Path | None = None  # where there is one that holds all
    options: dict[str, Any] = field(default_factory=dict)  # of a study: its name and what was chosen of it

    @property
    def runs(self) -> list[RunResult]:
        return [run for entry in self.entries for run in entry.runs]

    @property
    def panels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.panel for entry in self.entries))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.label for entry in self.entries))

    @property
    def regression(self) -> bool:
        known = [run for run in self.runs if run.evaluated or run.summary]
        return bool(known) and all(run.regression for run in known)

    def of(self, panel: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.panel == panel]


def groups_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """How well each group is served, by a summary or a line of the rounds; empty where there are no groups."""
    groups = figures.get("group_accuracies")
    found = {name: number(value) for name, value in groups.items()} if isinstance(groups, dict) else {}
    return {name: value for name, value in found.items() if value is not None}


def read_results(folders: Sequence[Path], title: str = "") -> Results:
    """What these folders hold: one run, or all runs in them."""
    if not folders:
        raise UserError("no run is named; allowed: folders of runs, comparisons, sweeps or studies")
    found: dict[Path, Path] = {}  # a run's folder, and the one that was named
    for folder in folders:
        inside = find_runs(folder)
        if not inside:
            raise UserError(f"{folder} holds no run ({CONFIG} is missing); allowed: folders that 'tailor' wrote")
        found |= {path: folder for path in inside if path not in found}
    runs = _as_named([read_run(path) for path in found], found)
    places = {path: path.relative_to(folder) for path, folder in found.items()}
    if len(folders) > 1:
        named = {path: Path(folder.name, places[path]) for path, folder in found.items()}
        return Results(title or "Results", "several", label_runs(runs, named))
    [folder] = folders
    if list(found) == [folder]:
        return Results(title or _title(runs[0]), "run", label_runs(runs, places), folder)
    options = read_options(folder)
    if options and all(len(place.parts) == 3 for place in places.values()):
        return Results(title or str(options.get("study")), "study", _cells(runs, folder, options), folder, options)
    return Results(title or _common_title(runs), "comparison", label_runs(runs, places), folder)


def find_runs(folder: Path, deepest: int = DEEPEST) -> list[Path]:
    """The folders of runs in a folder, or the folder itself, by name; links are not followed."""
    if not folder.is_dir():
        raise UserError(f"{folder} is {'not a folder' if folder.exists() else 'not there'}; allowed: a run's folder")
    return sorted(_runs_below(folder, deepest), key=_by_name)


def _runs_below(folder: Path, deepest: int) -> Iterator[Path]:
    if (folder / CONFIG).is_file():
        yield folder
    elif deepest:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        for name in names:
            if not name.startswith(".") and name not in INNER:
                yield from _runs_below(folder / name, deepest - 1)


def _by_name(path: Path) -> list[tuple[Any, ...]]:
    return [natural(part) for part in path.parts]


def natural(text: str) -> tuple[Any, ...]:
    """A key that sorts names with numbers in them as people do: 2 before 10, and 0.03 before 0.1."""
    parts = [part for part in NUMBER.split(text) if part]
    return tuple((0, float(part), part) if NUMBER.fullmatch(part) else (1, 0.0, part) for part in parts)


# One run.


def read_run(folder: Path) -> RunResult:
    """A run as far as it is written; a line that is being written is left out."""
    return RunResult(
        folder=folder,
        config=_read_config(folder / CONFIG),
        rounds=read_rounds(folder / ROUNDS),
        clients=_read_clients(folder / CLIENTS),
        classes=_read_classes(folder / CLASSES),
        measures=_read_table(folder / MEASURES, ("round", "client")),
        notes=_read_notes(folder / NOTES),
        summary=_read_summary(folder / SUMMARY),
        error=_read_error(folder / ERROR),
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        found = read_yaml(_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("method"), str):
        raise UserError(f"{file} names no method; allowed: the folder of a run")
    return {str(key): value for key, value in found.items()}


def read_rounds(file: Path) -> list[dict[str, Any]]:
    """The lines of ``rounds.jsonl`` that are whole; none where it is not there yet."""
    if not file.is_file():
        return []
    lines = _bytes(file).split(b"\n")
    found = []
    for place, line in enumerate(lines[:-1], start=1):  # what follows the last line's end is empty, or half a line
        try:
            read = read_json(line)
        except ValueError as error:
            raise UserError(f"{file}, line {place}: not JSON; was the file changed?") from error
        at = number(read.get("round")) if isinstance(read, dict) else None
        if at is None:
            raise UserError(f"{file}, line {place}: no round; was the file changed?")
        found.append({**read, "round": int(at)})
    return found


def _read_summary(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found = read_json(_text(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON; was it changed?") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no figures; was it changed?")
    return found


def _read_error(file: Path) -> str:
    lines = [line.strip() for line in _text(file).splitlines() if line.strip()] if file.is_file() else []
    return lines[-1] if lines else ""


def _read_clients(file: Path) -> list[ClientResult]:
    rows = _read_table(file, ("client", "new", "train", "test", "accuracy", "loss"))
    return [
        ClientResult(
            row["client"],
            row["new"] == "1",
            int(number(row["train"]) or 0),
            int(number(row["test"]) or 0),
            number(row["accuracy"]),
            number(row["loss"]),
            number(row.get("global_accuracy")),
        )
        for row in rows
    ]


def _read_classes(file: Path) -> ClassCounts | None:
    counts: dict[str, Counter[str]] = {}
    for row in _read_table(file, ("client", "class", "train")):
        counts.setdefault(row["client"], Counter())[row["class"]] += int(number(row["train"]) or 0)
    if not counts:
        return None
    classes = tuple(sorted({name for own in counts.values() for name in own}, key=natural))
    return ClassCounts(tuple(counts), classes, tuple(tuple(own[name] for name in classes) for own in counts.values()))


def _read_notes(file: Path) -> Notes:
    found: Notes = {}
    for row in _read_table(file, ("round", "client", "name", "value")):
        value, at = number(row["value"]), number(row["round"])
        if value is not None and at is not None:
            found.setdefault(int(at), {}).setdefault(row["client"], {})[row["name"]] = value
    return found


def _read_table(file: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """The whole rows of a CSV file; none where it is not there yet."""
    if not file.is_file():
        return []
    text = _text(file)
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""), restkey="")
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.reader.line_num}: {error}; was it changed?") from error
    if missing and whole:
        raise UserError(f"{file} has no column {missing[0]}; was it changed?")
    return [row for row in rows if None not in row.values()]  # a name with a line's end in it may be cut there


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def _text(file: Path) -> str:
    """Of a file that may end within a letter."""
    data = _bytes(file)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.end == len(data):
            return data[: error.start].decode()
        raise UserError(f"{file} is not text; was it changed?") from error


def read_yaml(text: str) -> Any:
    """What it holds; ValueError, in one line, where it is none."""
    try:
        return yaml.load(text, LOADER)
    except (yaml.YAMLError, ValueError) as error:  # of a date that there is not, too
        raise ValueError(" ".join(str(error).split())) from error


def read_json(text: str | bytes) -> Any:
    """What it holds; numbers that nobody can have measured are None."""
    return json.loads(text, parse_constant=number, parse_float=number, parse_int=_whole)


def _whole(digits: str) -> int | None:
    return None if number(digits) is None else int(digits)


def number(value: Any) -> float | None:
    """A number that can be measured, or None for anything else: empty, null, words, infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < LARGEST else None


# What runs are called.


def label_runs(runs: Sequence[RunResult], places: Mapping[Path, Path]) -> tuple[Entry, ...]:
    """Runs that differ in the seed alone, together; called by the method, and by settings where those differ.

    ``places`` are their folders as they are shown, where only those tell runs apart.
    """
    alike: dict[str, list[RunResult]] = {}
    for run in runs:
        alike.setdefault(repr(sorted(_settings(run).items())), []).append(run)
    all_settings = [_settings(own[0]) for own in alike.values()]
    entries: dict[str, list[RunResult]] = {}
    for own in alike.values():
        label = _label(own[0], all_settings, places)
        twice = len({run.seed for run in own}) < len(own)
        for some in _by_place(own) if twice else [own]:
            name = f"{label} ({_home(places[some[0].folder]).as_posix()})" if twice else label
            while name in entries:
                name += "'"
            entries[name] = some
    return tuple(Entry(label, tuple(sorted(own, key=lambda run: run.seed))) for label, own in entries.items())


def _settings(run: RunResult) -> dict[str, Any]:
    """What makes it another experiment."""
    return {key: value for key, value in run.config.items() if key != "seed" and key not in MAY_CHANGE}


def _as_named(runs: Iterable[RunResult], folders: Mapping[Path, Path]) -> list[RunResult]:
    """Folder by folder; in each the methods as they were named to the command, where its table is there."""
    named = {folder: [row.get("method") for row in _read_table(folder / RESULTS, ())] for folder in folders.values()}
    order = list(named)

    def place(run: RunResult) -> tuple[int, int]:
        folder = folders[run.folder]
        methods = named[folder]
        return order.index(folder), methods.index(run.method) if run.method in methods else len(methods)

    return sorted(runs, key=place)


def _label(run: RunResult, all_settings: Sequence[Mapping[str, Any]], places: Mapping[Path, Path]) -> str:
    others = [other for other in all_settings if other["method"] == run.method]
    own = _settings(run)
    keys = [key for key in own if any(other.get(key) != own[key] for other in others)]
    if len(keys) > MOST_KEYS:
        return f"{run.method} ({_home(places[run.folder]).as_posix()})"
    return ", ".join([run.method, *(f"{key}={shown(own[key])}" for key in keys)])


def _by_place(runs: Iterable[RunResult]) -> list[list[RunResult]]:
    """The same settings several times: seeds that lie together belong together."""
    found: dict[Path, list[RunResult]] = {}
    for run in runs:
        home = _home(run.folder)
        if any(run.seed == other.seed for other in found.get(home, ())):
            home = run.folder
        found.setdefault(home, []).append(run)
    return list(found.values())


def _home(folder: Path) -> Path:
    """The folder in which a run's seeds are."""
    return folder.parent if folder.name.startswith("seed-") else folder


def shown(value: Any) -> str:
    """A setting as it is typed: YAML that may also stand in a list."""
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True)[1:-2]


def _cells(runs: Iterable[RunResult], folder: Path, options: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The cells of a study, COLUMN/ROW/seed-N, in the order of its options."""
    cells: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs:
        column, row, _ = run.folder.relative_to(folder).parts
        cells.setdefault((column, row), []).append(run)

    def order(cell: tuple[str, str]) -> tuple[Any, ...]:
        return tuple(_place(options.get(key), name) for key, name in zip(("column", "methods"), cell, strict=True))

    return tuple(
        Entry(row, tuple(sorted(own, key=lambda run: run.seed)), column)
        for (column, row), own in sorted(cells.items(), key=lambda cell: order(cell[0]))
    )


def _place(known: Any, name: str) -> tuple[int, Any]:
    names = [str(one) for one in known] if isinstance(known, list) else []
    return (names.index(name), ()) if name in names else (len(names), natural(name))


def read_options(folder: Path) -> dict[str, Any]:
    """What a study's folder says of itself; empty where it is not one."""
    file = folder / OPTIONS
    if not file.is_file():
        return {}
    try:
        found = read_yaml(_text(file))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("study"), str) else {}


def _title(run: RunResult) -> str:
    return f"{run.method} on {_data(run)}, seed {run.seed}"


def _common_title(runs: Sequence[RunResult]) -> str:
    methods, data = (list(dict.fromkeys(names)) for names in ([r.method for r in runs], [_data(r) for r in runs]))
    who = ", ".join(methods) if len(methods) <= MOST_KEYS else f"{len(methods)} methods"
    return f"{who} on {', '.join(data) if len(data) <= MOST_KEYS else f'{len(data)} datasets'}"


def _data(run: RunResult) -> str:
    """The source, without the path to a file."""
    kind, colon, path = str(run.config.get("data", "")).partition(":")
    return f"{kind}:{Path(path).name}" if colon else kind

"""What folders of runs hold: one run, a comparison, a sweep or a study, and what their runs are called."""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import yaml

from tailorfl.errors import UserError
from tailorfl.report.runs import RunResult, natural, read_run, read_table, read_yaml, text_of
from tailorfl.study.folder import CHECKPOINTS, CONFIG, EXPORTS, FEDERATION, is_run
from tailorfl.study.run import MAY_CHANGE
from tailorfl.study.tidy import ASKED, OPTIONS, RESULTS, told_by

log = logging.getLogger(__name__)

Kind = Literal["run", "comparison", "study", "several"]

DEEPEST = 4  # folders below the one that is named in which runs are looked for
INNER = {CHECKPOINTS, EXPORTS, FEDERATION}  # folders of a run
MOST_KEYS = 3  # settings that a label names; runs that differ in more are called by their folder


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
    swept: tuple[str, ...] = ()  # the keys whose values a sweep has tried
    asked: dict[str, Any] = field(
        default_factory=dict
    )  # of a comparison or a sweep: its methods or values, and settings
    left_out: tuple[str, ...] = ()  # runs that cannot be read, and why

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


def read_results(folders: Sequence[Path], title: str = "") -> Results:
    """What these folders hold: one run, or all runs in them that can be read."""
    if not folders:
        raise UserError("no run is named; allowed: folders of runs, comparisons, sweeps or studies")
    found: dict[Path, Path] = {}  # a run's folder, and the one that was named
    for folder in folders:
        inside = find_runs(folder)
        if not inside:
            raise UserError(f"{folder} holds no run ({CONFIG} is missing); allowed: folders that 'tailor' wrote")
        found |= {path: folder for path in inside if path not in found}
    runs, left_out = _readable(found, folders)
    return replace(_results(_as_named(runs, found), found, folders, title), left_out=left_out)


def _results(runs: Sequence[RunResult], found: Mapping[Path, Path], folders: Sequence[Path], title: str) -> Results:
    found = {run.folder: found[run.folder] for run in runs}
    places = {path: path.relative_to(folder) for path, folder in found.items()}
    if len(folders) > 1:
        above = Path(os.path.commonpath([_home(path.absolute()).parent for path in found]))
        named = {path: path.absolute().relative_to(above) for path in found}
        return Results(title or _common_title(runs), "several", label_runs(runs, named))
    [folder] = folders
    if list(found) == [folder]:
        return Results(title or _title(runs[0]), "run", label_runs(runs, places), folder)
    options = read_options(folder)
    if options and all(len(place.parts) == 3 for place in places.values()):
        return Results(title or str(options.get("study")), "study", _cells(runs, folder, options), folder, options)
    asked = read_asked(folder)
    swept, entries = _swept(folder, asked), label_runs(runs, places)
    if swept and _told_apart(runs, swept):
        entries = _by_values(entries, swept)
    title = title or _common_title(runs, asked.get("methods", ()))
    return Results(title, "comparison", entries, folder, swept=swept, asked=asked)


def _swept(folder: Path, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a sweep, by what it was asked for or else by its table; none where it is no sweep."""
    if "methods" in asked:
        return ()
    tried = [key for key, values in asked.get("values", {}).items() if len(values) > 1 and key != "seeds"]
    return tuple(tried or [key for key in told_by(read_table(folder / RESULTS, ())) if key != "method"])


def _readable(found: Iterable[Path], named: Sequence[Path]) -> tuple[list[RunResult], tuple[str, ...]]:
    """Those that can be read, and why others cannot; who named a folder is told, and of many one may be left out."""
    runs, left_out = [], list[UserError]()
    for path in found:
        try:
            runs.append(read_run(path))
        except UserError as error:
            if path in named:
                raise
            left_out.append(error)
    if not runs:
        raise left_out[0]
    for reason in left_out:
        log.warning("left out: %s", reason)
    return runs, tuple(map(str, left_out))


def find_runs(folder: Path, deepest: int = DEEPEST) -> list[Path]:
    """The folders of runs in a folder, or the folder itself, by name; links are not followed."""
    if not folder.is_dir():
        raise UserError(f"{folder} is {'not a folder' if folder.exists() else 'not there'}; allowed: a run's folder")
    return sorted(_runs_below(folder, deepest), key=_by_name)


def _runs_below(folder: Path, deepest: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif deepest:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        for name in names:
            if not name.startswith(".") and name not in INNER:
                yield from _runs_below(folder / name, deepest - 1)


def _by_name(path: Path) -> list[tuple[Any, ...]]:
    return [natural(part) for part in path.parts]


# What runs are called.


def label_runs(runs: Sequence[RunResult], places: Mapping[Path, Path]) -> tuple[Entry, ...]:
    """Runs that differ in the seed alone, together; called by the method, and by settings where those differ.

    ``places`` are their folders as they are shown, where only those tell runs apart.
    """
    alike: dict[str, list[RunResult]] = {}
    for run in runs:
        alike.setdefault(repr(sorted(settings_of(run).items())), []).append(run)
    all_settings = [settings_of(own[0]) for own in alike.values()]
    entries: dict[str, list[RunResult]] = {}
    for own in alike.values():
        keys = _differing(own[0], all_settings)
        twice, many = len({run.seed for run in own}) < len(own), len(keys) > MOST_KEYS
        label = own[0].method if many else _label(own[0], keys)
        for some in _by_place(own) if twice else [own]:
            name = f"{label} ({_home(places[some[0].folder]).as_posix()})" if twice or many else label
            while name in entries:
                name += "'"
            entries[name] = some
    return tuple(Entry(label, tuple(sorted(own, key=lambda run: run.seed))) for label, own in entries.items())


def _told_apart(runs: Sequence[RunResult], keys: Sequence[str]) -> bool:
    """Whether runs are of one method and differ in nothing but these keys, the seed, and what follows from them."""
    if len({run.method for run in runs}) > 1 or not all(key in run.config for run in runs for key in keys):
        return False
    settings = {repr(sorted(settings_of(run).items())) for run in runs}
    return len({_values(run, keys) for run in runs}) == len(settings)


def _by_values(entries: Iterable[Entry], keys: Sequence[str]) -> tuple[Entry, ...]:
    """Called by what was tried: a key of which others follow says it all, and the method is that of all."""
    return tuple(replace(entry, label=_values(entry.first, keys)) for entry in entries)


def _values(run: RunResult, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={shown(run.config[key])}" for key in keys)


def settings_of(run: RunResult) -> dict[str, Any]:
    """What makes it another experiment."""
    return {key: value for key, value in run.config.items() if key != "seed" and key not in MAY_CHANGE}


def _as_named(runs: Iterable[RunResult], folders: Mapping[Path, Path]) -> list[RunResult]:
    """Folder by folder; in each the methods as they were named to the command, where that is known."""
    named = {folder: _methods_of(folder) for folder in dict.fromkeys(folders.values())}
    order = list(named)

    def place(run: RunResult) -> tuple[int, int]:
        folder = folders[run.folder]
        methods = named[folder]
        return order.index(folder), methods.index(run.method) if run.method in methods else len(methods)

    return sorted(runs, key=place)


def _methods_of(folder: Path) -> list[str | None]:
    asked: list[str | None] = read_asked(folder).get("methods", [])
    return asked or [row.get("method") for row in read_table(folder / RESULTS, ())]


def _differing(run: RunResult, all_settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which it is unlike others of its method."""
    others = [other for other in all_settings if other["method"] == run.method]
    own = settings_of(run)
    return [key for key in own if any(other.get(key) != own[key] for other in others)]


def _label(run: RunResult, keys: Iterable[str]) -> str:
    return ", ".join(filter(None, (run.method, _values(run, list(keys)))))


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
    found = _stored(folder / OPTIONS)
    return found if isinstance(found.get("study"), str) else {}


def read_asked(folder: Path) -> dict[str, Any]:
    """What a comparison or a sweep was asked for; empty where that is not known."""
    found = _stored(folder / ASKED)
    methods, values, settings = (found.get(key) for key in ("methods", "values", "settings"))
    compared = isinstance(methods, list) and methods and all(isinstance(name, str) for name in methods)
    several = _is_named(values) and all(isinstance(some, list) and some for some in values.values())
    swept = several and isinstance(found.get("method"), str)
    return found if _is_named(settings) and (compared or swept) else {}


def _is_named(values: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(values, dict) and all(isinstance(key, str) for key in values)


def _stored(file: Path) -> dict[str, Any]:
    """What a command stored when it began; empty where it is not there or was damaged."""
    try:
        found = read_yaml(text_of(file)) if file.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _title(run: RunResult) -> str:
    return f"{run.method} on {_data(run)}, seed {run.seed}"


def _common_title(runs: Sequence[RunResult], asked: Sequence[str] = ()) -> str:
    names = [*asked, *(run.method for run in runs)]
    methods, data = (list(dict.fromkeys(some)) for some in (names, [_data(run) for run in runs]))
    who = ", ".join(methods) if len(methods) <= MOST_KEYS else f"{len(methods)} methods"
    return f"{who} on {', '.join(data) if len(data) <= MOST_KEYS else f'{len(data)} datasets'}"


def _data(run: RunResult) -> str:
    """The source, without the path to a file."""
    kind, colon, path = str(run.config.get("data", "")).partition(":")
    return f"{kind}:{Path(path).name}" if colon else kind

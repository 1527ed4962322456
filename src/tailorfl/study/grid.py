"""Runs set against each other: a line for each method or setting, and in it a run for each seed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from tailorfl.data.atomic import whole_file
from tailorfl.data.occupied import check_unused, is_occupied
from tailorfl.errors import UserError
from tailorfl.study.cells import Cell, Failure, Result, Way, check_folders, check_some_ran, keep_error, run_cells
from tailorfl.study.config import Config
from tailorfl.study.folder import CONFIG, ERROR, PAGE, SUMMARY, is_run, take_away
from tailorfl.study.progress import CellsProgress
from tailorfl.study.recipe import checked_seeds, possible
from tailorfl.study.statistics import interval
from tailorfl.study.tidy import (
    ASKED,
    COMPARISON,
    CURVES,
    OPTIONS,
    PARQUET,
    RESULTS,
    STATISTICS,
    SWEPT,
    as_text,
    flat,
    read_csv,
    told_by,
    write_results,
)

# What is said of a line over its seeds, where it has it.
ACCURACIES = ("validation_accuracy", "personalized_accuracy", "worst_decile_accuracy", "personalized_accuracy_std")
LOSSES = ("validation_loss", "personalized_loss")
FOLDER = "folder"  # of a run, below that of the results
DIVERGED = "diverged: the loss on test data is not finite"
NO_UPDATE = "diverged: no update of a client was finite, so nothing was learned"


@dataclass(frozen=True, eq=False)
class Line:
    """What one line of a table is about."""

    title: str
    name: str  # of its folder
    settings: Mapping[str, Any]  # what tells it from the others: its method, or the keys of a sweep
    config: Config


@dataclass
class Grid:
    """Lines and seeds, and what came out of each."""

    folder: Path
    lines: Sequence[Line]
    seeds: tuple[int, ...]
    summaries: dict[tuple[Line, int], dict[str, Any]] = field(default_factory=dict)
    failures: dict[tuple[Line, int], Failure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    asked: Mapping[str, Any] = field(default_factory=dict)  # what ``lines`` and ``seeds`` were planned from
    begun: bool = False  # what is in the folder is of this time

    def __post_init__(self) -> None:
        # Seed by seed: what is stopped half-way has a whole table of fewer seeds.
        self.cells = {self._cell(line, seed): (line, seed) for seed in self.seeds for line in self.lines}

    def _cell(self, line: Line, seed: int) -> Cell:
        several = len(self.seeds) > 1
        experiment = line.config.experiment.model_copy(update={"seed": seed})
        title = f"{line.title}, seed {seed}" if several else line.title
        return Cell(title, replace(line.config, experiment=experiment), self.path(line, seed))

    def path(self, line: Line, seed: int) -> Path:
        return self.folder / self._name(line, seed)

    def _name(self, line: Line, seed: int) -> Path:
        """The same for one seed as for several: more may come later."""
        return Path(line.name, f"seed-{seed}")

    def check(self, way: Way) -> None:
        """Refuse what cannot be written or would be mixed, before anything runs."""
        if is_run(self.folder):
            raise UserError(f"{self.folder} is the folder of a run; allowed: another --out")
        taken = [place for line in self.lines if is_run(place := self.folder / line.name)]
        if taken and not way.force:
            raise UserError(f"{taken[0]} is the folder of a run; allowed: another --out, --force to replace")
        problems = []
        for check in (self._check_tables, partial(check_folders, list(self.cells))):
            try:
                check(way)
            except UserError as problem:
                problems.append(str(problem))
        if problems:  # of results that go on both may be wrong; else one says it all
            raise UserError("; ".join(problems if way.resume else problems[:1]))
        if way.force:
            check_unused(self._there())

    def _check_tables(self, way: Way) -> None:
        """The tables of other results are not overwritten, and those that go on lose no line."""
        if (self.folder / OPTIONS).is_file():
            raise UserError(f"{self.folder} holds a study of 'tailor reproduce'; allowed: another --out")
        if way.force or not (self.folder / RESULTS).is_file():
            return
        if not way.resume:
            raise UserError(
                f"{self.folder} holds results; allowed: another --out, --resume to go on, --force to replace"
            )
        named = {tuple(map(as_text, (*line.settings.values(), seed))): True for line, seed in self.cells.values()}
        rows, keys = read_csv(self.folder / RESULTS), [*self.lines[0].settings, "seed"]
        if rows and [*told_by(rows), "seed"] != keys:
            had, now = (", ".join(some) for some in (told_by(rows), keys[:-1]))
            raise UserError(f"{self.folder} has lines told by {had}, not by {now}; allowed: the same, another --out")
        for row in rows:
            line = tuple(str(row.get(key)) for key in keys)
            if not named.pop(line, False):
                said = " ".join(f"{key}={value}" for key, value in zip(keys, line, strict=True))
                raise UserError(f"{self.folder} has {said} too; allowed: to name all that it has, another --out")

    def run(self, way: Way, console: Console, stop: Callable[[], bool]) -> bool:
        """False if it was stopped. Where all are refused for one reason, that is an error in what was asked for."""
        new = not (self.folder / ASKED).is_file()
        if not way.force:
            self._begin()
        with CellsProgress(console, list(self.cells), way.jobs * way.together) as progress:
            whole = run_cells(list(self.cells), way, progress, self._add, stop, self._replace if way.force else None)
        try:
            check_some_ran(self.failures.values(), len(self.cells))
        except UserError:
            if new:  # then nothing is written
                (self.folder / ASKED).unlink(missing_ok=True)
            raise
        if self.begun:
            self._keep_errors()
        return whole

    def _begin(self) -> None:
        """Store what is going to run."""
        self.begun = True
        if self.asked:
            with whole_file(self.folder / ASKED) as temporary:
                temporary.write_text(yaml.safe_dump(dict(self.asked), sort_keys=False, allow_unicode=True))

    def _keep_errors(self) -> None:
        """Why runs failed, for the page, which knows what is on disk; not where another command works."""
        for cell, key in self.cells.items():
            ended = any((cell.folder / name).is_file() for name in (SUMMARY, ERROR))
            if key in self.failures and not ended and not is_occupied(cell.folder):
                keep_error(cell.folder / ERROR, self.failures[key].reason)

    def _there(self) -> set[Path]:
        """The runs of the results that are there, those in the place of ours, and what is left of those that failed."""
        path, rows = self.folder / RESULTS, list[dict[str, str]]()
        with suppress(UserError):  # one that was damaged is replaced all the same
            rows = read_csv(path) if path.is_file() else []
        named = [Path(row.get(FOLDER) or "..") for row in rows]
        there = {self.folder / name for name in named if not name.is_absolute() and ".." not in name.parts}
        for place in (self.folder / line.name for line in self.lines):
            there |= {place, *(file.parent for file in place.glob(f"seed-*/{CONFIG}"))}
        failed = {file.parent for file in self.folder.glob(f"*/seed-*/{ERROR}") if not is_run(file.parent)}
        return failed | {run for run in there if is_run(run)}

    def _replace(self) -> None:
        """Delete the results that are there."""
        there = self._there()
        made = (ASKED, RESULTS, PARQUET, STATISTICS, COMPARISON, CURVES, SWEPT, PAGE)
        if there or (self.folder / RESULTS).is_file():  # else files of these names are somebody's own
            take_away(there, made, self.folder, {cell.folder for cell in self.cells})
        self._begin()

    def _add(self, cell: Cell, result: Result) -> None:
        if not isinstance(result, Failure) and (said := diverged_updates(cell.title, result["diverged_updates"])):
            self.notes.append(said)
        result = refused(result)
        if isinstance(result, Failure):
            self.failures[self.cells[cell]] = result
        else:
            self.summaries[self.cells[cell]] = result
            self.write()

    def of(self, line: Line) -> dict[int, dict[str, Any]]:
        """The summaries of a line, by seed."""
        return {seed: self.summaries[line, seed] for seed in self.seeds if (line, seed) in self.summaries}

    def measured(self) -> dict[Line, dict[int, dict[str, Any]]]:
        """The lines of which there is something, in their order."""
        return {line: found for line in self.lines if (found := self.of(line))}

    @property
    def regression(self) -> bool:
        return all(summary["personalized_accuracy"] is None for summary in self.summaries.values())

    def statistics(self) -> list[dict[str, Any]]:
        """A row a line: over its seeds the mean, the standard deviation, and the ends of a 95 % interval."""
        summaries, rows = self.summaries.values(), []
        keys = [
            key
            for key in (LOSSES if self.regression else ACCURACIES)
            if any(one.get(key) is not None for one in summaries)
        ]
        for line, found in self.measured().items():
            rows.append({**line.settings, "seeds": len(found)})
            for key in keys:
                rows[-1] |= _over_seeds(key, [one[key] for one in found.values() if one.get(key) is not None])
        return rows

    def write(self) -> None:
        """A row a run: what tells it from others, its seed, and the figures of its summary."""
        rows = [
            {**line.settings, "seed": seed, **flat(summary), **line.settings, FOLDER: str(self._name(line, seed))}
            for line in self.lines
            for seed, summary in self.of(line).items()
        ]
        write_results(rows, self.folder)

    def failed(self) -> list[str]:
        """A line for each reason, with what it kept from being measured."""
        groups: dict[str, dict[str, list[int]]] = {}
        for line, seed in self.cells.values():
            if failure := self.failures.get((line, seed)):
                groups.setdefault(failure.reason, {}).setdefault(line.title, []).append(seed)
        return [f"{names_and_seeds(lines)}: {reason}" for reason, lines in groups.items()]


def refused(result: Result) -> Result:
    """A run that has come to nothing counts as failed."""
    if isinstance(result, Failure):
        return result
    if result["personalized_loss"] is None:
        return Failure(DIVERGED)
    if result["diverged_updates"] and result.get("updates") == 0:
        return Failure(NO_UPDATE)
    return result


def diverged_updates(title: str, many: int) -> str:
    """What is to be said of a run in which some updates came to nothing."""
    return f"{title}: {many} updates diverged and were left out" if many else ""


def _over_seeds(key: str, values: Sequence[float]) -> dict[str, float | None]:
    found = interval(values, possible(key)) if values else None
    parts = {key: "mean", f"{key}.seed_std": "std", f"{key}.low": "low", f"{key}.high": "high"}
    return {name: getattr(found, part) if found else None for name, part in parts.items()}


def names_and_seeds(lines: Mapping[str, Sequence[int]]) -> str:
    """Names with the same seeds together."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, seeds in lines.items():
        alike.setdefault(tuple(seeds), []).append(name)
    said = [f"{', '.join(names)} (seed {', '.join(map(str, seeds))})" for seeds, names in alike.items()]
    return "; ".join(said)


def take_seeds(settings: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, dict[str, Any]]:
    """The seeds that are asked for, if any are, and the other settings."""
    rest = {key: value for key, value in settings.items() if key != "seeds"}
    if "seeds" not in settings:
        return None, rest
    if "seed" in rest:
        raise UserError(f"seed={rest['seed']}: seeds are named too; allowed: one of the two")
    return checked_seeds(settings["seeds"]), rest

"""A study on the page: the paper's table beside what was measured, and whether its claims hold."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailorfl.errors import UserError
from tailorfl.report.results import Results
from tailorfl.report.runs import RunResult, read_error
from tailorfl.report.tables import Cell, Head, Table, word
from tailorfl.study.folder import ERROR
from tailorfl.study.outcome import Outcome, beside, figure, grounds, heading, verdicts
from tailorfl.study.plan import Plan, Selection, plan
from tailorfl.study.recipe import Recipe
from tailorfl.study.recipe_files import kept
from tailorfl.study.reproduce import find_study

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """A claim, and in a word whether it holds; ``holds`` is None where that cannot be said."""

    word: str
    text: str
    holds: bool | None


@dataclass(frozen=True)
class StudyPart:
    """What a study is, its table, and all that is to be said of it."""

    lines: tuple[str, ...]
    table: Table
    claims: tuple[Judged, ...]
    failed: tuple[str, ...]
    notes: tuple[str, ...]
    open: tuple[str, ...]


def study_of(results: Results) -> StudyPart | None:
    """None where the results are no study, or its recipe is not at hand any more."""
    if results.kind != "study" or results.folder is None:
        return None
    try:
        planned = _planned(results.options, results.folder)
    except UserError as error:
        log.warning("the study's table and claims are left out: %s", error)
        return None
    outcome = read_outcome(planned, results.folder, results.runs)
    recipe = outcome.plan.recipe
    paper = (recipe.paper,) if recipe.paper else ()
    return StudyPart(
        (*paper, *heading(outcome)[1:], *_sources(outcome.plan)),
        _table(outcome),
        _claims(outcome),
        tuple(outcome.failed()),
        tuple(outcome.notes),
        recipe.open,
    )


def _planned(options: Mapping[str, Any], folder: Path) -> Plan:
    recipe = find_study(kept(folder, str(options["file"])) if options.get("file") else str(options["study"]))
    if not isinstance(recipe, Recipe):
        raise UserError(f"{options['study']} has no recipe")
    chosen = {key: value for key in Selection.model_fields if isinstance(value := options.get(key), list | str)}
    changes = options.get("settings")
    return plan(recipe, {**chosen, **(changes if isinstance(changes, Mapping) else {})})


def read_outcome(plan: Plan, folder: Path, runs: Iterable[RunResult]) -> Outcome:
    """A study as far as it is on disk."""
    outcome, found = Outcome(plan, folder), {run.folder: run for run in runs}
    for cell in plan.cells:
        run = found.get(folder / cell.folder)
        if run is not None and run.summary is not None:
            outcome.rounds[run.folder] = run.evaluated
            least = {"personalized_loss": None, "diverged_updates": 0}
            outcome.add(cell, {**least, **run.summary, "rounds": len(run.rounds)})
        elif reason := read_error(folder / cell.folder / ERROR):
            outcome.failures[cell.row, cell.column, cell.seed] = reason
    return outcome


def _sources(plan: Plan) -> list[str]:
    """Which rows and columns are read off the runs of others: plots, and tables of runs, have the names of those."""
    recipe = plan.recipe
    named = {**{row: recipe.rows[row] for row in plan.rows}, **{name: recipe.columns[name] for name in plan.columns}}
    found = [
        f"{name} is the {(one.measure or recipe.measure).replace('_', ' ')} of {one.of}"
        for name, one in named.items()
        if one.of
    ]
    return [f"Read off runs that have other names below: {', '.join(found)}."] if found else []


def _table(outcome: Outcome) -> Table:
    plan, recipe = outcome.plan, outcome.plan.recipe
    rows = []
    for row in plan.rows:
        cells = []
        for column in plan.columns:
            scores = outcome.scores((row, column))
            below = beside(scores, recipe.published_for(row, column), recipe.percent)
            mean = sum(scores.values()) / len(scores) if scores else None
            cells.append(Cell("\n".join(filter(None, (figure(scores, recipe.percent), below))), mean))
        rows.append((word(row), *cells))
    heads = (Head(recipe.over or "", words=True), *(Head(column) for column in plan.columns))
    return Table("study", recipe.title, "", heads, tuple(rows))


def _claims(outcome: Outcome) -> tuple[Judged, ...]:
    found = []
    for measured, printed in verdicts(outcome):
        holds = None if not measured.differences else measured.word.startswith("holds")
        found.append(Judged(measured.word, grounds(outcome.plan.recipe, measured, printed), holds))
    return tuple(found)

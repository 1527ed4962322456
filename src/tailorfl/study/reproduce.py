"""Figures and tables of papers, measured again: what there is, its options, and its results on disk."""

import csv
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tailorfl.data.atomic import whole_file
from tailorfl.data.occupied import check_unused
from tailorfl.errors import UserError
from tailorfl.study import cells, ridge
from tailorfl.study.config import in_words, unknown_key
from tailorfl.study.folder import CONFIG, ERROR, PAGE, SUMMARY, check_writable, take_away
from tailorfl.study.gather import GATHERED, figures_of, write_figures
from tailorfl.study.outcome import FIGURES, TABLE, Outcome, write_tables
from tailorfl.study.plan import Cell, Plan, Selection, plan
from tailorfl.study.progress import CellsProgress
from tailorfl.study.recipe import Column, Recipe
from tailorfl.study.recipe_files import RECIPE, files_of, find_recipe, is_file, recipes
from tailorfl.study.run import MAY_CHANGE, Run
from tailorfl.study.tidy import OPTIONS, PARQUET, RESULTS, STATISTICS

Show = Callable[[int, int], None]  # steps done, of how many
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """How one figure or table of a paper is measured and shown."""

    about: str
    options: type[BaseModel]
    run: Callable[[Any, Show], Rows]
    tables: Callable[[Rows, Any], Sequence[Table]]
    picture: Callable[[Rows, Any, Path], None] | None = None


STUDIES: dict[str, Study] = {
    ridge.NAME: Study(
        "PPFE, local training and FedAvg by ridge regression, over clients and personalization ratios",
        ridge.Figure3,
        ridge.sweep,
        ridge.tables,
        ridge.picture,
    ),
}


def find_study(name: str) -> Study | Recipe:
    """A study by its name, or a recipe from a file of the user's own."""
    if name in STUDIES:
        return STUDIES[name]
    if name not in recipes() and not is_file(name):
        known = ", ".join((*STUDIES, *recipes()))
        raise UserError(f"unknown study {name!r}; allowed: {known}, or a recipe's file, NAME.yaml")
    return find_recipe(name)


def read_options(name: str, settings: Mapping[str, Any]) -> Any:
    """The checked options of a study, or the cells of a recipe; every problem in one line."""
    study = find_study(name)
    if isinstance(study, Recipe):
        return plan(study, settings)
    kind = study.options
    see = f"tailor reproduce {name} --options"
    allowed = list(kind.model_fields)
    problems = [unknown_key(key, name, allowed, see) for key in settings if key not in allowed]
    try:
        options = kind(**{key: value for key, value in settings.items() if key in kind.model_fields})
    except ValidationError as error:
        found = {_key(problem): in_words(problem["msg"]) for problem in reversed(error.errors())}
        problems += [f"{key}={settings.get(key)}: {text}" if key else text for key, text in reversed(found.items())]
    if problems:
        raise UserError("; ".join(problems))
    return options


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that cannot take the results, before anything is measured."""
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not force:
        going_on = ", --resume to go on" if (folder / OPTIONS).is_file() else ""
        raise UserError(f"{folder} exists; allowed: another --out{going_on}, --force to replace")
    if taken and not (folder / OPTIONS).is_file():
        raise UserError(f"{folder} holds no study; --force replaces only a study")
    check_writable(folder)


def write(rows: Rows, options: BaseModel, name: str, folder: Path) -> Path:
    """The options, and the measurements as CSV, floats to six digits; what was there before is gone."""
    # The options come first: a folder that has them is a study, which --force may replace.
    with whole_file(folder / OPTIONS) as temporary:
        temporary.write_text(yaml.safe_dump({"study": name, **options.model_dump(mode="json")}, sort_keys=False))
    table, picture = folder / f"{stem(name)}.csv", folder / f"{stem(name)}.png"
    for path in (table, picture):
        path.unlink(missing_ok=True)
    with whole_file(table) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _digits(value) for key, value in row.items()} for row in rows)
    return table


def stem(name: str) -> str:
    """What the files of a study are called: ``figure3`` for ``ppfe/figure3``."""
    return name.rpartition("/")[2]


@contextmanager
def progress(console: Console, name: str) -> Iterator[Show]:
    """A live bar on a terminal, a line for every tenth of the way elsewhere."""
    bar = Progress(console=console, disable=not console.is_terminal)
    task = bar.add_task(name, total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not console.is_terminal and 10 * done // total > 10 * (done - 1) // total:
            console.print(f"{name}: {done} of {total}", highlight=False)

    with bar:
        yield show


def studies_table() -> Table:
    table = Table("study", "what is measured", "data", "runs")
    table.columns[3].justify = "right"
    lines = {name: (study.about, "made up", "") for name, study in STUDIES.items()}
    lines |= {name: (one.title, " ".join(one.data), str(one.runs)) for name, one in recipes().items()}
    for name in sorted(lines):
        table.add_row(name, *lines[name])
    return table


def options_table(name: str, options: type[BaseModel]) -> Table:
    table = Table("key", "default", "meaning", title=f"options of {name}")
    for key, info in options.model_fields.items():
        default = list(info.default) if isinstance(info.default, tuple) else info.default
        table.add_row(key, str(default), info.description or "")
    return table


# Recipes.


def cells_table(plan: Plan) -> Table:
    """What would run: what is set for all cells, then for those of a column, of a row, and for single ones."""
    recipe, runs = plan.recipe, len({cell.folder for cell in plan.cells})
    read = f" from {runs} runs" if runs < len(plan.cells) else ""
    title = f"{recipe.name}: {len(plan.cells)} cells{read}, seeds {', '.join(map(str, plan.seeds))}"
    table = Table("cells", "method", "settings", title=title, title_justify="left", caption="all else has its default")
    left = {(cell.column, cell.row): dict(cell.given) for cell in plan.cells}

    def show(
        name: str,
        cells: Sequence[tuple[str, str]],
        method: str = "",
        entry: Column | None = None,
        always: bool = True,
    ) -> None:
        first = left[cells[0]]
        shared = {
            key: value for key, value in first.items() if all(left[cell].get(key, left) == value for cell in cells)
        }
        for cell in cells:
            left[cell] = {key: value for key, value in left[cell].items() if key not in shared}
        said = [f"{key}={value}" for key, value in shared.items()]
        if entry and entry.measure:
            said.insert(0, f"{entry.measure}{f' of the runs of {entry.of}' if entry.of else ''}")
        if said or always:
            table.add_row(name, method, " ".join(said))

    show("all", list(left))
    table.add_section()
    for column in plan.columns:
        show(recipe.place(column), [cell for cell in left if cell[0] == column], entry=recipe.columns[column])
    table.add_section()
    for row in plan.rows:
        show(row, [cell for cell in left if cell[1] == row], recipe.rows[row].method, recipe.rows[row])
    table.add_section()
    for cell in left:
        show(f"{recipe.place(cell[0])}, {cell[1]}", [cell], always=False)
    return table


def resumed_options(recipe: Recipe, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a study was begun with, and over it what may change: the selection of cells, and where they run."""
    if not (folder / OPTIONS).is_file():
        if folder.is_dir() and any(not path.name.startswith(f".{OPTIONS}.") for path in folder.iterdir()):
            raise UserError(f"{folder} holds no study to resume ({OPTIONS} is missing)")
        return dict(given)
    stored = yaml.safe_load((folder / OPTIONS).read_text())
    if stored.get("study") != recipe.name:
        raise UserError(f"{folder} holds the study {stored.get('study')}; allowed: another --out")
    settings = stored["settings"]
    other = [key for key in given if key not in {*Selection.model_fields, *MAY_CHANGE}]
    changed = [key for key in other if key not in settings or settings[key] != given[key]]
    if changed:
        was = f"with {changed[0]}={settings[changed[0]]}" if changed[0] in settings else f"without {changed[0]}"
        raise UserError(f"{folder} was begun {was}; allowed: the same settings, another --out, --force to replace")
    return {**{key: stored[key] for key in Selection.model_fields if key in stored}, **settings, **given}


def check_whole(plan: Plan, folder: Path) -> None:
    """Refuse to go on with other settings, or with a part of what was measured: its tables would lose the rest."""
    planned = {folder / cell.folder: cell.config for cell in plan.cells}
    for run, config in planned.items():
        Run(config, run).check_folder(resume=True, force=False)
    rest = sorted(run for run in runs_in(folder) - set(planned) if (run / SUMMARY).is_file())
    if rest:
        column, row, seed = rest[0].relative_to(folder).parts
        raise UserError(
            f"{folder} has {column}, {row}, {seed.replace('-', ' ')} too; allowed: to name all that it has, "
            "another --out"
        )


def runs_in(folder: Path) -> set[Path]:
    """The runs of a study that is there."""
    return {path.parent for name in (CONFIG, ERROR) for path in folder.glob(f"*/*/seed-*/{name}")}


def clear(plan: Plan, folder: Path) -> None:
    """Delete what another study has left there."""
    made = (RESULTS, PARQUET, STATISTICS, FIGURES, GATHERED, TABLE, PAGE, picture_of(plan))
    take_away(runs_in(folder), made, folder, {folder / cell.folder for cell in plan.cells})
    copies = (folder / RECIPE).absolute()
    if not any(copies in file.parents for file in files_of(plan.recipe)):  # else it is measured from its own copy
        shutil.rmtree(copies, ignore_errors=True)


def begin(plan: Plan, folder: Path) -> None:
    """Store what is going to run, and a recipe of the user's own, which may change."""
    with whole_file(folder / OPTIONS) as temporary:
        temporary.write_text(yaml.safe_dump(plan.options(), sort_keys=False))
    for file in files_of(plan.recipe):
        with whole_file(folder / RECIPE / file.name) as temporary:
            shutil.copyfile(file, temporary)


def measure(plan: Plan, folder: Path, way: cells.Way, console: Console, stop: cells.Stop) -> Outcome | None:
    """Run what the cells are read from, each run once; None if it was stopped. Tables are written after each.

    Where all are refused for one reason, that is an error in what was asked for.
    """
    outcome, readers = Outcome(plan, folder), dict[Path, list[Cell]]()
    for cell in plan.cells:
        readers.setdefault(folder / cell.folder, []).append(cell)
    runs = [cells.Cell(own[0].title, own[0].config, path) for path, own in readers.items()]
    kept = cells.finished(runs, way)
    new, failed = not (folder / OPTIONS).is_file(), dict[Path, cells.Failure]()
    begun = new or not way.force

    def replace() -> None:
        nonlocal begun
        clear(plan, folder)
        begin(plan, folder)
        begun = True

    def ended(run: cells.Cell, result: cells.Result) -> None:
        if isinstance(result, cells.Failure):
            failed[run.folder] = result
        for cell in readers[run.folder]:
            outcome.take(cell, result)
        if run not in kept and begun and outcome.summaries:
            write_all(outcome)

    if begun:
        begin(plan, folder)
    else:
        check_unused(runs_in(folder))
    with CellsProgress(console, runs, way.jobs * way.together) as progress:
        whole = cells.run_cells(runs, way, progress, ended, stop, None if begun else replace)
    try:
        cells.check_some_ran(failed.values(), len(runs))
    except UserError:
        if new:  # then nothing is written
            take_away(runs_in(folder), [OPTIONS], folder, ())
            shutil.rmtree(folder / RECIPE, ignore_errors=True)
        raise
    if begun:
        for run, failure in failed.items():  # for the page, which knows what is on disk
            if not (run / ERROR).is_file():
                cells.keep_error(run / ERROR, failure.reason)
        write_all(outcome)
    return outcome if whole else None


def write_all(outcome: Outcome) -> None:
    """The results so far."""
    write_tables(outcome)
    write_figures(figures_of(outcome), outcome.folder / GATHERED)


def picture_of(plan: Plan) -> str:
    return f"{stem(plan.recipe.name)}.png"


def _key(problem: Mapping[str, Any]) -> str:
    return str(problem["loc"][0]) if problem["loc"] else ""


def _digits(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value

"""The part of a recipe that a command asks for: its cells, checked before anything runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field

from tailorfl.errors import UserError
from tailorfl.methods import Method, find_method
from tailorfl.study.config import Config, Experiment, configure, unknown_key
from tailorfl.study.recipe import FIGURES, Moment, Names, Recipe, Settings, checked_seeds, folder_of

# The figures that some runs only have, by how they begin, and the key that makes them.
NEEDS = {
    "new_client": "new_clients",
    "participation_gap": "new_clients",
    "joining": "joining_clients",
    "cold_start": "joining_clients",
    "validation": "validation_fraction",
    "training_accuracy": "evaluate_training",
    "own_training_loss": "evaluate_training",
    "out_of_sample_gap": "evaluate_training",
    "group": "groups",
}


@dataclass(frozen=True)
class Cell:
    """One figure of a recipe, and the run that it is read from."""

    row: str
    column: str
    seed: int
    config: Config
    given: Settings  # what the recipe and the command set; all else has its default
    title: str  # of the run
    folder: Path  # within the study's; several rows and columns may read one run


@dataclass(frozen=True)
class Plan:
    """The part of a recipe that is to be measured, with what the command changes."""

    recipe: Recipe
    columns: Names
    rows: Names
    seeds: tuple[int, ...]
    changes: Settings
    cells: tuple[Cell, ...]
    figure: Moment = "last"

    def options(self) -> dict[str, Any]:
        """As it is stored beside the results, and given to ``plan`` again."""
        chosen = {"column": list(self.columns), "methods": list(self.rows), "seeds": list(self.seeds)}
        file = {"file": self.recipe.file} if self.recipe.file else {}
        return {"study": self.recipe.name, **file, **chosen, "figure": self.figure, "settings": self.changes}


class Selection(BaseModel):
    """What a command may say of a recipe, beside the keys of experiments and methods."""

    column: str | None = Field(None, description="columns, for example A,B; all by default")
    methods: str | None = Field(None, description="rows, for example fedavg,fedper; all by default")
    seeds: str | None = Field(None, description="a number of seeds, or a list such as [3,4]; the recipe's by default")
    figure: str | None = Field(None, description="last, or best: of the round that is best on test data")


def plan(recipe: Recipe, options: Mapping[str, Any]) -> Plan:
    """The cells of a recipe, checked: a key that only some of the methods have goes to those."""
    columns = _chosen("column", options.get("column", ...), recipe.columns)
    rows = _chosen("methods", options.get("methods", ...), recipe.rows)
    given = options.get("seeds")
    seeds = recipe.seeds if given is None else checked_seeds(given)
    changes = {key: value for key, value in options.items() if key not in Selection.model_fields}
    kinds = {row: find_method(recipe.rows[row].method) for row in rows}
    _check_changes(recipe, changes, kinds)
    cells = [_cell(recipe, row, column, seed, kinds, changes) for seed, column, row in _orders(seeds, columns, rows)]
    chosen = Plan(recipe, columns, rows, seeds, changes, tuple(cells), options.get("figure") or recipe.figure)
    _check_figure(chosen)
    return chosen


def _check_figure(plan: Plan) -> None:
    if plan.figure not in get_args(Moment):
        raise UserError(f"figure={plan.figure}: allowed: {', '.join(get_args(Moment))}")
    if plan.figure == "best":
        try:
            plan.recipe.check_best(plan.rows, plan.columns)
        except ValueError as error:
            raise UserError(str(error)) from error
        once = [cell for cell in plan.cells if cell.config.experiment.evaluate_every == 0]
        if once:
            raise UserError(
                f"figure=best: {once[0].title} is evaluated in the end only; allowed: an evaluate_every of 1 or more"
            )


def _orders(seeds: Sequence[int], columns: Names, rows: Names) -> Iterator[tuple[int, str, str]]:
    """Seed by seed: a study that is stopped half-way then has a whole table of fewer seeds."""
    return ((seed, column, row) for seed in seeds for column in columns for row in rows)


def _cell(
    recipe: Recipe, row: str, column: str, seed: int, kinds: Mapping[str, type[Method]], changes: Settings
) -> Cell:
    kind, others = kinds[row], _fields_of_methods(recipe)

    def reaches(key: str, elsewhere: set[str]) -> bool:
        # What nobody has goes on to `configure`, which refuses it.
        return key in Experiment.model_fields or key in kind.model_fields or key not in elsewhere

    run, place = recipe.run_of(row, column)
    common = {"evaluate_last": recipe.last, **recipe.settings, **recipe.columns[place].settings}
    common = {key: value for key, value in common.items() if reaches(key, others)}
    own = {**recipe.rows[run].settings, **recipe.cells.get(run, {}).get(place, {})}
    chosen = {key for one in kinds.values() for key in one.model_fields}
    changed = {key: value for key, value in changes.items() if reaches(key, chosen)}
    given = {**common, **own, **changed}
    try:
        config = configure(recipe.rows[row].method, {**given, "seed": seed})
        title = f"{recipe.place(place)}, {run}, seed {seed}"
        return Cell(row, column, seed, config, given, title, folder_of(recipe, row, column, seed))
    except UserError as error:
        raise UserError(f"{recipe.name}, {column}, {row}: {error}") from error


def check_figures(plan: Plan) -> None:
    """Refuse figures that no run will have, as far as it is known before. What was begun is shown as it is."""
    recipe = plan.recipe
    for cell in plan.cells:
        rounds = cell.config.experiment.rounds
        try:
            _check_measure(recipe.measure_of(cell.row, cell.column), cell.config)
            if "rounds" not in plan.changes and rounds < recipe.last:  # a trial may be shorter
                raise UserError(f"last: {recipe.last} of {rounds} rounds; allowed: 1 to {rounds}")
        except UserError as error:
            raise UserError(f"{recipe.name}, {cell.column}, {cell.row}: {error}") from error


def _check_measure(measure: str, config: Config) -> None:
    name, method = measure.partition(".")[0], type(config.method)
    for figure, key in NEEDS.items():
        if name.startswith(figure) and not getattr(config.experiment, key):
            raise UserError(f"measure: {measure} is of runs with {key}; allowed: to set {key}, another measure")
    if name not in FIGURES and method.others is Method.others and method.summary is Method.summary:
        raise UserError(
            f"measure: {config.method_name} has no figure {measure}; allowed: what every method has, "
            "such as personalized_accuracy or global_accuracy"
        )


def _check_changes(recipe: Recipe, changes: Settings, kinds: Mapping[str, type[Method]]) -> None:
    instead = {"seed": "seeds=[...]", "method": "methods=ROW,ROW", recipe.over: "column=VALUE,VALUE"}
    for key in changes:
        if key in instead:
            raise UserError(f"{key}={changes[key]}: cells of {recipe.name} differ in it; allowed: {instead[key]}")
    known = [*Experiment.model_fields, *dict.fromkeys(key for kind in kinds.values() for key in kind.model_fields)]
    allowed = [*Selection.model_fields, *known]
    see = f"tailor reproduce {recipe.name} --options"
    problems = [unknown_key(key, recipe.name, allowed, see) for key in changes if key not in known]
    if problems:
        raise UserError("; ".join(problems))


def _fields_of_methods(recipe: Recipe) -> set[str]:
    """The keys of all methods in the recipe, chosen or not; one that is not installed has none here."""
    found: set[str] = set()
    for row in recipe.rows.values():
        try:
            found |= set(find_method(row.method).model_fields)
        except UserError:
            continue
    return found


def _chosen(key: str, value: Any, known: Mapping[str, Any]) -> Names:
    """Names of rows or columns, in the order of the recipe."""
    if value is ...:
        return tuple(known)
    if value is None:
        raise UserError(f"{key}=: none is named; allowed: {', '.join(known)}, or without {key}= all of them")
    names = [str(name).strip() for name in value] if isinstance(value, list) else str(value).split(",")
    names = [name.strip() for name in names if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"{key}={','.join(unknown)}: not in the study; allowed: {', '.join(known)}")
    return tuple(name for name in known if name in names)

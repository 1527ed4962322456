"""Recipes: a table or figure that consists of training runs, written down in YAML beside its published figures."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tailorfl.errors import UserError
from tailorfl.study.config import LARGEST_SEED

SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # rows and columns are names of folders
ACCURACY = "personalized_accuracy"
MOST_SEEDS = 10_000
NOT_SET = {"seed": "seeds: [...] beside rows and columns", "method": "rows, which name one each"}  # anywhere else
FIGURES = (  # of a summary, whatever the method
    *(
        f"{model}_{what}"
        for model in ("personalized", "global", "validation", "new_client", "joining", "cold_start")
        for what in ("accuracy", "loss")
    ),
    *("personalized_accuracy_std", "worst_decile_accuracy", "training_accuracy"),
    "own_training_loss",
    *("participation_gap", "out_of_sample_gap", "group_accuracies", "group_mean_accuracy"),
    *("training_loss", "bytes_up", "bytes_down", "parameters", "shared_parameters", "updates", "diverged_updates"),
    *("seconds_training", "seconds_evaluation", "rounds", "clients"),
)
OF_METHODS = ("adapted_accuracy", "stage_accuracy")  # of some

Settings = dict[str, Any]
Point = tuple[str, str]  # row and column
Names = tuple[str, ...]
Moment = Literal["last", "best"]


def _listed(value: Any) -> Any:
    """A single name as a list of one; names that YAML takes for numbers as they are written."""
    if value is None:
        return value
    return tuple(str(one) for one in (value if isinstance(value, list | tuple) else [value]))


class Column(BaseModel):
    """A column of a table: what is set for its cells, in a flat list."""

    model_config = ConfigDict(frozen=True, extra="allow")

    of: str | None = None  # the column (row) whose runs are read, for another measure of them; none: runs of its own
    measure: str | None = None  # the key of the summary; that of the recipe by default

    @property
    def settings(self) -> Settings:
        return dict(self.model_extra or {})


class Row(Column):
    """A line of a table: a method and what is set for it."""

    method: str
    published: str | None = None  # the row whose published figures stand beside it; its own by default


class Claim(BaseModel):
    """What a paper says of its figures, for a machine to check: a row (or column) above, below or level with others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    row: str | None = None
    column: str | None = None
    above: Names | None = Field(None, min_length=1)
    below: Names | None = Field(None, min_length=1)  # where less is better: losses, traffic, seconds
    level: Names | None = Field(None, min_length=1)
    by: float = Field(0.0, allow_inf_nan=False)  # above or below: by more than this
    within: float = Field(1.0, ge=0, allow_inf_nan=False)  # level: by this at most, up or down
    rows: Names | None = None  # of a claim on columns; all by default
    columns: Names | None = None  # of a claim on rows; all by default
    round: int | None = Field(None, ge=1)  # curves: after this round; the last by default

    _listed = field_validator("above", "below", "level", "rows", "columns", mode="before")(_listed)
    _named = field_validator("row", "column", mode="before")(lambda name: None if name is None else str(name))

    @model_validator(mode="after")
    def _one_of_each(self) -> "Claim":
        if (self.row is None) == (self.column is None):
            raise ValueError("allowed: row or column, one of them")
        if sum(others is not None for others in (self.above, self.below, self.level)) != 1:
            raise ValueError("allowed: above, below or level, one of them")
        if "within" in self.model_fields_set and self.level is None:
            raise ValueError("within belongs to level; allowed: by, beside above and below")
        if self.level is None and (self.row or self.column) in self.others:
            raise ValueError(f"{self.row or self.column} is compared with itself; allowed: others")
        if (self.rows if self.row is not None else self.columns) is not None:
            raise ValueError("allowed: columns beside row, rows beside column")
        return self

    @property
    def others(self) -> Names:
        """Whom the row or column is compared with."""
        return self.above or self.below or self.level or ()

    def comparisons(self, recipe: "Recipe") -> list[tuple[Point, Point]]:
        """The pairs of figures that the claim is about, the one that it praises first."""
        others = self.others
        if self.row is not None:
            others = tuple(row for row in recipe.rows if row != self.row) if others == ("others",) else others
            return [((self.row, at), (other, at)) for at in self.columns or tuple(recipe.columns) for other in others]
        assert self.column is not None
        others = tuple(name for name in recipe.columns if name != self.column) if others == ("others",) else others
        return [((at, self.column), (at, other)) for at in self.rows or tuple(recipe.rows) for other in others]

    def holds(self, difference: float) -> bool:
        return self.favour(difference) >= 0 if self.level is not None else self.favour(difference) > 0

    def settled(self, low: float, high: float) -> bool:
        """Whether all differences between two say the same of the claim."""
        nearest = min(max(0.0, low), high)  # to zero, where two are level
        return len({self.holds(difference) for difference in (low, nearest, high)}) == 1

    def favour(self, difference: float) -> float:
        """By how much a difference speaks for the claim."""
        if self.level is not None:
            return self.within - abs(difference)
        return (difference if self.above is not None else -difference) - self.by

    def sentence(self, recipe: "Recipe") -> str:
        """The claim in words, as it is printed."""
        if self.text:
            return self.text
        if self.level is not None:
            what = f"level with {', '.join(self.level)} within {self.within:g}"
        else:
            side = "above" if self.above is not None else "below"
            what = f"{side} {', '.join(self.others)}" + (f" by more than {self.by:g}" if self.by else "")
        where = self.columns if self.row is not None else self.rows
        places = ", ".join(where) if where else f"every {'column' if self.row is not None else 'row'}"
        when = f" after round {self.round}" if self.round else ""
        return f"{self.row or recipe.place(self.column or '')} {what} in {places}{when}"


class Recipe(BaseModel):
    """How one table or figure is measured: rows of methods, columns of settings, a run for each and each seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    kind: Literal["table", "curves", "sweep", "measures"] = "table"
    measure: str = ACCURACY
    last: int = Field(1, ge=1)  # a cell's figure is the mean over so many rounds at the end
    figure: Moment = "last"  # best: of the round that is best on test data, for papers that pick it so
    settings: Settings = {}
    over: str | None = None  # sweep: the key whose values are the columns
    against: str | None = None  # measures: what of a client is on the axis
    lines: tuple[str, ...] = ()  # measures: what of a client is drawn, its mean over clients
    since: float = Field(0.0, ge=0, lt=1)  # measures: evaluations after this share of the rounds count
    least: int = Field(1, ge=1)  # measures: of so many clients at least, in each seed, a point is made
    columns: dict[str, Column] = Field(min_length=1)
    rows: dict[str, Row] = Field(min_length=1)
    cells: dict[str, dict[str, Settings]] = {}  # row, column: what is set for this one alone
    seeds: tuple[int, ...] = (0, 1, 2)
    claims: tuple[Claim, ...] = ()
    open: tuple[str, ...] = ()  # what the paper does not say
    tried: tuple[str, ...] = ()  # what was tried where figures or claims do not come out
    paper: str = ""
    file: str = ""  # of a user's own, to find it again
    published: dict[Point, float | None] = {}  # None: the paper has the cell and prints no figure

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        """A sweep lists values instead of columns; a row is called like its method unless it says otherwise."""
        if not isinstance(given, dict):
            raise ValueError("allowed: title, kind, settings, columns, rows, ...")
        made = dict(given)
        _check_keys(made, cls, "a recipe")
        for claim in made.get("claims") or ():
            if not isinstance(claim, dict):
                raise ValueError(
                    f"claims: {claim!r}: allowed: a row (or column), and what it is above, below or level with"
                )
            _check_keys(claim, Claim, "a claim")
        if "values" in made or "over" in made or made.get("kind") == "sweep":
            values = made.pop("values", None)
            if made.get("kind") != "sweep" or not made.get("over") or not isinstance(values, list) or "columns" in made:
                raise ValueError("allowed: kind: sweep with over: KEY and values: [...], or another kind with columns")
            made["columns"] = {str(value): {made["over"]: value} for value in values}
            if len(made["columns"]) < len(values):
                raise ValueError(f"values: {values}: one is named twice; allowed: each value once")
        if isinstance(made.get("columns"), dict):
            made["columns"] = {str(name): column or {} for name, column in made["columns"].items()}
            _check_readers(made["columns"], "column", ("of", "measure"))
        if isinstance(made.get("rows"), dict):
            rows = {str(name): row or {} for name, row in made["rows"].items()}
            made["rows"] = {n: {"method": n, **row} if isinstance(row, dict) else row for n, row in rows.items()}
            for row in _check_readers(made["rows"], "row", ("of", "method", "measure", "published")):
                row["method"] = made["rows"][row["of"]]["method"]
        return made

    @model_validator(mode="after")
    def _sound(self) -> "Recipe":
        wrong = [name for name in (*self.rows, *self.columns) if not SAFE.fullmatch(name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name for a row or column; allowed: letters, digits and . _ + -")
        checked_seeds(list(self.seeds))
        points = [point for claim in self.claims for pair in claim.comparisons(self) for point in pair]
        points += [(row, column) for row, columns in self.cells.items() for column in columns]
        points += list(self.published)
        unknown = [row for row, _ in points if row not in self.rows]
        unknown += [column for _, column in points if column not in self.columns]
        unknown += [row.published for row in self.rows.values() if row.published and row.published not in self.rows]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is neither a row nor a column; allowed in cells, claims and published figures: "
                f"{', '.join((*self.rows, *self.columns))}"
            )
        for key, instead in NOT_SET.items():
            if key == self.over or any(key in settings for settings in self._all_settings()):
                raise ValueError(f"{key} is not set in a recipe's cells; allowed: {instead}")
        if any(self.run_of(row, column) != (row, column) for row, columns in self.cells.items() for column in columns):
            raise ValueError("cells: what reads another's runs sets nothing; allowed: the row and column of the runs")
        if any(row.measure for row in self.rows.values()) and any(one.measure for one in self.columns.values()):
            raise ValueError("measure: rows and columns name one; allowed: only rows, or only columns")
        if len({in_percent(self.measure_of(row, column)) for row in self.rows for column in self.columns}) > 1:
            raise ValueError("measure: the figures of one table are all accuracies, or none is")
        for row in self.rows:
            for column in self.columns:
                check_measure(self.measure_of(row, column))
        if (self.kind == "measures") != bool(self.against and self.lines):
            raise ValueError("allowed: kind: measures with against: MEASURE and lines: [MEASURE, ...], or another kind")
        if self.figure == "best":
            if self.last > 1:
                raise ValueError("figure: best is of one round; allowed: figure: best without last")
            self.check_best(self.rows, self.columns)
        if self.kind != "curves" and any(claim.round for claim in self.claims):
            raise ValueError("claims: a round can be named only with kind: curves")
        return self

    def _all_settings(self) -> Iterator[Settings]:
        """Those of all cells, of columns, of rows, and of single cells."""
        yield self.settings
        yield from (one.settings for part in (self.columns, self.rows) for one in part.values())
        yield from (settings for columns in self.cells.values() for settings in columns.values())

    def run_of(self, row: str, column: str) -> Point:
        """The row and the column whose run a cell is read from."""
        return self.rows[row].of or row, self.columns[column].of or column

    def measure_of(self, row: str, column: str) -> str:
        return self.rows[row].measure or self.columns[column].measure or self.measure

    def check_best(self, rows: Iterable[str], columns: Iterable[str]) -> None:
        """Refuse to pick the best round where it is not known what is better."""
        wrong = {one for row in rows for column in columns if not best_of(one := self.measure_of(row, column))}
        if wrong:
            raise ValueError(f"figure: best is not known of {sorted(wrong)[0]}; allowed: accuracies and losses")

    def place(self, column: str) -> str:
        """What a column is called outside of the table's head."""
        return f"{self.over}={column}" if self.over else column

    def published_for(self, row: str, column: str) -> float | None:
        """The figure that the paper prints for a cell, if it does."""
        return self.published.get((self.rows[row].published or row, column))

    @property
    def data(self) -> Names:
        """The data that its cells need, by name."""
        found: set[str] = set()
        for settings in self._all_settings():
            found |= {str(one["data"]) for one in (settings, *settings.get("groups", ())) if "data" in one}
        return tuple(sorted(found))

    @property
    def runs(self) -> int:
        """How many runs it consists of, all seeds together."""
        return len({self.run_of(row, column) for row in self.rows for column in self.columns}) * len(self.seeds)

    @property
    def percent(self) -> bool:
        return in_percent(self.measure_of(next(iter(self.rows)), next(iter(self.columns))))


def _check_keys(given: Mapping[Any, Any], kind: type[BaseModel], owner: str) -> None:
    known = [*kind.model_fields, *(("values",) if kind is Recipe else ())]
    wrong = [str(key) for key in given if key not in known]
    if wrong:
        close = get_close_matches(wrong[0], known, 1)
        hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known)}"
        raise ValueError(f"{wrong[0]!r} is no key of {owner}; {hint}")


def _check_readers(entries: dict[str, Any], what: str, known: Names) -> list[Settings]:
    """The rows (columns) that read another's runs: they set nothing that would make them other runs."""
    readers = [name for name, one in entries.items() if isinstance(one, dict) and one.get("of") is not None]
    for name in readers:
        entries[name] = one = {**entries[name], "of": str(entries[name]["of"])}
        base = entries.get(one["of"])
        if not isinstance(base, dict) or base.get("of") is not None:
            raise ValueError(f"of: {one['of']!r} is no {what} with runs of its own")
        other = [key for key in one if key not in known]
        if other:
            allowed = ", ".join(key for key in known if key != "method")
            raise ValueError(f"{other[0]}: a {what} of another's runs sets nothing; allowed: {allowed}")
        if what == "column" and not one.get("measure"):
            raise ValueError(f"{name}: a column of another's runs needs a measure, such as group_accuracies.NAME")
    return [entries[name] for name in readers]


def folder_of(recipe: Recipe, row: str, column: str, seed: int) -> Path:
    """Where a cell's run lies, within a study's folder."""
    run, place = recipe.run_of(row, column)
    return Path(place, run, f"seed-{seed}")


def check_measure(measure: str) -> None:
    """Refuse a slip of the pen before hours of training; a method may have figures that nobody else has."""
    name = measure.partition(".")[0]
    known = (*FIGURES, *OF_METHODS)
    meant = get_close_matches(name, known, 1, 0.85)
    if name not in known and meant:
        raise ValueError(f"measure: {measure!r} is no figure of a summary; did you mean {meant[0]}?")


def in_percent(measure: str) -> bool:
    """Accuracies, and gaps between them, are fractions in a summary and per cent in a table."""
    return measure.partition(".")[0].endswith(("accuracy", "accuracies", "accuracy_std", "_gap"))


def possible(measure: str) -> tuple[float, float]:
    """Between what a figure lies: accuracies are shares of what is tested, and a gap is between two of them."""
    if not in_percent(measure):
        return -inf, inf
    return (-1.0, 1.0) if measure.partition(".")[0].endswith("_gap") else (0.0, 1.0)


def best_of(measure: str) -> Callable[[Iterable[float]], float] | None:
    """What picks the better of two figures; None where neither more nor less is better in itself."""
    name = measure.partition(".")[0]
    if name.endswith(("accuracy", "accuracies")):
        return max
    return min if name.endswith("loss") else None


def checked_seeds(value: Any) -> tuple[int, ...]:
    """How many seeds, from 0 on, or which."""
    listed = value if isinstance(value, list) else None
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)+", value):  # as it is typed: seeds=3,4
        listed = [int(one) for one in value.split(",")]
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_SEEDS:
        listed = list(range(value))
    fit = listed and all(type(one) is int and 0 <= one <= LARGEST_SEED for one in listed)
    if not listed or not fit or len(set(listed)) < len(listed):
        raise UserError(
            f"seeds={value}: allowed: how many, or a list of different numbers from 0 to 2^63 - 1, such as [0,1]; "
            f"at most {MOST_SEEDS:,}"
        )
    return tuple(listed)

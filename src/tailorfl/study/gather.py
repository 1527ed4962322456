"""The figures of many studies in one file, and the page that sets them beside what their papers print."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.errors import UserError
from tailorfl.study.outcome import SPREAD, Outcome, Scores, beside, figure, judged, moment, settings_of, verdict_line
from tailorfl.study.recipe import Moment, Point, Recipe
from tailorfl.study.recipe_files import recipes
from tailorfl.study.tidy import read_csv, write_csv

GATHERED = "figures.csv"  # of a study: a line for each cell and seed
LAST = ""  # no round is named: the figure that stands in the table


@dataclass(frozen=True)
class Figure:
    """What one run gives for one cell of a table, in the table's units."""

    study: str
    row: str
    column: str
    seed: int
    round: str  # that a claim is about, or the figure of the table
    value: float
    moment: Moment  # which round the table's figure is of
    settings: str  # other than the recipe's
    machine: str
    seconds: float  # of the run

    @property
    def key(self) -> tuple[Any, ...]:
        return self.study, self.row, self.column, self.seed, self.round


def figures_of(outcome: Outcome) -> list[Figure]:
    """All figures of a study that its table and its claims need."""
    plan = outcome.plan
    rounds = [None, *sorted({claim.round for claim in plan.recipe.claims if claim.round is not None})]
    found = []
    for row, column, seed in outcome.order():
        if (summary := outcome.summaries.get((row, column, seed))) is None:
            continue
        seconds = round(summary["seconds_training"] + summary["seconds_evaluation"], 1)
        one = Figure(
            plan.recipe.name, row, column, seed, LAST, 0.0, plan.figure, settings_of(plan), summary["machine"], seconds
        )
        for at in rounds:
            value = outcome.scores((row, column), at).get(seed)
            if value is not None:
                found.append(replace(one, round=LAST if at is None else str(at), value=round(value, 6)))
    return found


def write_figures(figures: Sequence[Figure], path: Path) -> None:
    write_csv([asdict(one) for one in figures], path, [field.name for field in fields(Figure)])


def read_figures(path: Path) -> list[Figure]:
    """Of a study's folder, or of a file of many."""
    file = path / GATHERED if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} holds no figures ({file} is not there); allowed: folders of 'tailor reproduce'")
    rows = read_csv(file, [field.name for field in fields(Figure)])
    try:
        return [Figure(**{field.name: _read(field.type, row[field.name]) for field in fields(Figure)}) for row in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} holds no figures of studies: {error}; was it changed?") from error


def _read(kind: Any, text: str) -> Any:
    return kind(text) if kind in (int, float) else str(text)


def merge(figures: Iterable[Figure]) -> list[Figure]:
    """One figure for each cell and seed, the last that is given; in the order of the recipes."""
    found = {one.key: one for one in figures}
    for one in found.values():
        if one.study not in recipes():
            raise UserError(f"{one.study} is a study of your own; allowed: those that 'tailor reproduce' lists")
        if not _known(one):
            raise UserError(f"{one.study} has no cell {one.row}, {one.column}; allowed: what --options shows of it")
    _check_alike(found.values())
    return sorted(found.values(), key=_place)


def _check_alike(figures: Iterable[Figure]) -> None:
    """One table is of one moment, and the seeds of a cell are of the same settings: else their mean says nothing."""
    moments: dict[str, str] = {}
    settings: dict[tuple[str, str, str], str] = {}
    for one in figures:
        if one.moment != moments.setdefault(one.study, one.moment):
            raise UserError(f"{one.study} was measured with figure=last and with figure=best; allowed: one of them")
        cell = one.study, one.row, one.column
        before = settings.setdefault(cell, one.settings)
        if one.settings != before:
            said = " and ".join(f"'{each}'" if each else "the recipe's settings" for each in (before, one.settings))
            raise UserError(f"{', '.join(cell)} was measured with {said}; allowed: the same for all seeds of a cell")


def _known(one: Figure) -> bool:
    recipe = recipes().get(one.study)
    return recipe is not None and one.row in recipe.rows and one.column in recipe.columns


def _place(one: Figure) -> tuple[Any, ...]:
    recipe, names = recipes()[one.study], list(recipes())
    cell = list(recipe.columns).index(one.column), list(recipe.rows).index(one.row)
    return names.index(one.study), *cell, one.seed, int(one.round or 0)


def gather(folders: Sequence[Path], to: Path) -> tuple[Path, Path]:
    """Add the figures of studies to those in ``to``.csv, and write the page ``to``.md of all of them."""
    to = to.with_suffix("") if to.suffix in (".csv", ".md") else to
    table, page = to.with_name(f"{to.name}.csv"), to.with_name(f"{to.name}.md")
    if page.is_file() and not page.read_text(errors="replace").startswith(HEADING):
        raise UserError(f"{page} is another page; allowed: another --to")
    before = read_figures(table) if table.is_file() else []
    figures = merge([*before, *_read_all(folders)])
    if not figures:
        raise UserError(f"no study is named, and {table} is not there; allowed: folders of 'tailor reproduce'")
    write_figures(figures, table)
    with whole_file(page) as temporary:
        temporary.write_text(markdown(figures, table.name, page.with_name(GUIDE).is_file()))
    return table, page


def _read_all(folders: Iterable[Path]) -> list[Figure]:
    """Of several studies; of two that say different things of one cell, which is right cannot be known."""
    found: dict[Any, tuple[Path, Figure]] = {}
    for folder in folders:
        for one in read_figures(folder):
            before, other = found.setdefault(one.key, (folder, one))
            if (one.value, one.moment, one.settings) != (other.value, other.moment, other.settings):
                raise UserError(
                    f"{before} and {folder} both have {one.study}, {one.row}, {one.column}, seed {one.seed}, "
                    "and differ; allowed: one of the two"
                )
    return [one for _, one in found.values()]


# The page.

COMMAND, GUIDE = "`tailor reproduce`", "reproduce.md"  # the second lies beside the page in the documentation
HEADING = "# What comes out\n"
INTRO = (
    HEADING
    + """
Tables and figures of the five papers, measured with tailorfl. Accuracies are in %. Each cell has the mean over seeds,
with several of them ± half of a 95 % interval (Student's t), and in brackets what the paper prints and by how much the
measured figure is above it; a dash was not measured. Claims are the paper's own; whether they hold is decided by the
means. Of several seeds a difference has a ± too, half of such an interval of the differences seed by seed; a verdict is
marked as within the spread over seeds where differences in that interval would make it another one.

`tailor gather` makes this page of the figures in [{table}]({table}), a line for each cell and seed, which it takes from
the folders that {command} leaves.
"""
)


def markdown(figures: Sequence[Figure], table: str, guide: bool = False) -> str:
    """The page: how many claims hold, then study by study, and the studies of which there is nothing."""
    by_study: dict[str, list[Figure]] = {}
    for one in figures:
        by_study.setdefault(one.study, []).append(one)
    parts = [INTRO.format(table=table, command=f"[{COMMAND}]({GUIDE})" if guide else COMMAND), *_overview(by_study)]
    for name, own in by_study.items():
        parts += ["", *_study(recipes()[name], own)]
    if missing := [recipe for name, recipe in recipes().items() if name not in by_study]:
        parts += [
            "",
            "## Not gathered yet",
            "",
            *(f"- `{one.name}`: {one.title} ({', '.join(one.data)})" for one in missing),
        ]
    return "\n".join(parts) + "\n"


def _overview(by_study: dict[str, list[Figure]]) -> list[str]:
    heads = ("study", "cells", "seeds", "claims that hold", "do not hold", "not judged", SPREAD)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, own in by_study.items():
        recipe, cells = recipes()[name], {(one.row, one.column) for one in own}
        found = [measured for measured, _ in judged(recipe, scores_of(own))]
        words, close = [one.word for one in found], sum(one.within_spread for one in found)
        hold, fail = (sum(word.startswith(said) for word in words) for said in ("holds", "does not hold"))
        seeds = len({one.seed for one in own})
        whole = len(recipe.rows) * len(recipe.columns)
        lines.append(
            f"| [{name}](#{_anchor(name)}) | {len(cells)} of {whole} | {seeds} | {hold} | {fail} | "
            f"{len(words) - hold - fail} | {close} |"
        )
    return lines


def _study(recipe: Recipe, figures: Sequence[Figure]) -> Iterator[str]:
    scores, rows, columns = scores_of(figures), *_measured(recipe, figures)
    yield from (f"## {recipe.name}", "", f"{recipe.title}. {moment(recipe, figures[0].moment).capitalize()}.")
    if recipe.paper:
        yield f"Paper: {recipe.paper}."
    if changed := sorted({one.settings for one in figures if one.settings}):
        where = "; ".join(f"`{settings}`{_cells_with(settings, figures)}" for settings in changed)
        yield f"With settings other than the recipe's: {where}."
    yield from ("", f"| {recipe.over or ''} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|")
    for row in rows:
        cells = [_cell(recipe, (row, column), scores) for column in columns]
        yield f"| {row} | {' | '.join(cells)} |"
    for head, lines in (
        ("Claims", [verdict_line(recipe, *pair) for pair in judged(recipe, scores)]),
        ("What the paper leaves open", recipe.open),
        ("What was tried", recipe.tried),
    ):
        if lines:
            yield from ("", f"{head}:", "", *(f"- {line}" for line in lines))
    yield from ("", _cost(figures))


def _cells_with(settings: str, figures: Sequence[Figure]) -> str:
    """Which cells were measured with these settings, after a blank; nothing if all were."""
    columns: dict[str, dict[str, bool]] = {}
    for one in figures:
        columns.setdefault(one.column, {})[one.row] = one.settings == settings
    if all(all(rows.values()) for rows in columns.values()):
        return ""
    found = []
    for column, rows in columns.items():
        some = [row for row, so in rows.items() if so]
        if some:
            found.append(column if len(some) == len(rows) else f"{column} ({', '.join(some)})")
    return f" in {', '.join(found)}"


def _measured(recipe: Recipe, figures: Sequence[Figure]) -> tuple[list[str], list[str]]:
    """The rows and columns of which there is something, in their order."""
    rows, columns = {one.row for one in figures}, {one.column for one in figures}
    return [row for row in recipe.rows if row in rows], [column for column in recipe.columns if column in columns]


def _cell(recipe: Recipe, point: Point, scores: Callable[[Point, int | None], Scores]) -> str:
    found = scores(point, None)
    return f"{figure(found, recipe.percent)} {beside(found, recipe.published_for(*point), recipe.percent)}".strip()


def scores_of(figures: Sequence[Figure]) -> Callable[[Point, int | None], Scores]:
    found: dict[tuple[str, str, str], Scores] = {}
    for one in figures:
        found.setdefault((one.row, one.column, one.round), {})[one.seed] = one.value
    return lambda point, at: found.get((*point, LAST if at is None else str(at)), {})


def _cost(figures: Sequence[Figure]) -> str:
    """How long the runs took; cells may read the same run, which has one time."""
    recipe = recipes()[figures[0].study]
    runs = {(*recipe.run_of(one.row, one.column), one.seed): one for one in figures}
    machines = ", ".join(sorted({one.machine for one in runs.values()}))
    minutes = sum(one.seconds for one in runs.values()) / 60
    return f"{len(runs)} runs, {minutes:.0f} minutes one after the other on {machines}."


def _anchor(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter in "-_")

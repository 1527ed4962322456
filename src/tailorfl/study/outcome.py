"""What the cells of a recipe came to: a tidy table, one beside the published figures, claims, and a picture."""

import csv
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.table import Table

from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import picture
from tailorfl.study.compare import COLOURS, STYLES, evaluated_rounds
from tailorfl.study.recipe import Cell, Claim, Plan, Point, Recipe, folder_of
from tailorfl.study.run import MAY_CHANGE, MEASURES

RESULTS, TABLE = "results.csv", "table.md"
CLOSEST = 0.04  # of a picture's width, between two values of a sweep

Scores = dict[int, float]  # seed, figure
Key = tuple[str, str, int]  # row, column, seed


@dataclass
class Outcome:
    """A study on disk, as far as it is done."""

    plan: Plan
    folder: Path
    summaries: dict[Key, dict[str, Any]] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, cell: Cell, summary: dict[str, Any]) -> None:
        """The summary of a finished run; one whose figure is no number counts as failed."""
        key, measure = (cell.row, cell.column, cell.seed), self.plan.recipe.measure_of(cell.row, cell.column)
        if summary["personalized_loss"] is None:
            self.failures[key] = "diverged: the loss on test data is not finite"
        elif figure_of(summary, measure) is None:
            self.failures[key] = f"its summary has no {measure}"
        else:
            self.summaries[key] = summary
        note = f"{cell.title}: {summary['diverged_updates']} updates diverged and were left out"
        if summary["diverged_updates"] and note not in self.notes:
            self.notes.append(note)

    def fail(self, cell: Cell, reason: str) -> None:
        self.failures[cell.row, cell.column, cell.seed] = reason

    def scores(self, point: Point, round: int | None = None) -> Scores:
        """The figure of a cell for each seed, in the units of the table: after the last rounds, unless one is named."""
        row, column = point
        found = {}
        for seed in self.plan.seeds:
            summary = self.summaries.get((row, column, seed))
            if summary is not None and round is None:
                found[seed] = self._figure(row, column, seed, summary)
            elif summary is not None and round in (curve := self.curve(row, column, seed)):
                found[seed] = curve[round]
        return found

    def _figure(self, row: str, column: str, seed: int, summary: Mapping[str, Any]) -> float:
        """Of one run: after its last round, or the mean over as many rounds at its end as the recipe says."""
        recipe = self.plan.recipe
        figure = figure_of(summary, recipe.measure_of(row, column))
        assert figure is not None
        if recipe.last == 1:
            return _unit(recipe) * figure
        first = summary["rounds"] - recipe.last
        return mean(value for number, value in self.curve(row, column, seed).items() if number > first)

    def curve(self, row: str, column: str, seed: int) -> dict[int, float]:
        """Round by round, where clients were evaluated; the last alone, if only the summary has the figure."""
        measure, unit = self.plan.recipe.measure_of(row, column), _unit(self.plan.recipe)
        lines = evaluated_rounds(self.folder / folder_of(self.plan.recipe, row, column, seed))
        found = {line["round"]: figure_of(line, measure) for line in lines}
        if not any(value is not None for value in found.values()):
            summary = self.summaries[row, column, seed]
            found = {summary["rounds"]: figure_of(summary, measure)}
        return {number: unit * value for number, value in found.items() if value is not None}

    def failed(self) -> list[str]:
        """A line for each reason in each column, with the rows and seeds that it kept from being measured."""
        groups: dict[tuple[str, str], dict[str, list[int]]] = {}
        for (row, column, seed), reason in self.failures.items():
            groups.setdefault((column, reason), {}).setdefault(row, []).append(seed)
        return [
            f"{self.plan.recipe.place(column)}, {_rows_and_seeds(rows)}: {reason}"
            for (column, reason), rows in groups.items()
        ]


def _rows_and_seeds(rows: Mapping[str, Sequence[int]]) -> str:
    alike: dict[tuple[int, ...], list[str]] = {}
    for row, seeds in rows.items():
        alike.setdefault(tuple(seeds), []).append(row)
    said = [f"{', '.join(names)} (seed {', '.join(map(str, seeds))})" for seeds, names in alike.items()]
    return "; ".join(said)


def figure_of(record: Mapping[str, Any], measure: str) -> float | None:
    """A figure of a summary, or of a round; ``group_accuracies.NAME`` is that of one group."""
    key, dot, name = measure.partition(".")
    found = record.get(key)
    if dot:
        found = found.get(name) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


def _unit(recipe: Recipe) -> float:
    return 100.0 if recipe.percent else 1.0


# Claims.


@dataclass(frozen=True)
class Verdict:
    """A claim against figures: by how much the first of each pair is above the second."""

    claim: Claim
    differences: dict[tuple[Point, Point], float]
    of: int  # comparisons that the claim makes

    @property
    def word(self) -> str:
        if not self.differences:
            return "cannot be judged"
        if not all(map(self.claim.holds, self.differences.values())):
            return "does not hold"
        there = len(self.differences)
        return "holds" if there == self.of else f"holds in {there} of {self.of} comparisons, the others are missing"

    def numbers(self, shown: str) -> str:
        """For each column (or row) the difference that speaks most against the claim."""
        along = 1 if self.claim.row is not None else 0
        worst: dict[str, tuple[float, Point]] = {}
        for (first, second), difference in self.differences.items():
            against = -abs(difference) if self.claim.level is not None else difference
            at = first[along]
            before = worst.get(at)
            if before is None or against < (-abs(before[0]) if self.claim.level is not None else before[0]):
                worst[at] = (difference, second)
        several = len(self.claim.above or self.claim.level or ()) > 1 or "others" in (self.claim.above or ())
        return ", ".join(
            f"{at} {difference:+{shown}}" + (f" (over {second[1 - along]})" if several else "")
            for at, (difference, second) in worst.items()
        )


def judge(claim: Claim, recipe: Recipe, scores: Callable[[Point, int | None], Scores]) -> Verdict:
    """Differences of the means over the seeds that both of a pair have."""
    found = {}
    pairs = claim.comparisons(recipe)
    for first, second in pairs:
        mine, theirs = scores(first, claim.round), scores(second, claim.round)
        both = mine.keys() & theirs.keys()
        if both:
            # Rounded: a margin that is met to the digit is met.
            found[first, second] = round(mean(mine[seed] - theirs[seed] for seed in both), 9)
    return Verdict(claim, found, len(pairs))


def published_scores(recipe: Recipe) -> Callable[[Point, int | None], Scores]:
    """The paper's own figures, to see whether they bear out its claims."""

    def scores(point: Point, number: int | None) -> Scores:
        value = recipe.published_for(*point) if number is None else None
        return {} if value is None else {0: value}

    return scores


def verdicts(outcome: Outcome) -> list[tuple[Verdict, Verdict]]:
    """Each claim against what was measured, and against what was published."""
    recipe = outcome.plan.recipe
    printed = published_scores(recipe)
    return [(judge(claim, recipe, outcome.scores), judge(claim, recipe, printed)) for claim in recipe.claims]


# Tables.


def _digits(percent: bool) -> str:
    return ".2f" if percent else ".4g"


def figure(scores: Scores, percent: bool) -> str:
    """Mean and standard deviation over seeds."""
    if not scores:
        return "-"
    shown = _digits(percent)
    values = list(scores.values())
    spread = f" ± {stdev(values):{shown}}" if len(values) > 1 else ""
    return f"{mean(values):{shown}}{spread}"


def beside(scores: Scores, published: float | None, percent: bool) -> str:
    """The published figure, and by how much the measured one is above it."""
    if published is None:
        return ""
    shown = _digits(percent)
    difference = f", {mean(scores.values()) - published:+{shown}}" if scores else ""
    return f"({published:{shown}}{difference})"


def terminal_tables(outcome: Outcome, width: int) -> Iterator[Table]:
    """A row a method, as many columns beside each other as fit, each cell in two lines."""
    plan, percent = outcome.plan, outcome.plan.recipe.percent
    first, each = max(map(len, plan.rows)) + 2, max(18, *(len(name) + 2 for name in plan.columns))
    fit = max(1, (width - first) // each)
    for start in range(0, len(plan.columns), fit):
        part = plan.columns[start : start + fit]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_lines=False)
        table.add_column(plan.recipe.over or "", overflow="fold")
        for column in part:
            table.add_column(column, justify="right", no_wrap=True)
        for row in plan.rows:
            cells = []
            for column in part:
                scores = outcome.scores((row, column))
                below = beside(scores, plan.recipe.published_for(row, column), percent)
                cells.append(figure(scores, percent) + (f"\n{below}" if below else ""))
            table.add_row(row, *cells)
        yield table


def heading(outcome: Outcome) -> list[str]:
    """What the table is, in a few lines."""
    plan, recipe = outcome.plan, outcome.plan.recipe
    what = "Accuracy in %" if recipe.percent else recipe.measure.replace("_", " ").capitalize()
    brackets = "; in brackets the published figure and the difference" if recipe.published else ""
    seeds = f"mean ± standard deviation over seeds {', '.join(map(str, plan.seeds))}"
    lines = [
        f"{recipe.name}: {recipe.title}",
        f"{what}, {_moment(recipe)}, {seeds if len(plan.seeds) > 1 else f'seed {plan.seeds[0]}'}{brackets}.",
    ]
    changed = " ".join(f"{key}={value}" for key, value in plan.changes.items() if key not in MAY_CHANGE)
    if changed:
        lines.append(f"With settings other than the recipe's: {changed}.")
    done = len(outcome.summaries)
    if done < len(plan.cells):
        lines.append(f"{done} of {len(plan.cells)} cells are measured.")
    return lines


def _moment(recipe: Recipe) -> str:
    return "after the last round" if recipe.last == 1 else f"mean of the last {recipe.last} rounds"


def claim_lines(outcome: Outcome) -> list[str]:
    """A line a claim: the verdict, the numbers, and what the published figures say."""
    lines = []
    for found, printed in verdicts(outcome):
        numbers = f": {found.numbers(_digits(outcome.plan.recipe.percent))}" if found.differences else ""
        paper = f" [published figures: {printed.word}]" if printed.differences else ""
        lines.append(f"{found.word}: {found.claim.sentence(outcome.plan.recipe)}{numbers}{paper}")
    return lines


def write_tables(outcome: Outcome) -> None:
    """The results so far: a tidy CSV, a row a run, and the table as Markdown."""
    recipe = outcome.plan.recipe
    lines = {}
    for (row, column, seed), summary in outcome.summaries.items():
        run, place = recipe.run_of(row, column)
        lines[run, place, seed] = {"study": recipe.name, "row": run, "column": place, **_flat(summary), "seed": seed}
    names = ["study", "row", "column", "seed", *(key for line in lines.values() for key in line)]
    with whole_file(outcome.folder / RESULTS) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(names)))
        writer.writeheader()
        writer.writerows(lines.values())
    with whole_file(outcome.folder / TABLE) as temporary:
        temporary.write_text(markdown(outcome))


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The single figures of a summary, those of groups under the names that a measure gives them."""
    named = {key: value.items() for key, value in summary.items() if isinstance(value, dict)}
    parts = {f"{key}.{name}": value for key, values in named.items() for name, value in values}
    return {key: value for key, value in {**summary, **parts}.items() if not isinstance(value, list | dict)}


def markdown(outcome: Outcome) -> str:
    plan, recipe = outcome.plan, outcome.plan.recipe
    title, *rest = heading(outcome)
    text = [
        f"# {title}",
        "",
        *rest,
        "",
        f"| {recipe.over or ''} | {' | '.join(plan.columns)} |",
        "|---" * (len(plan.columns) + 1) + "|",
    ]
    for row in plan.rows:
        cells = []
        for column in plan.columns:
            scores = outcome.scores((row, column))
            below = beside(scores, recipe.published_for(row, column), recipe.percent)
            cells.append(f"{figure(scores, recipe.percent)} {below}".strip())
        text.append(f"| {row} | {' | '.join(cells)} |")
    for head, lines in (
        ("Claims", claim_lines(outcome)),
        ("Not measured", outcome.failed()),
        ("Notes", outcome.notes),
        ("What the paper leaves open", list(recipe.open)),
    ):
        text += ["", f"## {head}", "", *(f"- {line}" for line in lines)] if lines else []
    return "\n".join(text) + "\n"


# Pictures.


def draw(outcome: Outcome, path: Path) -> None:
    """Accuracy over rounds, a panel a column; over the values of a sweep; or what a method measures of its clients.

    Bands are one deviation over seeds.
    """
    plan = outcome.plan
    recipe, sweep = plan.recipe, plan.recipe.kind == "sweep"
    panels = (recipe.over or "",) if sweep else plan.columns
    across = 2 if len(panels) == 4 else min(len(panels), 3)
    down = math.ceil(len(panels) / across)
    with picture(path, (5 * max(across, 1.4), 3.6 * down + 0.6)) as figure:
        grid = list(figure.subplots(down, across, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            if recipe.kind == "measures":
                lines = _measures(outcome, panel)
            else:
                found = _values(outcome) if sweep else _rounds(outcome, panel)
                lines = {row: found.get(row, {}) for row in plan.rows}
            for number, (name, line) in enumerate(lines.items()):
                _line(axes, name, number, line)
            axes.set(xlabel=panel if sweep else (recipe.against or "round").replace("_", " "), ylabel=_label(recipe))
            axes.set_title(recipe.title if sweep else panel, fontsize="medium")
            axes.grid(alpha=0.3)
            _scale(axes, plan)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=8, fontsize="small")


Line = dict[float, list[float]]  # place on the axis, the figures of the seeds


def _rounds(outcome: Outcome, column: str) -> dict[str, Line]:
    found: dict[str, Line] = {}
    for row, at, seed in outcome.summaries:
        if at == column:
            for number, value in outcome.curve(row, column, seed).items():
                found.setdefault(row, {}).setdefault(number, []).append(value)
    return found


def _measures(outcome: Outcome, column: str) -> dict[str, Line]:
    """Means over the clients that a method measured, evaluations together; rows without a place are left out."""
    recipe = outcome.plan.recipe
    found: dict[str, Line] = {}
    for row, at, seed in outcome.summaries:
        measured = outcome.folder / folder_of(recipe, row, column, seed) / MEASURES
        if at != column or not measured.is_file():
            continue
        with measured.open(newline="") as file:
            every = list(csv.DictReader(file))
        first = recipe.since * max((int(one["round"]) for one in every), default=0)
        rows = [one for one in every if int(one["round"]) > first and float(one[recipe.against or ""] or -1) >= 0]
        for line in recipe.lines:
            groups: Line = {}
            for one in rows:
                groups.setdefault(float(one[recipe.against or ""]), []).append(float(one[line]))
            name = line.replace("_", " ") if len(outcome.plan.rows) == 1 else f"{row}, {line.replace('_', ' ')}"
            for place, values in groups.items():
                if len(values) >= recipe.least:
                    found.setdefault(name, {}).setdefault(place, []).append(_unit(recipe) * mean(values))
    return found


def _values(outcome: Outcome) -> dict[str, Line]:
    places = _places(outcome.plan)
    found: dict[str, Line] = {}
    for row, column, _ in outcome.summaries:
        found.setdefault(row, {})[places[column]] = list(outcome.scores((row, column)).values())
    return found


def _places(plan: Plan) -> dict[str, float]:
    """Where the values of a sweep lie: numbers by size where that leaves room, others one after the other."""
    values = {column: plan.recipe.columns[column].settings.get(plan.recipe.over or "") for column in plan.columns}
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
        places = {column: float(value) for column, value in values.items() if value is not None}
        if _apart(places.values()):
            return places
    return {column: float(number) for number, column in enumerate(values)}


def _apart(places: Collection[float]) -> bool:
    """Whether no two ticks are so near that what is written below them would overlap."""
    on_axis = sorted(map(math.log, places) if _logarithmic(places) else places)
    gaps = [later - sooner for sooner, later in pairwise(on_axis)]
    return not gaps or min(gaps) >= CLOSEST * (on_axis[-1] - on_axis[0])


def _logarithmic(places: Collection[float]) -> bool:
    return min(places) > 0 and max(places) >= 10 * min(places)


def _line(axes: Any, row: str, number: int, line: Line) -> None:
    places = sorted(line)
    style = STYLES[number // COLOURS % len(STYLES)]
    middle = [mean(line[place]) for place in places]
    colour = f"C{number % COLOURS}"
    axes.plot(places, middle, style, color=colour, marker="o", ms=3, label=row)
    spread = [stdev(line[place]) if len(line[place]) > 1 else 0.0 for place in places]
    lower, upper = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(places, lower, upper, color=colour, alpha=0.15, linewidth=0)


def _scale(axes: Any, plan: Plan) -> None:
    """A sweep shows its values, on a logarithmic axis where they lie far apart; rounds are whole numbers."""
    if plan.recipe.kind != "sweep":
        axes.locator_params(axis="x", integer=True)
        return
    places = _places(plan)
    if _logarithmic(places.values()):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), list(places), rotation=90 if len(places) > 10 else 0)
    axes.minorticks_off()


def _label(recipe: Recipe) -> str:
    named = {recipe.measure_of(row, column) for row in recipe.rows for column in recipe.columns}
    what = {name.replace("_", " ") for name in ({"accuracy"} if recipe.kind == "measures" else named)}
    label = what.pop() if len(what) == 1 else "accuracy" if recipe.percent else ""
    return f"{label}, %" if recipe.percent else label

"""What the cells of a recipe came to: tidy tables, one beside the published figures, claims, and statistics."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from tailorfl.data.atomic import whole_file
from tailorfl.study.cells import Failure, Result
from tailorfl.study.compare import evaluated_rounds
from tailorfl.study.config import shown
from tailorfl.study.grid import diverged_updates, names_and_seeds, refused
from tailorfl.study.plan import Cell, Plan
from tailorfl.study.recipe import Claim, Moment, Point, Recipe, best_of, folder_of, possible
from tailorfl.study.run import MAY_CHANGE
from tailorfl.study.statistics import Interval, client_figures, holm, interval, over_seeds, paired
from tailorfl.study.tables import probability
from tailorfl.study.tidy import STATISTICS, flat, write_csv, write_results

TABLE, FIGURES = "table.md", "table.csv"
NAMES = ("study", "row", "column", "seed")  # of a run
SPREAD = "within the spread over seeds"
BEST = "best round picked on test data"

Scores = dict[int, float]  # seed, figure
Key = tuple[str, str, int]  # row, column, seed


@dataclass
class Outcome:
    """A study on disk, as far as it is done."""

    plan: Plan
    folder: Path
    summaries: dict[Key, dict[str, Any]] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    noted: dict[Key, str] = field(default_factory=dict)
    rounds: dict[Path, list[dict[str, Any]]] = field(default_factory=dict)  # of runs, once they were read
    clients: dict[tuple[Path, str], dict[str, float]] = field(default_factory=dict)  # the same, by column

    def take(self, cell: Cell, result: Result) -> None:
        """What came of the run that a cell is read from."""
        if isinstance(result, Failure):
            self.failures[cell.row, cell.column, cell.seed] = result.reason
        else:
            self.add(cell, result)

    def add(self, cell: Cell, summary: dict[str, Any]) -> None:
        """The summary of a finished run; one whose figure is no number counts as failed."""
        key, measure = (cell.row, cell.column, cell.seed), self.plan.recipe.measure_of(cell.row, cell.column)
        if isinstance(failure := refused(summary), Failure):
            self.failures[key] = failure.reason
        elif figure_of(summary, measure) is None:
            self.failures[key] = f"its summary has no {measure}"
        else:
            self.summaries[key] = summary
        if said := diverged_updates(cell.title, summary["diverged_updates"]):
            self.noted[key] = said

    def order(self) -> Iterator[Key]:
        """The cells as they are planned, whatever ended first."""
        return ((cell.row, cell.column, cell.seed) for cell in self.plan.cells)

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(self.noted[key] for key in self.order() if key in self.noted))

    def scores(self, point: Point, round: int | None = None) -> Scores:
        """The figure of a cell for each seed, in the units of the table: that of the plan, unless a round is named."""
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
        """Of one run: after its last round, the mean over as many as the recipe says, or of the best if asked for."""
        recipe = self.plan.recipe
        measure = recipe.measure_of(row, column)
        if self.plan.figure == "best" and (better := best_of(measure)):
            return better(self.curve(row, column, seed).values())
        if recipe.last > 1:
            first = summary["rounds"] - recipe.last
            return mean(value for number, value in self.curve(row, column, seed).items() if number > first)
        figure = figure_of(summary, measure)
        assert figure is not None
        return unit(recipe) * figure

    def curve(self, row: str, column: str, seed: int) -> dict[int, float]:
        """Round by round, where clients were evaluated; the last alone, if only the summary has the figure."""
        recipe = self.plan.recipe
        measure, folder = recipe.measure_of(row, column), self.folder / folder_of(recipe, row, column, seed)
        if folder not in self.rounds:
            self.rounds[folder] = evaluated_rounds(folder)
        found = {line["round"]: figure_of(line, measure) for line in self.rounds[folder]}
        if not any(value is not None for value in found.values()):
            summary = self.summaries[row, column, seed]
            found = {summary["rounds"]: figure_of(summary, measure)}
        return {number: unit(recipe) * value for number, value in found.items() if value is not None}

    def served(self, point: Point, seed: int) -> dict[str, float]:
        """The figure of each client of a cell after the last round; empty for a measure that clients do not have."""
        recipe = self.plan.recipe
        name, _, group = recipe.measure_of(*point).partition(".")
        key = self.folder / folder_of(recipe, *point, seed), OF_CLIENTS.get(name, "")
        if key not in self.clients:
            self.clients[key] = client_figures(*key) if key[1] else {}
        return {client: value for client, value in self.clients[key].items() if not group or _in(group, client)}

    def failed(self) -> list[str]:
        """A line for each reason in each column, with the rows and seeds that it kept from being measured."""
        groups: dict[tuple[str, str], dict[str, list[int]]] = {}
        for row, column, seed in self.order():
            if (reason := self.failures.get((row, column, seed))) is not None:
                groups.setdefault((column, reason), {}).setdefault(row, []).append(seed)
        return [
            f"{self.plan.recipe.place(column)}, {names_and_seeds(rows)}: {reason}"
            for (column, reason), rows in groups.items()
        ]


# Where the measure of a cell is found of each client: the columns of a run's table of clients.
OF_CLIENTS = {
    "personalized_accuracy": "accuracy",
    "group_accuracies": "accuracy",
    "personalized_loss": "loss",
    "global_accuracy": "global_accuracy",
}


def _in(group: str, client: str) -> bool:
    """Clients of a group are called NAME/0, NAME/1, ..."""
    return client.rpartition("/")[0] == group


def figure_of(record: Mapping[str, Any], measure: str) -> float | None:
    """A figure of a summary, or of a round; ``group_accuracies.NAME`` is that of one group."""
    key, dot, name = measure.partition(".")
    found = record.get(key)
    if dot:
        found = found.get(name) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


def unit(recipe: Recipe) -> float:
    """Accuracies are fractions on disk and per cent in a table."""
    return 100.0 if recipe.percent else 1.0


# Claims.


@dataclass(frozen=True)
class Verdict:
    """A claim against figures: by how much the first of each pair is above the second.

    The means decide; whether those of other seeds might decide otherwise is said beside.
    """

    claim: Claim
    differences: dict[tuple[Point, Point], Interval]
    of: int  # comparisons that the claim makes

    @property
    def word(self) -> str:
        if not self.differences:
            return "cannot be judged"
        spread = f" ({SPREAD})" if self.within_spread else ""
        if self._against:
            return f"does not hold{spread}"
        there = len(self.differences)
        missing = "" if there == self.of else f" in {there} of {self.of} comparisons, the others are missing"
        return f"holds{spread}{missing}"

    @property
    def _against(self) -> list[Interval]:
        return [found for found in self.differences.values() if not self.claim.holds(found.mean)]

    @property
    def within_spread(self) -> bool:
        """Whether an interval holds differences for and against; one counterexample without is enough."""
        if self._against:
            return not any(map(self._settled, self._against))
        return not all(map(self._settled, self.differences.values()))

    def _settled(self, found: Interval) -> bool:
        """Of one seed the spread is not known."""
        return found.low is None or found.high is None or self.claim.settled(found.low, found.high)

    def numbers(self, shown: str) -> str:
        """For each column (or row) the difference that speaks most against the claim, with its interval."""
        along = 1 if self.claim.row is not None else 0
        worst: dict[str, tuple[Interval, Point]] = {}
        for (first, second), found in self.differences.items():
            at = first[along]
            if at not in worst or self.claim.favour(found.mean) < self.claim.favour(worst[at][0].mean):
                worst[at] = (found, second)
        several = len(self.claim.others) > 1 or "others" in self.claim.others
        return ", ".join(
            f"{at} {found.mean:+{shown}}"
            + ("" if found.half is None else f" ± {found.half:{shown}}")
            + (f" (over {second[1 - along]})" if several else "")
            for at, (found, second) in worst.items()
        )


def judge(claim: Claim, recipe: Recipe, scores: Callable[[Point, int | None], Scores]) -> Verdict:
    """Differences seed by seed, over the seeds that both of a pair have."""
    found = {}
    pairs = claim.comparisons(recipe)
    for first, second in pairs:
        mine, theirs = scores(first, claim.round), scores(second, claim.round)
        both = mine.keys() & theirs.keys()
        if both:
            found[first, second] = _rounded(interval([mine[seed] - theirs[seed] for seed in both]))
    return Verdict(claim, found, len(pairs))


def _rounded(found: Interval) -> Interval:
    """A margin that is met to the digit is met."""
    shorter = {key: round(value, 9) for key, value in vars(found).items() if value is not None}
    return replace(found, **shorter)


def published_scores(recipe: Recipe) -> Callable[[Point, int | None], Scores]:
    """The paper's own figures, to see whether they bear out its claims."""

    def scores(point: Point, number: int | None) -> Scores:
        value = recipe.published_for(*point) if number is None else None
        return {} if value is None else {0: value}

    return scores


def judged(recipe: Recipe, scores: Callable[[Point, int | None], Scores]) -> list[tuple[Verdict, Verdict]]:
    """Each claim against what was measured, and against what was published."""
    printed = published_scores(recipe)
    return [(judge(claim, recipe, scores), judge(claim, recipe, printed)) for claim in recipe.claims]


def verdicts(outcome: Outcome) -> list[tuple[Verdict, Verdict]]:
    return judged(outcome.plan.recipe, outcome.scores)


def grounds(recipe: Recipe, found: Verdict, printed: Verdict) -> str:
    """The claim, the numbers that decide on it, and what the published figures say."""
    numbers = f": {found.numbers(digits(recipe.percent))}" if found.differences else ""
    paper = f" [published figures: {printed.word}]" if printed.differences else ""
    return f"{found.claim.sentence(recipe)}{numbers}{paper}"


def verdict_line(recipe: Recipe, found: Verdict, printed: Verdict) -> str:
    return f"{found.word}: {grounds(recipe, found, printed)}"


def claim_lines(outcome: Outcome) -> list[str]:
    return [verdict_line(outcome.plan.recipe, *pair) for pair in verdicts(outcome)]


# Client by client.


def comparisons(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each two that a claim on rows is about: the same clients under both, each the mean over seeds."""
    recipe = outcome.plan.recipe
    claims = [claim for claim in recipe.claims if claim.row is not None and claim.round is None]
    pairs = dict.fromkeys(pair for claim in claims for pair in claim.comparisons(recipe))
    rows = []
    for first, second in pairs:
        seeds = [seed for seed in outcome.plan.seeds if {(*first, seed), (*second, seed)} <= outcome.summaries.keys()]
        mine, theirs = ([outcome.served(point, seed) for seed in seeds] for point in (first, second))
        if seeds and (pair := paired(over_seeds(mine), over_seeds(theirs))):
            rows.append({"column": first[1], "row": first[0], "other": second[0], "seeds": len(seeds), **vars(pair)})
    corrected = holm([row["p"] for row in rows])
    return [{**row, "p_holm": p} for row, p in zip(rows, corrected, strict=True)]


def comparison_lines(outcome: Outcome) -> list[str]:
    """The same in words, in the units of the table."""
    recipe = outcome.plan.recipe
    shown, scale = digits(recipe.percent), unit(recipe)
    return [
        f"{recipe.place(row['column'])}, {row['row']} over {row['other']}: mean {scale * row['difference']:+{shown}}, "
        f"median {scale * row['median']:+{shown}}, of {row['clients']} clients {row['higher']} higher and "
        f"{row['lower']} lower, p {probability(row['p'])}, by Holm's correction {probability(row['p_holm'])}"
        for row in comparisons(outcome)
    ]


# Tables.


def digits(percent: bool) -> str:
    return ".2f" if percent else ".4g"


def figure(scores: Scores, percent: bool) -> str:
    """The mean over seeds, with its 95 % interval where there are two or more."""
    if not scores:
        return "-"
    shown, found = digits(percent), interval(list(scores.values()))
    return f"{found.mean:{shown}}" + ("" if found.half is None else f" ± {found.half:{shown}}")


def beside(scores: Scores, published: float | None, percent: bool) -> str:
    """The published figure, and by how much the measured one is above it."""
    if published is None:
        return ""
    shown = digits(percent)
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
    seeds = ", ".join(map(str, plan.seeds))
    over = f"mean ± 95 % interval over seeds {seeds}" if len(plan.seeds) > 1 else f"seed {seeds}"
    lines = [
        f"{recipe.name}: {recipe.title}",
        f"{what}, {moment(recipe, plan.figure)}, {over}{brackets}.",
    ]
    if changed := settings_of(plan):
        lines.append(f"With settings other than the recipe's: {changed}.")
    done = len(outcome.summaries)
    if done < len(plan.cells):
        lines.append(f"{done} of {len(plan.cells)} cells are measured.")
    return lines


def settings_of(plan: Plan) -> str:
    """What the command changed of the recipe."""
    return " ".join(f"{key}={shown(value)}" for key, value in plan.changes.items() if key not in MAY_CHANGE)


def moment(recipe: Recipe, figure: Moment) -> str:
    """Which round the figures of a table are of."""
    if figure == "best":
        return BEST
    return "after the last round" if recipe.last == 1 else f"mean of the last {recipe.last} rounds"


def markdown(outcome: Outcome) -> str:
    plan, recipe = outcome.plan, outcome.plan.recipe
    title, *rest = heading(outcome)
    text = [
        f"# {title}",
        "",
        *rest,
        *([f"Paper: {recipe.paper}"] if recipe.paper else []),
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
        ("Client by client after the last round (Wilcoxon's signed-rank test)", comparison_lines(outcome)),
        ("Not measured", outcome.failed()),
        ("Notes", outcome.notes),
        ("What the paper leaves open", recipe.open),
        ("What was tried", recipe.tried),
    ):
        text += ["", f"## {head}", "", *(f"- {line}" for line in lines)] if lines else []
    return "\n".join(text) + "\n"


# Files.


def write_tables(outcome: Outcome) -> None:
    """The results so far: tidy tables of the runs, of the cells and of the comparisons, and the table as Markdown."""
    write_results(_runs(outcome), outcome.folder, NAMES)
    write_csv(_cells(outcome), outcome.folder / FIGURES)
    if rows := comparisons(outcome):
        write_csv(rows, outcome.folder / STATISTICS)
    else:
        (outcome.folder / STATISTICS).unlink(missing_ok=True)
    with whole_file(outcome.folder / TABLE) as temporary:
        temporary.write_text(markdown(outcome))


def _runs(outcome: Outcome) -> list[dict[str, Any]]:
    """A row a run; what reads another's runs has none of its own."""
    recipe, rows = outcome.plan.recipe, {}
    for row, column, seed in outcome.order():
        if (summary := outcome.summaries.get((row, column, seed))) is not None:
            run, place = recipe.run_of(row, column)
            names = dict(zip(NAMES, (recipe.name, run, place, seed), strict=True))
            rows[run, place, seed] = {**names, **flat(summary)}
    return list(rows.values())


def _cells(outcome: Outcome) -> list[dict[str, Any]]:
    """A row a cell, in the units of the table: over seeds its mean, deviation and 95 % interval; what is published."""
    plan, recipe = outcome.plan, outcome.plan.recipe
    rows = []
    for row in plan.rows:
        for column in plan.columns:
            scores, published = outcome.scores((row, column)), recipe.published_for(row, column)
            measure = recipe.measure_of(row, column)
            low, high = (unit(recipe) * end for end in possible(measure))
            found = vars(interval(list(scores.values()), (low, high))) if scores else {}
            rows.append(
                {
                    "row": row,
                    "column": column,
                    "measure": measure,
                    "figure": moment(recipe, plan.figure),
                    "seeds": len(scores),
                    **{key: found.get(key) for key in ("mean", "std", "low", "high")},
                    "published": published,
                    "difference": None if published is None or not scores else found["mean"] - published,
                }
            )
    return rows

"""The tables of a page as plain data: every cell a text to read and a value to sort by."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tailorfl.report.marks import thinned
from tailorfl.report.results import Entry, Results
from tailorfl.report.runs import RunResult, number
from tailorfl.report.settings import untold
from tailorfl.study.statistics import holm, interval, over_seeds, paired
from tailorfl.study.tables import UNITS, WITH_INTERVAL, amount, largest_unit, probability
from tailorfl.study.tables import number as as_number
from tailorfl.study.tables import percent as as_percent

MOST_CLIENTS = 1000  # rows of the table of clients


@dataclass(frozen=True)
class Cell:
    """``value`` is a number, or the text itself where there is none; None sorts last."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Head:
    """The head of a column, and what it means."""

    name: str
    about: str = ""
    words: bool = False  # else numbers, which stand at the right


@dataclass(frozen=True)
class Table:
    """``key`` is unique within its panel."""

    key: str
    title: str
    about: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    panel: str = ""


def word(text: Any) -> Cell:
    return Cell(str(text), str(text))


def figure(value: float | None, shown: Callable[[float | None], str]) -> Cell:
    return Cell(shown(value), value)


def tables_of(results: Results) -> list[Table]:
    """All tables of what was found, panel by panel."""
    told = results.kind == "study" or bool(results.swept)  # by the command: no need to say how runs differ
    return [table for panel in results.panels for table in _panel(results.of(panel), panel, results.regression, told)]


def _panel(entries: Sequence[Entry], panel: str, regression: bool, told: bool) -> Iterable[Table]:
    yield _summary(entries, panel, regression)
    differ = _differences(entries, panel)
    if len(differ.heads) > 1 and not told:
        yield differ
    compared = _paired(entries, panel, regression)
    if compared.rows:
        yield compared
    clients = _clients(entries, panel, regression)
    if clients.rows:
        yield clients


# Figures of each entry.

ACCURACIES = {
    "personalized_accuracy": Head("personalized", "accuracy of each client's model on its own test rows, mean, in %"),
    "personalized_accuracy_std": Head("± clients", "standard deviation over clients"),
    "worst_decile_accuracy": Head("worst 10 %", "the tenth of the clients that is served worst, in %"),
    "validation_accuracy": Head("validation", "on rows that are held out of training, in %"),
    "global_accuracy": Head("global", "the one model for all on the same rows, in %"),
    "group_mean_accuracy": Head("groups", "mean over groups, in %"),
    "new_client_accuracy": Head("new clients", "clients that took no part in training, in %"),
    "joining_accuracy": Head("late clients", "clients that joined late, in %"),
}
LOSSES = {
    "personalized_loss": Head("personalized loss", "loss of each client's model on its own test rows"),
    "validation_loss": Head("validation loss", "on rows that are held out of training"),
    "global_loss": Head("global loss", "the one model for all on the same rows"),
    "new_client_loss": Head("new clients", "loss of clients that took no part in training"),
}


def _summary(entries: Sequence[Entry], panel: str, regression: bool) -> Table:
    known = LOSSES if regression else ACCURACIES
    keys = [key for key in known if any(_values(entry, key) for entry in entries)]
    seeds = _several_seeds(entries)
    unit = largest_unit(
        [int(value) for e in entries for key in ("bytes_up", "bytes_down") for value in _values(e, key)] or [0]
    )
    heads = (
        Head("", words=True),
        *([Head("seeds", "how many")] if seeds else ()),
        Head("rounds", "done, of those to do"),
        *(known[key] for key in keys),
        Head(f"up, {UNITS[unit]}", "sent by clients in all rounds"),
        Head(f"down, {UNITS[unit]}", "sent to clients in all rounds"),
        Head("shared, parameters", "those that travel"),
        Head("training, s", "seconds"),
        Head("evaluation, s", "seconds"),
    )
    rows = []
    for entry in entries:
        shown = as_number if regression else as_percent
        traffic = [_mean(entry, key) for key in ("bytes_up", "bytes_down")]
        rows.append(
            (
                word(entry.label),
                *([Cell(str(len(entry.runs)), len(entry.runs))] if seeds else ()),
                _progress(entry.runs),
                *(_over_seeds(_values(entry, key), shown, key in WITH_INTERVAL) for key in keys),
                *(Cell("-" if size is None else amount(size / 1000**unit), size) for size in traffic),
                _count(_mean(entry, "shared_parameters")),
                *(figure(_mean(entry, key), _seconds) for key in ("seconds_training", "seconds_evaluation")),
            )
        )
    about = "Means over seeds; ± after a figure is half of a 95 % interval (Student's t)." if seeds else ""
    return Table("summary", "Summary", about, heads, tuple(rows), panel)


def _differences(entries: Sequence[Entry], panel: str) -> Table:
    """A column for each key in which entries differ, whatever their methods: else nobody knew what is compared."""
    found = untold(entries)
    values = {key: [_setting(value) for value in own] for key, own in found.items()}
    columns = (Head(key, words=any(isinstance(cell.value, str) for cell in own)) for key, own in values.items())
    rows = tuple((word(entry.label), *own) for entry, *own in zip(entries, *values.values(), strict=True))
    about = "Settings that do not come with the method; '-': it has no such setting."
    return Table("differences", "What differs", about, (Head("", words=True), *columns), rows, panel)


def _setting(text: str | None) -> Cell:
    """Sorted as a number where it is one."""
    if text is None:
        return Cell("-")
    value = number(text)
    return Cell(text, text if value is None else value)


def _progress(runs: Sequence[RunResult]) -> Cell:
    """Of all seeds alike, or from the fewest to the most."""
    done, planned = (sorted(many) for many in zip(*((len(run.rounds), run.planned) for run in runs), strict=True))
    said = _range(done) if done == planned else f"{_range(done)} of {_range(planned)}"
    return Cell(said, fmean(done))


def _range(counts: Sequence[int]) -> str:
    """Of sorted numbers."""
    return f"{counts[0]:,}" if counts[0] == counts[-1] else f"{counts[0]:,}–{counts[-1]:,}"


def _several_seeds(entries: Sequence[Entry]) -> bool:
    return any(len(entry.runs) > 1 for entry in entries)


def _values(entry: Entry, key: str) -> list[float]:
    return [value for run in entry.runs if (value := number(run.figures.get(key))) is not None]


def _mean(entry: Entry, key: str) -> float | None:
    values = _values(entry, key)
    return fmean(values) if values else None


def _over_seeds(values: Sequence[float], shown: Callable[[float | None], str], with_interval: bool) -> Cell:
    if not values:
        return Cell("-")
    found = interval(values)
    half = f" ± {shown(found.half)}" if with_interval and found.half is not None else ""
    return Cell(f"{shown(found.mean)}{half}", found.mean)


def _count(value: float | None) -> Cell:
    return Cell("-" if value is None else f"{value:,.0f}", value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else amount(value)


# Client by client.


def _paired(entries: Sequence[Entry], panel: str, regression: bool) -> Table:
    """Every entry beside the first, over the seeds that both have with the same clients."""
    first, *others = entries
    found = [(entry, pair) for entry in others if (pair := _beside(entry, first, regression))]
    corrected = holm([pair.p for _, pair in found])
    unit, shown = ("loss", "+.4g") if regression else ("points", "+.2f")
    factor = 1.0 if regression else 100.0
    heads = (
        Head("", words=True),
        Head("clients"),
        Head(f"mean, {unit}", f"its figure minus that of {first.label}"),
        Head(f"median, {unit}"),
        Head("higher", f"clients with a higher figure than with {first.label}"),
        Head("lower"),
        Head("p", "Wilcoxon's signed-rank test, two-sided"),
        Head("p (Holm)", "corrected for the number of comparisons"),
    )
    rows = tuple(
        (
            word(entry.label),
            Cell(str(pair.clients), pair.clients),
            *(Cell(format(factor * one, shown), one) for one in (pair.difference, pair.median)),
            *(Cell(str(one), one) for one in (pair.higher, pair.lower)),
            *(Cell(probability(one), one) for one in (pair.p, p)),
        )
        for (entry, pair), p in zip(found, corrected, strict=True)
    )
    seeds = ", means over seeds" if _several_seeds(entries) else ""
    about = (
        f"Each client's figure beside its own with {first.label}{seeds}. Clients that train together are "
        "not independent of each other: read p as a measure of how consistent the difference is."
    )
    return Table("paired", f"Against {first.label}, client by client", about, heads, rows, panel)


def _beside(entry: Entry, first: Entry, regression: bool) -> Any:
    runs = [(mine, other) for mine in entry.runs for other in first.runs if mine.is_like(other)]
    if not runs:
        return None
    mine, other = (over_seeds([_served(run, regression) for run in side]) for side in zip(*runs, strict=True))
    return paired(mine, other)


def _ended(entry: Entry) -> bool:
    return any(run.clients for run in entry.runs)


def _has_clients_of(entry: Entry, other: Entry) -> bool:
    return entry is other or any(mine.is_like(theirs) for mine in entry.runs for theirs in other.runs)


def _served(run: RunResult, regression: bool) -> dict[str, float]:
    found = {client.name: client.loss if regression else client.accuracy for client in run.served}
    return {name: value for name, value in found.items() if value is not None}


def _clients(entries: Sequence[Entry], panel: str, regression: bool) -> Table:
    """A row a client, a column an entry that has the clients of the first."""
    shown = as_number if regression else as_percent
    first = next((entry for entry in entries if _ended(entry)), None)
    base = next((run for run in first.runs if run.clients), None) if first else None
    others = [entry.label for entry in entries if first and _ended(entry) and not _has_clients_of(entry, first)]
    going = [entry.label for entry in entries if not _ended(entry)]
    entries = [entry for entry in entries if entry.label not in (*others, *going)]
    served = {
        entry.label: over_seeds([_served(run, regression) for run in entry.runs if run.clients]) for entry in entries
    }
    everybody = base.served if base else []
    chosen = thinned(everybody, MOST_CLIENTS)
    heads = (
        Head("client", words=True),
        Head("train", "training rows"),
        Head("test", "test rows"),
        *(Head(entry.label, "loss" if regression else "accuracy in %") for entry in entries),
    )
    rows = tuple(
        (
            word(client.name),
            Cell(f"{client.train:,}", client.train),
            Cell(f"{client.test:,}", client.test),
            *(figure(served[entry.label].get(client.name), shown) for entry in entries),
        )
        for client in chosen
    )
    cut = f" {len(chosen):,} of {len(everybody):,} clients." if len(chosen) < len(everybody) else ""
    seeds = ", mean over seeds; sizes are those of the first seed" if _several_seeds(entries) else ""
    left_out = f" Left out, for their clients are others: {', '.join(others)}." if others else ""
    not_there = f" Not there, for they have not ended: {', '.join(going)}." if going else ""
    about = f"After the last round{seeds}.{cut}{left_out}{not_there}"
    return Table("clients", "Clients", about, heads, rows, panel)

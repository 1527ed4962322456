"""Summaries as tables for the terminal."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from tailorfl.study.statistics import interval

UNITS = ("B", "kB", "MB", "GB", "TB")

# Of the second table: what its columns are called, and where their figures are in a summary; {} is accuracy or loss.
PARTICIPANTS = {
    "cold\nstart": "cold_start_{}",
    "joined\nlate": "joining_{}",
    "on training\nrows": "training_accuracy",
    "out-of-sample\ngap": "out_of_sample_gap",
    "participation\ngap": "participation_gap",
}


def summary_table(summaries: Sequence[dict[str, Any]]) -> RenderableType:
    """One row a method: how well clients are served, what it cost. It fits into 80 columns.

    Below it, where clients joined late or were tested on training rows, a second one with what belongs to that.
    """
    regression = all(summary["personalized_accuracy"] is None for summary in summaries)
    served, further = _served_table(summaries, regression), _participants_table(summaries, regression)
    return Group(served, "", further) if further else served


def _served_table(summaries: Sequence[dict[str, Any]], regression: bool) -> Table:
    unit = largest_unit([summary[key] for summary in summaries for key in ("bytes_up", "bytes_down")])
    title = f"{summaries[0]['data']}, {summaries[0]['clients']} clients"
    table = _plain_table(title if regression else f"{title}; accuracies in %")
    table.add_column("method", overflow="fold")
    for column in _columns(summaries, regression, UNITS[unit]):
        table.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(summary["method"], *_cells(summary, summaries, regression, unit))
    return table


def _plain_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def _columns(summaries: Sequence[dict[str, Any]], regression: bool, unit: str) -> list[str]:
    what = ["loss", "global\nloss"] if regression else ["personalized", "±", "worst\n10 %", "global"]
    new = ["new\nclients"] if _has_new(summaries) else []
    return [*what, *new, f"up\n{unit}", f"down\n{unit}", "train\ns", "eval\ns"]


def _cells(summary: dict[str, Any], summaries: Sequence[dict[str, Any]], regression: bool, unit: int) -> list[str]:
    if regression:
        what = [number(summary["personalized_loss"]), number(summary["global_loss"])]
        new = [number(summary["new_client_loss"])]
    else:
        keys = ("personalized_accuracy", "personalized_accuracy_std", "worst_decile_accuracy", "global_accuracy")
        what = [percent(summary[key]) for key in keys]
        new = [percent(summary["new_client_accuracy"])]
    traffic = [amount(summary[key] / 1000**unit) for key in ("bytes_up", "bytes_down")]
    seconds = [amount(summary[key]) for key in ("seconds_training", "seconds_evaluation")]
    return [*what, *(new if _has_new(summaries) else []), *traffic, *seconds]


def _has_new(summaries: Sequence[dict[str, Any]]) -> bool:
    return any(summary["new_client_loss"] is not None for summary in summaries)


def _participants_table(summaries: Sequence[dict[str, Any]], regression: bool) -> Table | None:
    keys = {name: key.format("loss" if regression else "accuracy") for name, key in PARTICIPANTS.items()}
    found = {name: [summary.get(key) for summary in summaries] for name, key in keys.items()}
    there = {name: values for name, values in found.items() if any(value is not None for value in values)}
    if not there or list(there) == ["participation\ngap"]:  # which can be seen above
        return None
    table = _plain_table("participants" + ("; losses" if regression else "; in %"))
    table.add_column("method", overflow="fold")
    for name in there:
        table.add_column(name, justify="right", no_wrap=True)
    shown = number if regression else percent
    for summary, *figures in zip(summaries, *there.values(), strict=True):
        table.add_row(summary["method"], *map(shown, figures))
    return table


# What the columns of a table over seeds are called, and where their figures are in a summary.
SERVED = {
    "validation": "validation_accuracy",
    "personalized": "personalized_accuracy",
    "±\nclients": "personalized_accuracy_std",
    "worst\n10 %": "worst_decile_accuracy",
    "global": "global_accuracy",
    "new\nclients": "new_client_accuracy",
}
LOSSES = {
    "validation\nloss": "validation_loss",
    "loss": "personalized_loss",
    "global\nloss": "global_loss",
    "new\nclients": "new_client_loss",
}


def lines_table(
    heads: Sequence[str], lines: Sequence[tuple[Sequence[str], Sequence[dict[str, Any]]]], seeds: Sequence[int]
) -> Table:
    """One row a method or setting, means over its runs; with several seeds the first figures have a 95 % interval."""
    summaries = [summary for _, found in lines for summary in found]
    regression = all(summary["personalized_accuracy"] is None for summary in summaries)
    columns = {
        name: key
        for name, key in (LOSSES if regression else SERVED).items()
        if any(summary.get(key) is not None for summary in summaries)
    }
    data, clients = (", ".join(dict.fromkeys(str(one[key]) for one in summaries)) for key in ("data", "clients"))
    title = f"{data}, {clients} clients{'' if regression else '; accuracies in %'}"
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean ± 95 % interval over seeds {', '.join(map(str, seeds))}"
    table = _plain_table(f"{title}; {over}")
    for head in heads:
        table.add_column(head, overflow="fold")
    for name in (*columns, "train\ns"):
        table.add_column(name, justify="right", no_wrap=True)
    for names, found in lines:
        cells = [_mean_cell([one.get(key) for one in found], key, regression) for key in columns.values()]
        table.add_row(*names, *cells, amount(fmean(summary["seconds_training"] for summary in found)))
    return table


WITH_INTERVAL = ("personalized_accuracy", "personalized_loss", "validation_accuracy", "validation_loss")


def _mean_cell(values: Sequence[float | None], key: str, regression: bool) -> str:
    there = [value for value in values if value is not None]
    shown = number if regression else percent
    if not there:
        return "-"
    found = interval(there)
    half = "" if found.half is None or key not in WITH_INTERVAL else f" ± {shown(found.half)}"
    return f"{shown(found.mean)}{half}"


def paired_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    """Every method beside the first, client by client; None where there is nothing to compare."""
    compared = [row for row in rows if row["reference"] is not None]
    if not compared:
        return None
    regression = "personalized_loss" in compared[0]
    unit = "loss" if regression else "points"
    table = _plain_table(f"against {compared[0]['reference']}, client by client; Wilcoxon's signed-rank test")
    table.add_column("method", overflow="fold")
    for head in ("clients", f"mean\n{unit}", f"median\n{unit}", "higher", "lower", "p", "p\n(Holm)"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in compared:
        moved = [f"{row[key]:+.4g}" if regression else f"{100 * row[key]:+.2f}" for key in ("difference", "median")]
        counts = [str(row[key]) for key in ("higher", "lower")]
        chances = [probability(row[key]) for key in ("p", "p_holm")]
        table.add_row(row["method"], str(row["clients"]), *moved, *counts, *chances)
    return table


def probability(value: float) -> str:
    """A p-value, to the digits that are read of it."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A fraction in per cent, without the sign."""
    return "-" if value is None else f"{100 * value:.2f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def amount(value: float) -> str:
    """Traffic or time, as many places as a person reads."""
    return "0" if value == 0 else f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def largest_unit(sizes: Sequence[int]) -> int:
    """The place in ``UNITS`` of the unit in which the largest of these traffic figures is below 1000."""
    largest = max(sizes)
    return next((place for place in range(len(UNITS)) if largest < 1000 ** (place + 1)), len(UNITS) - 1)


def stage_table(summary: dict[str, Any]) -> Table:
    """One row a stage of a method that has stages: what it shares, how well it serves alone and with those before."""
    regression = summary["personalized_accuracy"] is None
    what = "loss" if regression else "accuracy"
    table = _plain_table("stages, each after its last round" + ("" if regression else "; in %"))
    columns = ["rounds", "shared", "personal", "shared of\noriginal, %", "alone", "ensemble", "mean\nbeta"]
    table.add_column("stage")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    shown = number if regression else percent
    for row in summary["stages"]:
        table.add_row(
            str(row["stage"]),
            str(row["rounds"]),
            f"{row['shared_parameters']:,}",
            f"{row['personal_parameters']:,}",
            f"{100 * row['shared_of_original']:.1f}",
            shown(row[f"stage_{what}"]),
            shown(row[f"ensemble_{what}"]),
            "-" if row["mean_beta"] is None else f"{row['mean_beta']:.2f}",
        )
    return table

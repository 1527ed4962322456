"""Summaries as tables for the terminal."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def summary_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """One row a method: how well clients are served, what it cost."""
    regression = all(summary["personalized_accuracy"] is None for summary in summaries)
    table = Table(title=f"{summaries[0]['data']}, {summaries[0]['clients']} clients", title_justify="left")
    table.add_column("method")
    for column in _columns(summaries, regression):
        table.add_column(column, justify="right")
    for summary in summaries:
        table.add_row(summary["method"], *_cells(summary, summaries, regression))
    return table


def _columns(summaries: Sequence[dict[str, Any]], regression: bool) -> list[str]:
    what = ["loss", "global loss"] if regression else ["personalized", "± clients", "worst 10 %", "global"]
    new = ["new clients"] if _has_new(summaries) else []
    return [*what, *new, "up", "down", "training s", "evaluation s"]


def _cells(summary: dict[str, Any], summaries: Sequence[dict[str, Any]], regression: bool) -> list[str]:
    if regression:
        what = [number(summary["personalized_loss"]), number(summary["global_loss"])]
        new = [number(summary["new_client_loss"])]
    else:
        keys = ("personalized_accuracy", "personalized_accuracy_std", "worst_decile_accuracy", "global_accuracy")
        what = [percent(summary[key]) for key in keys]
        new = [percent(summary["new_client_accuracy"])]
    cost = [size(summary["bytes_up"]), size(summary["bytes_down"])]
    seconds = [f"{summary[key]:.1f}" for key in ("seconds_training", "seconds_evaluation")]
    return [*what, *(new if _has_new(summaries) else []), *cost, *seconds]


def _has_new(summaries: Sequence[dict[str, Any]]) -> bool:
    return any(summary["new_client_loss"] is not None for summary in summaries)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def size(bytes: int) -> str:
    """A traffic figure a person can read."""
    amount = float(bytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"

"""One HTML page that holds all it needs: it opens from a disk, without a network."""

import base64
import gzip
import html
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any

from tailorfl import __version__
from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import import_extra
from tailorfl.report.asked import not_measured
from tailorfl.report.marks import MOST, Plot
from tailorfl.report.plots import plots_of
from tailorfl.report.results import Results
from tailorfl.report.runs import RunResult, number
from tailorfl.report.settings import common_settings, repeats
from tailorfl.report.study import study_of
from tailorfl.report.swept import choice_of
from tailorfl.report.tables import tables_of
from tailorfl.study.grid import DIVERGED, diverged_updates
from tailorfl.study.progress import Figures

LARGEST = 6_000_000  # bytes of a page
FEWEST = 25  # points of a line; fewer would hide what happened
DIGITS = 6
SEEN = 100  # rounds in which the last evaluation is looked for


def write_page(results: Results, path: Path) -> None:
    """The page, whole or not at all; lines have fewer points where it would become too large."""
    most = MOST
    text = render(page_data(results, most))
    while len(text) > LARGEST and most > FEWEST:
        most //= 2
        text = render(page_data(results, most))
    with whole_file(path) as temporary:
        temporary.write_bytes(text.encode(errors="replace"))


def page_data(results: Results, most: int = MOST) -> dict[str, Any]:
    """What the page shows, as JSON can hold it."""
    tables, plots, study = tables_of(results), plots_of(results, most), study_of(results)
    data = {
        "title": results.title,
        "version": __version__,
        "runs": len(results.runs),
        "progress": progress_of(results),
        "notes": [
            *(f"left out: {reason}" for reason in results.left_out),
            *([] if study else notes_of(results)),
        ],  # a study has its own
        "choice": _choice(results),
        "missing": not_measured(results),
        "study": None if study is None else asdict(study),
        "panels": [
            {
                "name": panel,
                "tables": [asdict(table) for table in tables if table.panel == panel],
                "plots": [plot_data(plot) for plot in plots if plot.panel == panel],
            }
            for panel in results.panels
        ],
        "settings": common_settings(results),
        "repeats": [asdict(one) for one in repeats(results)],
    }
    rounded: dict[str, Any] = _rounded(data)
    return rounded


def _choice(results: Results) -> str:
    """Of a sweep, as the command says it: runs that lie beside each other are none."""
    return choice_of(results.entries, results.regression, results.swept) if results.swept else ""


def progress_of(results: Results) -> list[str]:
    """A line for each run that has not ended: how far it is, and the figures of its last round."""
    return [
        f"{name}: {f'failed: {run.error}' if run.error else _so_far(run)}"
        for name, run in _named(results)
        if not run.finished
    ]


def notes_of(results: Results) -> list[str]:
    """A line for each run that has ended with something that its figures do not tell."""
    lines = []
    for name, run in _named(results):
        summary = run.summary or {}
        if "personalized_loss" in summary and summary["personalized_loss"] is None:
            lines.append(f"{name}: {DIVERGED}")
        lines.append(diverged_updates(name, int(number(summary.get("diverged_updates")) or 0)))
    return list(filter(None, lines))


def _named(results: Results) -> Iterator[tuple[str, RunResult]]:
    """Every run, and what it is called in a line; its seed is named where there are several."""
    for entry in results.entries:
        for run in entry.runs:
            seed = f"seed {run.seed}" if len(entry.runs) > 1 else ""
            yield ", ".join(filter(None, (entry.panel, entry.label, seed))), run


def _so_far(run: RunResult) -> str:
    if not run.rounds:
        return "no round has ended yet"
    said, figures = "", Figures()
    for line in run.rounds[-SEEN:]:  # as many as hold an evaluation, mostly
        served = {key: number(line[key]) for key in line if key in ("personalized_accuracy", "personalized_loss")}
        said = figures({"personalized_accuracy": None, **served, "loss": number(line.get("loss"))})
    return f"round {run.rounds[-1]['round']} of {run.planned}, {said}"


def plot_data(plot: Plot) -> dict[str, Any]:
    marks = [{"kind": type(mark).__name__.lower(), **asdict(mark)} for mark in plot.marks]
    return {**asdict(plot), "name": plot.name, "marks": marks}


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as a person reads; what JSON has no word for is nothing."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def render(data: dict[str, Any]) -> str:
    """The page with its data and the plotting library in it, both packed: browsers unpack them."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {"data": packed([text.encode()]), "plotly": packed_library()}
    blocks = "".join(f'<script type="text/plain" id="{name}">{part}</script>\n' for name, part in parts.items())
    return shell(data["title"], blocks, "page.js")


def shell(title: str, blocks: str, script: str) -> str:
    """The frame of a page: its style, what it holds, and the script that fills it."""
    scripts = "\n".join(asset(name) for name in ("parts.js", script))
    fillings = {
        "/*style*/": asset("page.css"),
        "/*script*/": scripts,
        "<!--blocks-->": blocks,
        "<!--title-->": html.escape(title),  # last: what is filled in is not filled again
    }
    text = asset("page.html")
    for place, filling in fillings.items():
        text = text.replace(place, filling)
    return text


@cache
def asset(name: str) -> str:
    return (resources.files("tailorfl.report") / "assets" / name).read_text(encoding="utf-8")


def library() -> bytes:
    """Plotly's script."""
    script: str = import_extra("plotly.offline", "report", "writing a page").get_plotlyjs()
    return script.encode()


@cache
def packed_library() -> str:
    return packed([library()])


def packed(parts: Iterable[bytes]) -> str:
    return base64.b64encode(gzip.compress(b"".join(parts), 9, mtime=0)).decode()

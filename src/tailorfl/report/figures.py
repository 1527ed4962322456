"""Every plot as a picture for a paper: PNG and SVG, in one style."""

from collections.abc import Iterable, Sequence
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import import_extra
from tailorfl.report.marks import Axis, Bars, HeatMap, Line, Plot, Points
from tailorfl.report.plots import plots_of
from tailorfl.report.results import Results
from tailorfl.study.palette import style_of

FORMATS = ("png", "svg")
SIZE = (4.6, 3.2)  # inches; a column of a paper
PURPOSE = "drawing figures"
MANY = 4  # lines; with more, bands would hide them
DOT, LARGEST_DOT = 14, 140  # square points, of one client and of many at the same place
LONGEST_LINE = 72  # letters of a legend that are as wide as a figure

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text, to be found and edited
    "svg.hashsalt": "tailorfl",  # the same plot is the same file
    "text.parse_math": False,  # names of clients and files are no formulas
}


def write_figures(results: Results, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """A file for each plot and format; the names say which plot it is."""
    return [path for plot in plots_of(results) for path in write_figure(plot, folder, formats)]


def write_figure(plot: Plot, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    matplotlib = import_extra("matplotlib", "plot", PURPOSE)
    figures = import_extra("matplotlib.figure", "plot", PURPOSE)
    written = []
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=SIZE, dpi=300, layout="constrained")
        axes = figure.subplots()
        _draw(figure, axes, plot)
        for kind in formats:
            path = folder / f"{plot.name}.{kind}"
            with whole_file(path) as temporary:
                figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def _draw(figure: Any, axes: Any, plot: Plot) -> None:
    axes.set(xlabel=plot.x.label, ylabel=plot.y.label)
    most = max((many for mark in plot.marks if isinstance(mark, Points) for many in mark.many), default=1)
    for mark in plot.marks:
        if isinstance(mark, Line):
            _line(axes, mark, bands=len(plot.marks) <= MANY)
        elif isinstance(mark, Points):
            _points(axes, mark, most)
        elif isinstance(mark, HeatMap):
            _heat(figure, axes, mark)
    _bars(axes, [mark for mark in plot.marks if isinstance(mark, Bars)], plot.stacked)
    _limit(axes, plot)
    named = [mark.name for mark in plot.marks if not isinstance(mark, HeatMap)]
    if len(named) > 1 or (named and plot.legend):
        _legend(figure, named)


def _legend(figure: Any, names: Sequence[str]) -> None:
    """Below the plot, which keeps its shape: the figure grows by what has no room."""
    longest = max(_width(_key(name)) for name in names)
    most = max(1, LONGEST_LINE // (longest + 6))  # columns; each name has a sign before it
    columns = ceil(len(names) / ceil(len(names) / most))  # rows as full as they can be
    lines = sum(_key(name).count("\n") + 1 for name in names) / columns
    figure.set_figheight(SIZE[1] + 0.16 * max(0.0, lines - 2))
    figure.legend(frameon=False, loc="outside lower center", ncols=columns)


def _key(name: str) -> str:
    """As a legend takes it: matplotlib breaks no line, and leaves out what begins with an underscore."""
    text = fill(name, LONGEST_LINE - 6)
    return f" {text}" if text.startswith("_") else text


def _line(axes: Any, line: Line, bands: bool) -> None:
    style = style_of(line.style)
    there = [place for place, value in enumerate(line.y) if value is not None]
    x, y = [line.x[place] for place in there], [line.y[place] for place in there]
    dots = {"marker": style.sign} if line.dots and len(x) <= 30 else {}
    face = {"markerfacecolor": "white"} if style.open else {}
    axes.plot(x, y, style.stroke, color=style.colour, label=_key(line.name), **dots, **face)
    for number, band in enumerate(line.bands if bands else ()):
        both = [k for k in there if band.low[k] is not None and band.high[k] is not None]
        low, high = ([side[k] for k in both] for side in (band.low, band.high))
        axes.fill_between(
            [line.x[k] for k in both], low, high, color=style.colour, alpha=0.28 if number else 0.13, linewidth=0
        )


def _points(axes: Any, points: Points, most: int) -> None:
    """The area of each tells how many it is of; the largest are so many."""
    style = style_of(points.style)
    sizes = [max(DOT / 2, min(DOT, LARGEST_DOT / most) * many) for many in points.many]
    face = "none" if style.open else (style.colour, 0.4 if most > 1 else 0.75)
    edge = 0.7 if most > 1 or style.open else 0  # large ones of several entries lie on each other
    look = {"marker": style.sign, "facecolors": face, "edgecolors": style.colour, "linewidths": edge}
    axes.scatter(points.x, points.y, s=sizes, label=_key(points.name), **look)


def _bars(axes: Any, bars: Sequence[Bars], stacked: bool) -> None:
    if not bars:
        return
    labels, width = bars[0].labels, 0.8 if stacked else 0.8 / len(bars)
    below = [0.0] * len(labels)
    for number, one in enumerate(bars):
        values = [value or 0.0 for value in one.y]
        shift = 0.0 if stacked else (number - (len(bars) - 1) / 2) * width
        places = [place + shift for place in range(len(labels))]
        style = style_of(one.style)
        look = {"color": style.colour, "hatch": style.hatch, "edgecolor": "white", "linewidth": 0}
        axes.bar(places, values, width, bottom=below, label=_key(one.name), **look)
        below = [total + value for total, value in zip(below, values, strict=True)] if stacked else below
    _names(axes.set_xticks, labels)
    axes.grid(visible=False, axis="x")


def _heat(figure: Any, axes: Any, mark: HeatMap) -> None:
    nothing = float("nan")
    values = [[nothing if value is None else value for value in row] for row in mark.values]
    image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=mark.low, vmax=mark.high, interpolation="nearest")
    figure.colorbar(image, ax=axes, label=mark.name)
    _names(axes.set_xticks, mark.columns)
    _names(axes.set_yticks, mark.rows)
    axes.grid(visible=False)


def _names(set_ticks: Any, names: Sequence[str], most: int = 12) -> None:
    """As many names as there is room for; long ones stand upright below an axis."""
    step = -(-len(names) // most)
    shown = names[::step]
    upright = set_ticks.__name__ == "set_xticks" and sum(_width(name) for name in shown) > 40
    set_ticks(range(0, len(names), step), shown, **({"rotation": 45, "ha": "right"} if upright else {}))


def _width(text: str) -> int:
    """Letters of its longest line."""
    return max(map(len, text.split("\n")))


def _limit(axes: Any, plot: Plot) -> None:
    for side, axis in (("x", plot.x), ("y", plot.y)):
        _limit_axis(axes, side, axis)
    if plot.diagonal:
        ends = _ends(plot.marks)
        axes.plot(ends, ends, ":", color="0.5", linewidth=1, zorder=0)


def _limit_axis(axes: Any, side: str, axis: Axis) -> None:
    limits = {name: value for name, value in (("min", axis.low), ("max", axis.high)) if value is not None}
    if limits:
        getattr(axes, f"set_{side}lim")(**{f"{side}{name}": value for name, value in limits.items()})
    if axis.log:
        getattr(axes, f"set_{side}scale")("log")
    if axis.ticks:
        getattr(axes, f"set_{side}ticks")(axis.ticks, [f"{value:g}" for value in axis.ticks])
        axes.minorticks_off()
    if axis.whole:
        axes.locator_params(axis=side, integer=True)


def _ends(marks: Iterable[Any]) -> tuple[float, float]:
    values = [value for mark in marks if isinstance(mark, Points) for value in (*mark.x, *mark.y)]
    return min(values), max(values)

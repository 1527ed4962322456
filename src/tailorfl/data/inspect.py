"""Shows a federation: its sizes as a table, and who has how much of which class as a picture, drawn or in text."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from tailorfl.data.extras import picture
from tailorfl.data.federated import FederatedData, Split
from tailorfl.data.objects import there

SHADES = " ░▒▓█"
NUMBERED_CELLS = 200  # up to so many cells have their number written in
LONGEST_NAME = 24
NAMED_TICKS = 50  # up to so many clients or classes are named one by one


def describe(data: FederatedData) -> Table:
    """Sizes of a federation."""
    table = Table(title=f"{data.source}: {data.clients} clients", title_justify="left")
    table.add_column("")
    for column in ("total", "smallest", "median", "largest"):
        table.add_column(column, justify="right")
    for split in ("train", "validation", "test"):
        table.add_row(f"{split} samples", *_spread(data.rows(split).counts.numpy()))
    if data.detection:
        table.add_row("train objects", *_spread(_objects(data)))
    if not data.regression:
        held = (data.label_counts() > 0).sum(1).numpy()
        table.add_row("classes a client", *(str(data.num_classes), *_spread(held)[1:]))
    new = f"; {len(data.new_clients)} clients held out of training" if data.new_clients else ""
    late = f"; {len(data.joining_clients)} clients join late" if data.joining_clients else ""
    table.caption = f"{'; '.join(map(_inputs, data.groups or (data,)))}{new}{late}"
    return table


def _inputs(data: FederatedData) -> str:
    task = "regression" if data.regression else f"{data.num_classes} classes"
    task = f"objects of {task}" if data.detection else task
    return f"{data.kind} inputs of shape {'x'.join(map(str, data.input_shape))}, {task}"


def _objects(data: FederatedData) -> np.ndarray:
    """How many objects each client's training images show, the ignored ones too."""
    found = torch.zeros(data.clients, dtype=torch.int64)
    for part in data.groups or (data,):
        counts = there(part.targets.cpu()).sum(1)
        found.index_add_(0, part.train.client, counts[part.train.index])
    return found.numpy()


def _spread(numbers: np.ndarray) -> tuple[str, str, str, str]:
    shown = (numbers.sum(), numbers.min(), np.median(numbers), numbers.max())
    return tuple(f"{value:,.10g}" for value in shown)  # type: ignore[return-value]


def shade_counts(data: FederatedData, split: Split = "train", lines: int = 40, columns: int = 100) -> str:
    """The clients-by-classes picture in text: a line a client, a shade a class; the darkest is the largest count.

    Of more clients than lines some are shown, evenly chosen; more classes than columns are put together.
    """
    counts = data.label_counts(split).numpy()
    shown = np.arange(min(lines, len(counts))) * len(counts) // min(lines, len(counts))
    counts = np.stack([part.sum(axis=1) for part in _groups(counts[shown], columns)], axis=1)
    level = np.ceil(counts / max(counts.max(), 1) * (len(SHADES) - 1)).astype(int)
    names = [_short(data.names[i]) for i in shown]
    width = max(map(len, names))
    # A cell is two characters wide, about as wide as high, where there is room.
    cell = 2 if 2 * counts.shape[1] <= columns else 1
    rows = [
        f"{name:>{width}} │{''.join(SHADES[step] * cell for step in row)}│ {total:,}"
        for name, row, total in zip(names, level, counts.sum(axis=1), strict=True)
    ]
    note = f"{len(shown)} of {data.clients:,} clients" + (f", {data.num_classes:,} classes" if data.classes else "")
    return "\n".join([*rows, f"{note}; the darkest is {counts.max():,} samples, blank is none"])


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _groups(counts: np.ndarray, most: int) -> list[np.ndarray]:
    return np.array_split(counts, min(most, counts.shape[1]), axis=1)


def draw_counts(data: FederatedData, path: Path, split: Split = "train") -> None:
    """The clients-by-classes picture as a PNG file: clients along, classes upright, darker is more."""
    counts = data.label_counts(split).numpy()
    clients, classes = counts.shape
    size = (np.clip(0.28 * clients + 2.5, 6, 16), np.clip(0.28 * classes + 1.6, 2.4, 12))
    with picture(path, size) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(
            counts.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=max(counts.max(), 1)
        )
        figure.colorbar(image, ax=axes, label="samples", pad=0.01)
        axes.set_title(f"{data.source}: {split} samples of {clients:,} clients", loc="left", fontsize=10)
        _name_axis(axes, "x", "client", data.names)
        _name_axis(axes, "y", "class", data.classes or ("all",))
        if counts.size <= NUMBERED_CELLS:
            _write_numbers(axes, counts)


def _name_axis(axes: Any, axis: str, title: str, names: tuple[str, ...]) -> None:
    """Name every client or class where there is room, else leave the numbers that matplotlib chooses."""
    axes.set(**{f"{axis}label": title})
    axes.tick_params(axis, labelsize=8)
    if len(names) > NAMED_TICKS:
        return
    turned = {"rotation": 90} if axis == "x" and max(map(len, names)) > 2 else {}
    axes.set(**{f"{axis}ticks": range(len(names))})
    getattr(axes, f"set_{axis}ticklabels")([_short(name) for name in names], **turned)


def _write_numbers(axes: Any, counts: np.ndarray) -> None:
    for client, label in zip(*np.nonzero(counts), strict=True):
        number = counts[client, label]
        ink = "white" if number > counts.max() * 0.6 else "black"
        axes.text(client, label, f"{number}", ha="center", va="center", fontsize=6, color=ink)

"""A picture of how a method mixed global and local layers: degrees by layer and round, factors, frozen layers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tailorfl.data.extras import picture
from tailorfl.errors import UserError
from tailorfl.study.export import one_client, read_run
from tailorfl.study.folder import NOTES
from tailorfl.study.palette import COLOURS
from tailorfl.study.tidy import read_csv

Notes = dict[int, dict[str, dict[str, float]]]  # round, client, name

WAYS = {"down": "broadcast", "up": "aggregation"}


def read_notes(folder: Path) -> Notes:
    """What a run wrote down of its clients; what was not known is left out."""
    found: Notes = {}
    if not (folder / NOTES).is_file():
        return found
    for row in read_csv(folder / NOTES):
        if row["value"]:
            of_round = found.setdefault(int(row["round"]), {})
            of_round.setdefault(row["client"], {})[row["name"]] = float(row["value"])
    return found


def has_mixing(notes: Notes) -> bool:
    """Whether a run mixed layers."""
    return any("down_1" in note for clients in notes.values() for note in clients.values())


def degrees(notes: Notes, client: str, way: str) -> tuple[list[int], np.ndarray]:
    """The rounds of a client and its mix degrees in them, [layers, rounds]."""
    rounds = [number for number, clients in sorted(notes.items()) if f"{way}_1" in clients.get(client, {})]
    columns = [_in_order(notes[number][client], way) for number in rounds]
    return rounds, np.array(columns).T


def _in_order(note: Mapping[str, float], way: str) -> list[float]:
    places = sorted(int(name.split("_")[1]) for name in note if re.fullmatch(rf"{way}_\d+", name))
    return [note[f"{way}_{place}"] for place in places]


def frozen_layers(notes: Notes) -> dict[int, float]:
    """In each round, the layers of a client that nothing global is mixed into: the mean over its clients."""
    return {
        number: float(np.mean([sum(degree == 0 for degree in _in_order(note, "down")) for note in clients.values()]))
        for number, clients in sorted(notes.items())
    }


def draw_mixing(folder: Path, client: str, out: Path) -> None:
    """The degrees of one client, the mix factors of all, and the layers that did not travel."""
    _, names = read_run(folder)
    notes = read_notes(folder)
    if not has_mixing(notes):
        raise UserError(f"{folder} mixed no layers; allowed: a run of pmixfed, or of fedalt or fedsim with mix")
    number = one_client(client, names, folder)
    if not degrees(notes, names[number], "down")[0]:
        raise UserError(f"client {client!r} took part in no round; allowed: one that did (see {NOTES})")
    with picture(out, (10, 6.4), dpi=130) as figure:
        grid = figure.subplots(2, 2)
        for axes, way in zip(grid[0], WAYS, strict=True):
            image = _heat_map(axes, notes, names[number], way)
        figure.colorbar(image, ax=grid[0], label="share of the global layer")
        _factors(grid[1][0], notes)
        _frozen(grid[1][1], notes)


def _heat_map(axes: Any, notes: Notes, client: str, way: str) -> Any:
    rounds, found = degrees(notes, client, way)
    image = axes.imshow(found, aspect="auto", origin="lower", vmin=0, vmax=1, cmap="viridis")
    step = max(1, len(rounds) // 8)
    axes.set_xticks(range(0, len(rounds), step), rounds[::step])
    axes.set_yticks(range(len(found)), range(1, len(found) + 1))
    axes.set(xlabel="rounds of the client", ylabel="layer, from the base", title=f"client {client}: {WAYS[way]}")
    return image


def _factors(axes: Any, notes: Notes) -> None:
    for colour, (way, name) in zip(COLOURS, WAYS.items(), strict=False):
        there = {n: [note[f"mu_{way}"] for note in c.values() if f"mu_{way}" in note] for n, c in sorted(notes.items())}
        known = {number: values for number, values in there.items() if values}
        low, middle, high = (
            [float(np.percentile(values, share)) for values in known.values()] for share in (10, 50, 90)
        )
        axes.plot(list(known), middle, color=colour, label=f"{name}: median of the round's clients")
        axes.fill_between(list(known), low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlabel="round", ylabel="mix factor μ", ylim=(0, 1), title="mix factors; bands hold 80 % of the clients")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")
    axes.grid(alpha=0.3)


def _frozen(axes: Any, notes: Notes) -> None:
    found = frozen_layers(notes)
    axes.plot(list(found), list(found.values()), color=COLOURS[2])
    axes.set(xlabel="round", ylabel="layers", title="layers of a client with nothing global, mean", ylim=(0, None))
    axes.grid(alpha=0.3)

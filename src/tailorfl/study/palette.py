"""How the entries of pictures look: in colours that people with any colour vision tell apart, each with other signs."""

from dataclasses import dataclass
from typing import Any

# Colours (Okabe and Ito), then again with other strokes and hatches.
# There are as many signs as colours, so they move on by one in each turn, and are open in every second.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
STROKES = ("-", "--", ":", "-.")
SIGNS = ("o", "s", "D", "^", "P", "X", "*")
HATCHES = ("", "////", "....", "xxxx")  # of bars
MOST = 30  # signs on a line; more would hide it


@dataclass(frozen=True)
class Style:
    """How an entry looks in all pictures, by its place among them."""

    colour: str
    stroke: str
    hatch: str
    sign: str
    open: bool  # the sign is not filled


def style_of(place: int) -> Style:
    colours = len(COLOURS)
    turn = place // colours
    sign = SIGNS[(place + turn) % len(SIGNS)]
    return Style(
        COLOURS[place % colours], STROKES[turn % len(STROKES)], HATCHES[turn % len(HATCHES)], sign, turn % 2 > 0
    )


def look(place: int, points: int) -> dict[str, Any]:
    """Of the line with this place among others, with so many points, as matplotlib is told it."""
    style = style_of(place)
    face = {"markerfacecolor": "white"} if style.open else {}
    return {
        "color": style.colour,
        "linestyle": style.stroke,
        "marker": style.sign,
        "markersize": 4,
        "markevery": max(1, -(-points // MOST)),
        **face,
    }

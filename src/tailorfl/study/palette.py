"""How lines of pictures look: in colours that people with any colour vision tell apart, each with a sign of its own."""

from typing import Any

# Colours (Okabe and Ito), then again with other strokes and signs.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
STROKES = ("-", "--", ":", "-.")
SIGNS = ("o", "s", "D", "^", "P", "X", "*")
MOST = 30  # signs on a line; more would hide it


def look(place: int, points: int) -> dict[str, Any]:
    """Of the line with this place among others, with so many points."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": STROKES[place // len(COLOURS) % len(STROKES)],
        "marker": SIGNS[place % len(SIGNS)],
        "markersize": 4,
        "markevery": max(1, -(-points // MOST)),
    }

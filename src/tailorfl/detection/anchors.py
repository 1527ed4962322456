"""Anchors: the boxes in which a detector looks for objects, some for each cell of each feature map.

The ScalableFL paper prints how many a cell has, 5 or 7, and nothing of their forms. Here each map is for objects of one
octave: its scale is twice that of the map before, as its cells are twice as large, and the last map's, of a few cells,
goes up to the whole image. With five maps the smallest squares measure 0.0375 of the image: 10 of 256 pixels.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

LAST_SCALE = 0.6  # of the last map, in units of the image: its largest square is 0.95
SQUARES = 3  # a cell, evenly over the octave
RATIOS = {5: (2.0,), 7: (2.0, 3.0)}  # width to height and height to width, by the number of anchors a cell
Grid = tuple[int, int]
"""Rows and columns of a feature map."""


def shapes_of_cell(scale: float, number: int) -> list[tuple[float, float]]:
    """Widths and heights of so many anchors of a cell: squares of three sizes, and each ratio lying and standing."""
    squares = [scale * 2 ** (step / SQUARES) for step in range(SQUARES)]
    middle = scale * 2**0.5  # of the octave, for there is one anchor of each ratio
    wide = [(middle * ratio**0.5, middle / ratio**0.5) for ratio in RATIOS[number]]
    return [(side, side) for side in squares] + [shape for w, h in wide for shape in ((w, h), (h, w))]


def grid_anchors(grids: Sequence[Grid], numbers: Sequence[int]) -> Tensor:
    """All anchors of feature maps, with so many a cell, [anchors, 4]: map by map, row by row, cell by cell.

    They may reach over the borders of the image.
    """
    return _grid_anchors(tuple(grids), tuple(numbers)).clone()


@cache
def _grid_anchors(grids: tuple[Grid, ...], numbers: tuple[int, ...]) -> Tensor:
    scales = [LAST_SCALE / 2 ** (len(grids) - 1 - place) for place in range(len(grids))]
    # On the CPU in any case: networks are also made where tensors have a shape alone.
    with torch.device("cpu"):
        maps = zip(grids, numbers, scales, strict=True)
        return torch.cat([_map_anchors(grid, shapes_of_cell(scale, number)) for grid, number, scale in maps]).float()


def _map_anchors(grid: Grid, shapes: Sequence[tuple[float, float]]) -> Tensor:
    y, x = ((torch.arange(cells, dtype=torch.float64) + 0.5) / cells for cells in grid)
    centres = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)[:, :, None]  # rows, columns, 1, 2
    half = torch.tensor(shapes, dtype=torch.float64) / 2
    return torch.cat([centres - half, centres + half], dim=-1).flatten(0, 2)

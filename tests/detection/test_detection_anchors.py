"""Anchors: their number, order and forms."""

import pytest
import torch

from tailorfl.detection.anchors import grid_anchors, shapes_of_cell
from tailorfl.detection.boxes import centred, corners, overlaps
from tailorfl.models import build_module

GRIDS = [(64, 64), (32, 32), (16, 16), (8, 8), (4, 4)]
NUMBERS = [5, 7, 7, 7, 5]


@pytest.mark.parametrize("number", [5, 7])
def test_a_cell_has_three_squares_and_each_ratio_lying_and_standing(number: int) -> None:
    shapes = shapes_of_cell(0.2, number)
    assert len(shapes) == len(set(shapes)) == number
    ratios = [round(width / height, 3) for width, height in shapes]
    assert ratios == [1, 1, 1, 2, 0.5, 3, 0.333][:number]
    assert [round(width, 4) for width, _ in shapes[:3]] == [0.2, 0.252, 0.3175]
    assert all(width * height == pytest.approx(0.08) for width, height in shapes[3:])


def test_anchors_lie_row_by_row_in_the_middle_of_their_cells() -> None:
    found = centred(grid_anchors([(2, 4), (1, 1)], [5, 5]))
    assert found.shape == (2 * 4 * 5 + 5, 4)
    middles = found[: 2 * 4 * 5].reshape(2, 4, 5, 4)
    torch.testing.assert_close(middles[0, 1, :, :2], torch.tensor([0.375, 0.25]).expand(5, 2))
    torch.testing.assert_close(middles[1, 3, :, :2], torch.tensor([0.875, 0.75]).expand(5, 2))
    torch.testing.assert_close(found[-5:, :2], torch.full((5, 2), 0.5))
    torch.testing.assert_close(found[[0, -5], 2], torch.tensor([0.3, 0.6]))


@pytest.mark.parametrize("scale", [0.05, 0.1, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("ratio", [0.4, 1.0, 2.5])
def test_objects_of_every_size_have_an_anchor(scale: float, ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([scale * ratio**0.5, scale / ratio**0.5]).clamp(max=1)
    middle = size / 2 + torch.rand(200, 2, generator=generator) * (1 - size)
    near = overlaps(corners(torch.cat([middle, size.expand(200, 2)], 1)), grid_anchors(GRIDS, NUMBERS))
    assert (near.max(1).values >= 0.5).float().mean() > 0.9


@pytest.mark.parametrize(
    ("side", "stages", "grids"),
    [(512, 7, (64, 32, 16, 8, 4)), (256, 6, (64, 32, 16, 8, 4)), (64, 4, (16, 8, 4)), (50, 6, (13, 7, 4, 2, 1))],
)
def test_a_network_has_an_output_for_each_anchor(side: int, stages: int, grids: tuple[int, ...]) -> None:
    with torch.device("meta"):
        network = build_module("ssd-resnet18", (3, side, side), 3, stages=stages).eval()
        outputs = network(torch.zeros(2, 3, side, side))
    numbers = (5, *[7] * (len(grids) - 2), 5)
    anchors = network.anchors("cpu")
    assert outputs.shape == (2, sum(g * g * n for g, n in zip(grids, numbers, strict=True)), 1 + 3 + 4)
    torch.testing.assert_close(anchors, grid_anchors([(g, g) for g in grids], numbers))
    assert "anchors" not in " ".join(network.state_dict())


def test_an_output_looks_where_its_anchor_is() -> None:
    """The outputs that a spot of light changes are those of the anchors around it."""
    torch.manual_seed(0)
    network = build_module("ssd-resnet18", (3, 64, 96), 2, stages=3).eval()
    image = torch.zeros(1, 3, 64, 96)
    lit = image.clone()
    lit[..., 44:52, 68:76] = 5.0
    with torch.no_grad():
        change = (network(lit) - network(image)).abs().sum(-1)[0]
    anchors = centred(network.anchors("cpu"))
    first = 16 * 24 * 5
    for part in (slice(0, first), slice(first, None)):
        x, y = (change[part, None] * anchors[part, :2]).sum(0) / change[part].sum()
        assert x == pytest.approx(72 / 96, abs=0.06)
        assert y == pytest.approx(48 / 64, abs=0.06)


def test_anchors_go_where_the_network_goes() -> None:
    network = build_module("ssd-resnet18", (3, 16, 16), 2, stages=2)
    assert network.anchors("cpu").dtype == torch.float32
    assert network.double().anchors("cpu").dtype == torch.float64
    assert network.anchors("cpu") is network.anchors("cpu")
    assert build_module("ssd-resnet18", (3, 16, 16), 2, stages=2).anchors("cpu").dtype == torch.float32

"""Boxes: overlaps, codes and suppression, by hand and against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailorfl.detection.boxes import areas, centred, corners, decode, encode, overlaps, unsuppressed

SIDES = st.floats(0.02, 1.0)
CENTRES = st.floats(0.0, 1.0)


@st.composite
def boxes(draw: st.DrawFn, least: int = 1, most: int = 12) -> Tensor:
    rows = draw(st.lists(st.tuples(CENTRES, CENTRES, SIDES, SIDES), min_size=least, max_size=most))
    return corners(torch.tensor(rows, dtype=torch.float64))


def test_overlaps_by_hand() -> None:
    one = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    others = torch.tensor(
        [
            [0.0, 0.0, 0.5, 0.5],  # itself
            [0.25, 0.0, 0.75, 0.5],  # half of it
            [0.0, 0.0, 0.5, 0.25],  # inside
            [0.5, 0.0, 1.0, 0.5],  # beside
            [0.1, 0.1, 0.1, 0.1],  # a point
            [0.4, 0.4, 0.1, 0.1],  # inside out
        ]
    )
    torch.testing.assert_close(overlaps(one, others), torch.tensor([[1.0, 1 / 3, 0.5, 0.0, 0.0, 0.0]]))
    assert areas(others).tolist() == pytest.approx([0.25, 0.25, 0.125, 0.25, 0, 0])
    assert overlaps(others[4:], others[4:]).eq(0).all()


@given(boxes(), boxes())
@settings(deadline=None)
def test_overlaps_are_symmetric_and_at_most_one(some: Tensor, others: Tensor) -> None:
    found = overlaps(some, others)
    torch.testing.assert_close(found, overlaps(others, some).T)
    assert ((found >= 0) & (found <= 1 + 1e-9)).all()
    torch.testing.assert_close(overlaps(some, some).diagonal(), torch.ones(len(some), dtype=torch.float64))


@given(boxes(least=4, most=4), boxes(least=4, most=4))
@settings(deadline=None)
def test_a_code_means_its_box(some: Tensor, anchors: Tensor) -> None:
    torch.testing.assert_close(decode(encode(some, anchors), anchors), some, rtol=0, atol=1e-9)
    torch.testing.assert_close(corners(centred(some)), some)
    assert encode(anchors, anchors).abs().max() < 1e-9


def test_a_code_is_the_shift_in_sides_of_the_anchor_and_the_logarithm_of_the_stretch() -> None:
    anchor = torch.tensor([0.4, 0.4, 0.6, 0.8])
    box = torch.tensor([0.5, 0.4, 0.7, 0.6])  # half a width to the right, a quarter of a height up, half as high
    wanted = torch.tensor([0.5 / 0.1, -0.25 / 0.1, 0.0, -0.693147 / 0.2])
    torch.testing.assert_close(encode(box, anchor), wanted, rtol=0, atol=1e-5)


def test_codes_of_nothing_and_of_everything_are_finite() -> None:
    anchor = torch.tensor([[0.4, 0.4, 0.6, 0.6]])
    assert encode(torch.zeros(1, 4), anchor).isfinite().all()
    assert decode(torch.full((1, 4), 1e4), anchor).isfinite().all()


def plainly_unsuppressed(boxes: Tensor, overlap: float) -> list[bool]:
    kept: list[int] = []
    near = overlaps(boxes, boxes)
    for place in range(len(boxes)):
        if all(near[better, place] <= overlap for better in kept):
            kept.append(place)
    return [place in kept for place in range(len(boxes))]


@given(boxes(most=25), st.sampled_from([0.0, 0.2, 0.45, 0.9]))
@settings(max_examples=200, deadline=None)
def test_suppression_is_what_a_plain_loop_does(some: Tensor, overlap: float) -> None:
    assert unsuppressed(some[None], overlap)[0].tolist() == plainly_unsuppressed(some, overlap)


def test_a_chain_of_boxes_is_suppressed_every_other_one() -> None:
    """Each overlaps its neighbours alone: as many passes as there are boxes."""
    left = torch.arange(40, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0, 1, 0])
    chain = left + torch.tensor([0.0, 0, 1.5, 1])
    assert unsuppressed(chain[None], 0.15)[0].tolist() == [place % 2 == 0 for place in range(40)]

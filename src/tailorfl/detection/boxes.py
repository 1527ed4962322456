"""Boxes as corners (x0, y0, x1, y1) in units of the image: areas, overlaps, the code of a network, and suppression."""

import torch
from torch import Tensor

CENTRE, SIZE = 0.1, 0.2  # SSD divides the code by them, so that its parts are of one magnitude
LARGEST = 4.0  # logarithm of the largest stretch: a network that has not learned yet makes no boxes without bounds


def areas(boxes: Tensor) -> Tensor:
    """Of boxes [..., 4]; a box that is turned inside out has none."""
    x0, y0, x1, y1 = boxes.unbind(-1)
    return (x1 - x0).clamp(min=0) * (y1 - y0).clamp(min=0)


def overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of each box with each of the others: [..., n, 4] and [..., m, 4] to [..., n, m].

    Boxes without an area overlap nothing.
    """
    x0, y0, x1, y1 = boxes[..., :, None, :].unbind(-1)
    left, top, right, bottom = others[..., None, :, :].unbind(-1)
    # A coordinate at a time: a pair of coordinates in one tensor would take twice the memory.
    common = (torch.minimum(x1, right) - torch.maximum(x0, left)).clamp(min=0)
    common = common * (torch.minimum(y1, bottom) - torch.maximum(y0, top)).clamp(min=0)
    together = areas(boxes)[..., :, None] + areas(others)[..., None, :] - common
    return common / together.clamp(min=1e-12)


def centred(boxes: Tensor) -> Tensor:
    """Corners as centre and size."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def corners(boxes: Tensor) -> Tensor:
    """Centre and size as corners."""
    middle, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([middle - size / 2, middle + size / 2], dim=-1)


def encode(boxes: Tensor, anchors: Tensor) -> Tensor:
    """What a network is to say at each anchor to mean its box, [..., 4]; both are corners."""
    wanted, given = centred(boxes), centred(anchors)
    shift = (wanted[..., :2] - given[..., :2]) / given[..., 2:] / CENTRE
    # Padding has no size, and its code must be finite, for its loss is multiplied by zero.
    stretch = (wanted[..., 2:].clamp(min=1e-6) / given[..., 2:]).log() / SIZE
    return torch.cat([shift, stretch], dim=-1)


def decode(code: Tensor, anchors: Tensor) -> Tensor:
    """The boxes that a network means: the inverse of `encode`."""
    given = centred(anchors)
    middle = given[..., :2] + code[..., :2] * CENTRE * given[..., 2:]
    size = given[..., 2:] * (code[..., 2:] * SIZE).clamp(max=LARGEST).exp()
    return corners(torch.cat([middle, size], dim=-1))


def unsuppressed(boxes: Tensor, overlap: float) -> Tensor:
    """Non-maximum suppression in each row of boxes [rows, n, 4], best first: which of them stay, [rows, n].

    A box goes if it overlaps a better one that stays by more than `overlap`.
    """
    # [rows, better, worse]; as numbers, for a product with all boxes that stay is faster than to go through them.
    near = (overlaps(boxes, boxes) > overlap).triu(diagonal=1).to(boxes.dtype)
    stays = torch.ones_like(near[:, 0])
    # The first n boxes are right after n passes, and nearly always all of them after a few.
    while True:
        found = (stays[:, None] @ near).squeeze(1).eq(0).to(boxes.dtype)
        if torch.equal(found, stays):
            return stays > 0
        stays = found

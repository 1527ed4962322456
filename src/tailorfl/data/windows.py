"""Windows on images with boxes: a larger canvas around an image, a part of it, and what is seen through them.

A window is left, top, width and height in units of the image, [..., 4]; it may reach over the image. Tensor operations
only, the same for all values, so that a CUDA graph can hold them.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tailorfl.data.objects import ABSENT, counting, there
from tailorfl.errors import UserError

PLACE = ("across", "down")  # where on the canvas an image is put
SAMPLE = ("wide", "high", "along", "below")  # the size and place of the part that is cut out
SHORTEST = 0.3  # side of a part
ASPECT = 2.0  # of a part at most, and one over it at least
CANDIDATES = 16
# Steps of this sequence fill four dimensions evenly: the powers of one over the root of x ** 5 = x + 1.
EVEN = 1.1673039782614187
CANVAS_COLOUR = (124.0, 116.0, 104.0)  # the mean of photographs


def whole(images: Tensor) -> Tensor:
    """The window that is the image."""
    sides = torch.ones(*images.shape[:-3], 2, device=images.device)
    return torch.cat([torch.zeros_like(sides), sides], dim=-1)


def canvas(draws: dict[str, Tensor]) -> Tensor:
    """The canvas around each image, larger by ``canvas`` in both directions, the image anywhere on it."""
    more = draws["canvas"][..., None].expand(*draws["canvas"].shape, 2)
    place = torch.stack([draws[name] for name in PLACE], dim=-1)
    return torch.cat([-more * place, 1 + more], dim=-1)


def sampled(window: Tensor, targets: Tensor, draws: dict[str, Tensor]) -> Tensor:
    """A part of each window that has the centre of an object in it; all of the window where no candidate has.

    The candidates go on from one draw of four numbers in equal steps around a circle: each by itself is as likely to
    be anywhere as the draw is, and together they are spread more evenly than by further draws.
    """
    number = torch.arange(CANDIDATES, device=window.device)[:, None]
    steps = number * torch.pow(EVEN, -torch.arange(1, 5, device=window.device))
    drawn = (torch.stack([draws[name] for name in SAMPLE], dim=-1)[..., None, :] + steps) % 1
    sides = SHORTEST + (1 - SHORTEST) * drawn[..., :2]
    corner = (1 - sides) * drawn[..., 2:]
    origin, size = window[..., None, :2], window[..., None, 2:]
    parts = torch.cat([origin + corner * size, sides * size], dim=-1)
    aspect = sides[..., 0] / sides[..., 1]
    shown = _centred(parts[..., None, :], targets[..., None, :, :]) & counting(targets)[..., None, :]
    good = shown.any(-1) & (aspect >= 1 / ASPECT) & (aspect <= ASPECT)
    first = (good * (CANDIDATES - number[:, 0])).argmax(-1)  # no two candidates are equal: the choice is a certain one
    chosen = parts.gather(-2, first[..., None, None].expand(*first.shape, 1, 4)).squeeze(-2)
    return torch.where(good.any(-1, keepdim=True), chosen, window)


def seen(window: Tensor, targets: Tensor) -> Tensor:
    """The objects in units of the window, clipped to it; those with their centre outside become padding."""
    kept = there(targets) & _centred(window[..., None, :], targets)
    origin, size = window.to(targets.dtype)[..., None, :].split(2, dim=-1)
    low, high = (((corner - origin) / size).clamp(0, 1) for corner in (targets[..., 1:3], targets[..., 3:5]))
    objects = torch.cat([targets[..., :1], low, high, targets[..., 5:]], dim=-1)
    return torch.where(kept[..., None], objects, _padding(targets))


def flipped(targets: Tensor) -> Tensor:
    """The objects of images mirrored left to right."""
    label, x0, y0, x1, y1, ignored = targets.unbind(-1)
    return torch.where(
        there(targets)[..., None], torch.stack([label, 1 - x1, y0, 1 - x0, y1, ignored], dim=-1), targets
    )


def look_through(window: Tensor, images: Tensor) -> Tensor:
    """What a window shows, at the size of the images, uint8 [..., 3, h, w]; the canvas where it reaches over them."""
    if images.shape[-3] != len(CANVAS_COLOUR):
        raise UserError(f"augment=expand, sample need colour images, these have {images.shape[-3]} channel(s)")
    height, width = images.shape[-2:]
    view = window.reshape(-1, 4)
    across = view[:, :1] + view[:, 2:3] * _centres(width, view)
    down = view[:, 1:2] + view[:, 3:] * _centres(height, view)
    grid = torch.stack([across[:, None, :].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)], dim=-1)
    flat = images.reshape(-1, *images.shape[-3:]).to(view.dtype)
    # The canvas is laid over what is outside, not blended with the image's rim.
    found = F.grid_sample(flat, 2 * grid - 1, mode="bilinear", padding_mode="border", align_corners=False)
    inside = ((grid >= 0) & (grid <= 1)).all(-1)[:, None]
    found = torch.where(inside, found, _canvas_colour(view.device)[:, None, None])
    return found.round().to(images.dtype).reshape(images.shape)


def _centres(pixels: int, like: Tensor) -> Tensor:
    return (torch.arange(pixels, device=like.device) + 0.5) / pixels


def _centred(window: Tensor, targets: Tensor) -> Tensor:
    """Whether an object's centre is in the window: booleans, over the leading dimensions of both."""
    centre = (targets[..., 1:3] + targets[..., 3:5]) / 2
    return ((centre > window[..., :2]) & (centre < window[..., :2] + window[..., 2:])).all(-1)


def _padding(targets: Tensor) -> Tensor:
    nothing = torch.zeros_like(targets)
    return torch.cat([nothing[..., :1] + ABSENT, nothing[..., 1:]], dim=-1)


@cache
def _canvas_colour(device: torch.device) -> Tensor:
    """On the device once and for all: while a CUDA graph is captured nothing can be copied there."""
    return torch.tensor(CANVAS_COLOUR, device=device)

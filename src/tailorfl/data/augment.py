"""Random flips, crops and quarter turns of a batch of raw images."""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tailorfl.errors import UserError

ALLOWED = "none, or a list of flip, cropPIXELS (crop4), rotate"


@dataclass(frozen=True)
class Augmentation:
    """What is done to the raw uint8 images of a training batch, before they are normalized.

    The random numbers are drawn for one client at a time, so a client's do not depend on who trains beside it;
    they are applied to the images of many clients at once.
    """

    flip: bool = False  # left to right, every second image
    crop: int = 0  # pad by so many zero pixels, then cut out the old size anywhere
    rotate: bool = False  # by 0, 1, 2 or 3 quarter turns, counter-clockwise

    @staticmethod
    def parse(text: str) -> "Augmentation":
        """From a list like ``flip,crop4``."""
        found: dict[str, int] = {}
        for word in (part.strip() for part in text.split(",")):
            match = re.fullmatch(r"(flip|rotate)|crop([1-9]\d*)", word)
            if match:
                found[match[1] or "crop"] = int(match[2] or 1)
            elif text.strip() not in ("", "none"):
                raise UserError(f"augment={text}: {word!r} is not known; allowed: {ALLOWED}")
        return Augmentation("flip" in found, found.get("crop", 0), "rotate" in found)

    def __bool__(self) -> bool:
        return self.flip or self.crop > 0 or self.rotate

    def draw(self, rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
        """The random numbers for ``size`` images of one client."""
        draws: dict[str, np.ndarray] = {}
        if self.flip:
            draws["flip"] = rng.integers(0, 2, size).astype(bool)
        if self.crop:
            draws["top"] = rng.integers(0, 2 * self.crop + 1, size)
            draws["left"] = rng.integers(0, 2 * self.crop + 1, size)
        if self.rotate:
            draws["turns"] = rng.integers(0, 4, size)
        return draws

    def apply(self, images: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Images [..., channels, h, w] with draws [...], on the images' device; tensor operations only."""
        if self.flip:
            images = torch.where(_per_image(draws["flip"]), images.flip(-1), images)
        if self.crop:
            images = _crop(images, self.crop, draws["top"], draws["left"])
        if self.rotate:
            images = _rotate(images, draws["turns"])
        return images


def _per_image(numbers: Tensor) -> Tensor:
    return numbers[..., None, None, None]


def _crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    padded = pad(images, (padding,) * 4)
    rows = _per_image(top) + torch.arange(height, device=images.device)[:, None]
    padded = padded.gather(-2, rows.expand(*images.shape[:-2], height, padded.shape[-1]))
    columns = _per_image(left) + torch.arange(width, device=images.device)
    return padded.gather(-1, columns.expand(images.shape))


def _rotate(images: Tensor, turns: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    if height != width:
        raise UserError(f"augment=rotate needs square images, these are {width}x{height}")
    turned = images
    for number in (1, 2, 3):
        turned = torch.where(_per_image(turns) == number, images.rot90(number, (-2, -1)), turned)
    return turned

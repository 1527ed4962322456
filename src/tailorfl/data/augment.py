"""Random changes of a batch of raw images: flips, crops, quarter turns, colours; with the boxes of their objects."""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tailorfl.data import windows
from tailorfl.data.colour import change_colours
from tailorfl.errors import UserError

ALLOWED = "none, or a list of flip, cropPIXELS (crop4), rotate, colour, where there are boxes expand, sample; and once"
WITHOUT_BOXES = "flip, cropPIXELS, rotate, colour"
WITH_BOXES = "flip, colour, expand, sample"
# As single-shot detectors are trained.
LARGEST_CANVAS = 3.0
BRIGHTNESS = 32 / 255
CONTRAST = SATURATION = 0.5
HUE = 25.4  # degrees


@dataclass(frozen=True)
class Augmentation:
    """What is done to the raw uint8 images of a training batch, before they are normalized.

    The random numbers are drawn for one client at a time, so a client's do not depend on who trains beside it;
    they are applied to the images of many clients at once.
    """

    flip: bool = False  # left to right, every second image
    crop: int = 0  # pad by so many zero pixels, then cut out the old size anywhere
    rotate: bool = False  # by 0, 1, 2 or 3 quarter turns, counter-clockwise
    colour: bool = False  # other brightness, contrast, saturation and hue, each of every second image
    expand: bool = False  # every second image is put on a larger canvas
    sample: bool = False  # cut out a part that shows an object
    once: bool = False  # a sample is changed in one way in all steps of a round, not anew in each

    @staticmethod
    def parse(text: str) -> "Augmentation":
        """From a list like ``flip,crop4``."""
        found: dict[str, int] = {}
        whole = "flip|rotate|colour|expand|sample|once"
        for word in (part.strip() for part in text.split(",")):
            match = re.fullmatch(rf"({whole})|crop([1-9]\d*)", word)
            if match:
                found[match[1] or "crop"] = int(match[2] or 1)
            elif text.strip() not in ("", "none"):
                raise UserError(f"augment={text}: {word!r} is not known; allowed: {ALLOWED}")
        if list(found) == ["once"]:
            raise UserError(f"augment={text}: nothing is done, once or otherwise; allowed: {ALLOWED}")
        return Augmentation(crop=found.pop("crop", 0), **dict.fromkeys(found, True))

    def __bool__(self) -> bool:
        return self != Augmentation()

    def check(self, boxes: bool, side: int | None = None) -> None:
        """Refuse what images with boxes, or without, cannot take, nor those whose shorter side is so long."""
        if side is not None and self.crop > side:
            raise UserError(
                f"augment=crop{self.crop}: images are {side} pixels wide or high; allowed: crop1 to crop{side}"
            )
        words = ("crop", "rotate") if boxes else ("expand", "sample")
        wrong = [word for word in words if getattr(self, word)]
        if wrong and boxes:
            raise UserError(f"augment={wrong[0]}: the boxes would not follow; allowed with boxes: {WITH_BOXES}")
        if wrong:
            raise UserError(f"augment={wrong[0]} is for images with boxes; allowed without: {WITHOUT_BOXES}")

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
        if self.colour:
            draws["brightness"] = _every_second(rng, rng.uniform(-BRIGHTNESS, BRIGHTNESS, size))
            draws["contrast"] = _every_second(rng, rng.uniform(-CONTRAST, CONTRAST, size))
            draws["saturation"] = _every_second(rng, rng.uniform(-SATURATION, SATURATION, size))
            draws["hue"] = _every_second(rng, rng.uniform(-HUE, HUE, size))
        if self.expand:
            draws["canvas"] = _every_second(rng, rng.uniform(0, LARGEST_CANVAS - 1, size))
            draws |= {name: rng.random(size, np.float32) for name in windows.PLACE}
        if self.sample:
            draws |= {name: rng.random(size, np.float32) for name in windows.SAMPLE}
        return draws

    def apply(self, images: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Images [..., channels, h, w] with draws [...], on the images' device; tensor operations only."""
        self.check(boxes=False)
        images = self._flipped_and_coloured(images, draws)
        if self.crop:
            images = _crop(images, self.crop, draws["top"], draws["left"])
        if self.rotate:
            images = _rotate(images, draws["turns"])
        return images

    def apply_with_boxes(self, images: Tensor, targets: Tensor, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The same for images with objects [..., N, 6], which follow; those that are cut off become padding."""
        self.check(boxes=True)
        images = self._flipped_and_coloured(images, draws)
        if self.flip:
            targets = torch.where(draws["flip"][..., None, None], windows.flipped(targets), targets)
        if not (self.expand or self.sample):
            return images, targets
        window = windows.canvas(draws) if self.expand else windows.whole(images)
        if self.sample:
            window = windows.sampled(window, targets, draws)
        return windows.look_through(window, images), windows.seen(window, targets)

    def _flipped_and_coloured(self, images: Tensor, draws: dict[str, Tensor]) -> Tensor:
        if self.flip:
            images = torch.where(_per_image(draws["flip"]), images.flip(-1), images)
        if self.colour:
            images = change_colours(images, draws)
        return images


def _every_second(rng: np.random.Generator, numbers: np.ndarray) -> np.ndarray:
    """Zero, which leaves an image as it is, in place of half of the numbers, at random."""
    return np.where(rng.integers(0, 2, len(numbers)).astype(bool), numbers, 0).astype(np.float32)


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

"""Images at another size."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.errors import UserError

CHUNK = 1024  # images that are resized at once


def resized(source: Source, side: int | None) -> Source:
    """Images of so many pixels in height and width."""
    if side is None or tuple(source.inputs.shape[2:]) == (side, side):
        return source
    if source.kind != "image":
        raise UserError(f"image_size={side}: {source.name} has no images; allowed: null")
    return replace(source, inputs=torch.cat([_resized(chunk, side) for chunk in source.inputs.split(CHUNK)]))


def _resized(images: Tensor, side: int) -> Tensor:
    found = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True, align_corners=False)
    return found.round().clamp(0, 255).to(torch.uint8)

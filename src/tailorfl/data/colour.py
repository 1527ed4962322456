"""Other brightness, contrast, saturation and hue for a batch of raw images: one matrix and one shift an image."""

from functools import cache
from math import pi

import numpy as np
import torch
from torch import Tensor

from tailorfl.errors import UserError

# From red, green and blue to brightness and two coordinates of colour (YIQ, as television had it).
TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])


def change_colours(images: Tensor, draws: dict[str, Tensor]) -> Tensor:
    """Images uint8 [..., 3, h, w]: brighter by ``brightness`` (1 is white), times 1 + ``contrast``, colours times 1 +
    ``saturation`` and turned by ``hue`` degrees, in this order; draws [...], of which 0 changes nothing."""
    if images.shape[-3] != 3:
        raise UserError(f"augment=colour needs colour images, these have {images.shape[-3]} channel(s)")
    grey, colour, turned = _parts(images.device)
    angle, contrast = draws["hue"] * (pi / 180), 1 + draws["contrast"]
    strength = 1 + draws["saturation"]
    straight, across = (_per_matrix(strength * wave) for wave in (angle.cos(), angle.sin()))
    matrix = _per_matrix(contrast) * (grey + straight * colour + across * turned)
    shift = 255 * contrast * draws["brightness"]  # no colour of its own: the matrix leaves greys grey
    found = matrix @ images.flatten(-2).to(matrix.dtype) + _per_matrix(shift)
    return found.round().clamp(0, 255).to(images.dtype).reshape(images.shape)


def _per_matrix(numbers: Tensor) -> Tensor:
    return numbers[..., None, None]


@cache
def _parts(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices that keep the grey of an image, its colour, and its colour turned by a quarter.

    On the device once and for all: while a CUDA graph is captured nothing can be copied there.
    """
    back = np.linalg.inv(TO_YIQ)
    kinds = np.zeros((3, 3, 3))
    kinds[0, 0, 0] = kinds[1, 1, 1] = kinds[1, 2, 2] = 1
    kinds[2, 1, 2], kinds[2, 2, 1] = 1, -1  # from red to yellow to green
    grey, colour, turned = torch.tensor(back @ kinds @ TO_YIQ, dtype=torch.float32, device=device)
    return grey, colour, turned

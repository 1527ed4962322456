"""The targets of detection: the objects of every image, float32 [images, N, 6], as many rows as the fullest image has.

A row is an object's class, its box x0, y0, x1, y1 in units of the image (0 to 1, x to the right, y down), and 1 where
it is to be ignored: it trains nobody, and tests neither ask for it nor hold it against a network that finds it. The
class -1, with zeros behind it, is padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tailorfl.errors import UserError

FIELDS = 6
ABSENT = -1


def there(targets: Tensor) -> Tensor:
    """Which rows are objects, not padding: booleans [..., N]."""
    return targets[..., 0] >= 0


def counting(targets: Tensor) -> Tensor:
    """Which rows are objects that are not ignored: booleans [..., N]."""
    return there(targets) & (targets[..., 5] == 0)


def stack_objects(objects: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    """The targets of images with these objects, lists of six numbers."""
    most = max(1, *(len(found) for found in objects)) if objects else 1
    targets = _padding(len(objects), most)
    for row, found in enumerate(objects):
        if found:
            targets[row, : len(found)] = torch.tensor(found)
    return targets


def main_class(targets: Tensor) -> Tensor:
    """The class of each image's largest object that is not ignored, 0 where there is none: int64 [images]."""
    area = (targets[..., 3] - targets[..., 1]) * (targets[..., 4] - targets[..., 2])
    largest = torch.where(counting(targets), area, ABSENT).argmax(-1, keepdim=True)
    label = targets[..., 0].gather(-1, largest).squeeze(-1).long()
    return torch.where(counting(targets).any(-1), label, 0)


def renumbered(targets: Tensor, number: Tensor) -> Tensor:
    """The targets without the objects whose new class number, of all classes, is -1."""
    found = torch.where(there(targets), number[targets[..., 0].long().clamp(min=0)].to(targets.dtype), ABSENT)
    kept = found >= 0
    targets = torch.cat([found[..., None], targets[..., 1:] * kept[..., None]], dim=-1)
    order = kept.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)  # padding comes last, and is cut off
    most = max(1, int(kept.sum(-1).max())) if len(targets) else 1
    return targets.take_along_dim(order[..., None], dim=-2)[:, :most].contiguous()


def check_objects(source: str, targets: Tensor, classes: int) -> None:
    """Refuse targets that are not objects of these classes."""
    if targets.dtype != torch.float32 or targets.shape[1] == 0 or targets.shape[2] != FIELDS:
        raise UserError(
            f"data={source}: objects are {targets.dtype} of shape {tuple(targets.shape)}, "
            f"allowed: {torch.float32} of shape (images, 1 or more, {FIELDS})"
        )
    label, box, ignored = targets[..., 0], targets[..., 1:5], targets[..., 5]
    for wrong, line in (
        (~((label == label.round()) & (label >= ABSENT) & (label < classes)), f"class 0 to {classes - 1}, or -1"),
        (there(targets) & ~((box >= 0) & (box <= 1)).all(-1), "a box from 0 to 1, in units of the image"),
        (there(targets) & ~(box[..., :2] < box[..., 2:]).all(-1), "a box with x0 < x1 and y0 < y1"),
        (~((ignored == 0) | (ignored == 1)), "ignored 0 or 1"),
        (~there(targets) & (targets[..., 1:] != 0).any(-1), "zeros after the class -1"),
    ):
        if wrong.any():
            row, slot = wrong.nonzero()[0].tolist()
            numbers = ", ".join(f"{value:g}" for value in targets[row, slot].tolist())
            raise UserError(f"data={source}: object {slot} of image {row} is ({numbers}), allowed: {line}")


def _padding(images: int, most: int) -> Tensor:
    targets = torch.zeros(images, most, FIELDS)
    targets[..., 0] = ABSENT
    return targets

"""From the outputs of a detector to the objects it found."""

import torch
from torch import Tensor

from tailorfl.detection.boxes import areas, decode, unsuppressed

CANDIDATES = 400  # of a class, that are compared with one another: the best ones


@torch.no_grad()
def detect(
    outputs: Tensor, anchors: Tensor, *, threshold: float = 0.03, overlap: float = 0.45, most: int = 200
) -> list[Tensor]:
    """What a detector found in each image, [n, 6]: class, score, x0, y0, x1, y1, best first.

    `outputs` [B, A, 1 + K + 4] are the network's. The defaults are the ScalableFL paper's: a probability above the
    threshold, non-maximum suppression within each class, and at most so many objects an image. Boxes end at the borders
    of the image.
    """
    return select(located(outputs, anchors), threshold=threshold, overlap=overlap, most=most)


def located(outputs: Tensor, anchors: Tensor) -> Tensor:
    """What a detector says at each anchor, [B, A, K + 4]: probabilities of the classes, then the corners of a box."""
    scores = outputs[..., :-4].softmax(-1)[..., 1:]
    boxes = decode(outputs[..., -4:], anchors.to(outputs.dtype)).clamp(0, 1)
    return torch.cat([scores, boxes], dim=-1)


def select(places: Tensor, *, threshold: float = 0.03, overlap: float = 0.45, most: int = 200) -> list[Tensor]:
    """The objects among what ``located`` gives, as ``detect`` has them."""
    scores, boxes = places[..., :-4], places[..., -4:]
    visible = areas(boxes) > 0
    likely = (scores > threshold) & visible[..., None]
    return [_of_image(*image, overlap=overlap)[:most] for image in zip(scores, boxes, likely, strict=True)]


def _of_image(scores: Tensor, boxes: Tensor, likely: Tensor, overlap: float) -> Tensor:
    """All that was found in an image: scores [A, K], boxes [A, 4], and which scores count."""
    anchor, kind = likely.nonzero(as_tuple=True)
    score = scores[anchor, kind]
    order = score.argsort(descending=True, stable=True)
    order = order[kind[order].argsort(stable=True)]  # by class, in each the best first
    anchor, kind, score = anchor[order], kind[order], score[order]
    counts = torch.bincount(kind, minlength=scores.shape[1])
    rank = torch.arange(len(kind), device=kind.device) - (counts.cumsum(0) - counts)[kind]
    kept = rank < CANDIDATES
    anchor, kind, score, rank = anchor[kept], kind[kept], score[kept], rank[kept]
    stays = _stay(boxes[anchor], kind, rank, overlap)
    found = torch.cat([kind[:, None].to(score), score[:, None], boxes[anchor]], dim=1)[stays]
    return found[found[:, 1].argsort(descending=True, stable=True)]


def _stay(boxes: Tensor, kind: Tensor, rank: Tensor, overlap: float) -> Tensor:
    """Which boxes stay when each class is compared with itself."""
    if not len(boxes):
        return torch.zeros_like(kind, dtype=torch.bool)
    present, row = kind.unique(return_inverse=True)
    table = boxes.new_zeros(len(present), int(rank.max()) + 1, 4)
    table[row, rank] = boxes
    return unsuppressed(table, overlap)[row, rank]

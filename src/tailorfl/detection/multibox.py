"""SSD's multibox loss: which anchor is to find which object, and what it costs not to (Liu et al., 2016).

All of it is written for batches of any form, without branches on values and in fixed shapes: it runs stacked over
clients, in traces and in CUDA graphs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tailorfl.data.objects import counting
from tailorfl.detection.boxes import encode, overlaps

MATCHED = 0.5  # overlap from which an anchor is to find an object
NEGATIVES = 3  # so many anchors without an object count for each with one: those that are most wrong
CHOICES = 8  # so many anchors an object may ask for until it has one of its own


def match(targets: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """What each anchor is to find: boxes [..., A, 4] and classes [..., A], from 1 on; class 0 is background.

    `targets` [..., N, 6] has class, corners and whether to ignore it of each object, and class -1 where there is none.
    An anchor is to find the object that it overlaps most, if by enough. Each object has beside these an anchor of its
    own, however little it overlaps it.
    """
    boxes = targets[..., 1:5]
    there = counting(targets) & (boxes[..., 2:] > boxes[..., :2]).all(-1)
    near = torch.where(there[..., None], overlaps(boxes, anchors), -1.0)  # [..., N, A]
    most, which = near.max(dim=-2)
    owner = _owners(near, there)
    which = torch.where(owner >= 0, owner, which)
    positive = (owner >= 0) | (most >= MATCHED)
    found = torch.take_along_dim(targets[..., :5], which[..., None], dim=-2)
    return found[..., 1:], torch.where(positive, found[..., 0].long() + 1, 0)


def _owners(near: Tensor, there: Tensor) -> Tensor:
    """Of each anchor the object whose own it is, or -1.

    In each round the objects that have none ask for the best anchor that is free. Of those that ask for the same one
    the object that overlaps it most has it. After as many rounds as there are objects, or choices, all is settled.
    """
    objects, anchors = near.shape[-2:]
    choices = min(CHOICES, objects, anchors)
    overlap, wanted = near.topk(choices, dim=-1)
    numbers = torch.arange(objects, device=near.device)
    waits = there
    own = torch.full_like(wanted[..., 0], anchors)  # none: a place behind the last anchor
    for _ in range(choices):
        taken = (wanted[..., :, :, None] == own[..., None, None, :]).any(-1)
        best, place = torch.where(taken, -1.0, overlap).max(dim=-1)
        asked = torch.take_along_dim(wanted, place[..., None], dim=-1)[..., 0]
        asks = waits & (best >= 0)
        rival = (asked[..., :, None] == asked[..., None, :]) & asks[..., None, :]
        better = best[..., None, :] > best[..., :, None]
        before = (best[..., None, :] == best[..., :, None]) & (numbers < numbers[:, None])
        has = asks & ~(rival & (better | before)).any(-1)
        own = torch.where(has, asked, own)
        waits = waits & ~has
    nobody = own.new_full((*own.shape[:-1], anchors + 1), -1)
    return nobody.scatter(-1, own, numbers.expand_as(own))[..., :-1]


def multibox_losses(outputs: Tensor, targets: Tensor, anchors: Tensor) -> Tensor:
    """The loss of each image, [...], by the number of its anchors that have an object.

    `outputs` [..., A, 1 + K + 4]: logits of background and of the classes, then the code of the box. Of an image
    without objects the few anchors that are most wrong count, and no box.
    """
    logits, code = outputs[..., :-4], outputs[..., -4:]
    anchors = anchors.to(outputs.dtype)
    boxes, wanted = match(targets.to(outputs.dtype), anchors)
    positive = wanted > 0
    count = positive.sum(-1)
    costs = -F.log_softmax(logits, dim=-1).gather(-1, wanted[..., None])[..., 0]
    negatives = torch.minimum((NEGATIVES * count).clamp(min=NEGATIVES), (~positive).sum(-1))
    hardest = torch.where(positive, -1.0, costs).sort(dim=-1, descending=True).values  # costs are not negative
    counts = torch.arange(costs.shape[-1], device=costs.device) < negatives[..., None]
    places = F.smooth_l1_loss(code, encode(boxes, anchors), reduction="none").sum(-1)
    total = torch.where(positive, costs + places, 0.0).sum(-1) + torch.where(counts, hardest, 0.0).sum(-1)
    return total / count.clamp(min=1)

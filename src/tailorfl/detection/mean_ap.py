"""Mean average precision of detections: PASCAL VOC's of 2007 and COCO's.

Of each image, detections are [n, 6]: class, score, corners; objects are [N, 6]: class (-1: none), corners, ignored.
Where no object counts there is no score: NaN, as for a client without test samples.
"""

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tailorfl.data.extras import import_extra
from tailorfl.data.objects import counting, there
from tailorfl.detection.boxes import overlaps

Numbers = npt.NDArray[np.float64]


def voc07(found: Sequence[Tensor], truth: Sequence[Tensor], classes: int, overlap: float = 0.5) -> float:
    """The mean over classes of the average precision at eleven recalls, as VOC'07 has it.

    Of the objects of its class a detection has the one that it overlaps most. It is right if that is by `overlap` or
    more and no better detection has the same. If the object is ignored ("difficult") it neither helps nor hurts.
    Classes without an object that counts are left out.
    """
    tables = [_judged(_table(f), _objects(t), overlap) for f, t in zip(found, truth, strict=True)]
    judged = np.concatenate([np.zeros((0, 3)), *tables])
    judged = judged[np.argsort(-judged[:, 1], kind="stable")]
    wanted = np.concatenate([np.zeros(0), *(_counting(_objects(t)) for t in truth)])
    numbers = [number for number in range(classes) if number in wanted]
    precisions = [_average_precision(judged[judged[:, 0] == n, 2], int((wanted == n).sum())) for n in numbers]
    return sum(precisions) / len(precisions) if precisions else math.nan


def _table(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu()


def _objects(truth: Tensor) -> Tensor:
    """The rows that are no padding."""
    truth = _table(truth)
    return truth[there(truth)]


def _counting(objects: Tensor) -> Numbers:
    """The classes of the objects that are not ignored."""
    found: Numbers = objects[counting(objects), 0].numpy()
    return found


def _judged(found: Tensor, objects: Tensor, overlap: float) -> Numbers:
    """Class, score and verdict of each detection in an image: right (1), wrong (-1), or not counted (0)."""
    found = found[found[:, 1].argsort(descending=True, stable=True)]
    verdict = np.full(len(found), -1.0)
    if len(found) and len(objects):
        same = found[:, None, 0] == objects[None, :, 0]
        near = torch.where(same, overlaps(found[:, 2:], objects[:, 1:5]), -1.0).numpy()
        which = near.argmax(1)
        meets, ignored = near.max(1) >= overlap, objects[:, 5].numpy()[which] > 0
        verdict[meets & ignored] = 0
        hits = np.flatnonzero(meets & ~ignored)
        _, first = np.unique(which[hits], return_index=True)  # of the detections of an object, the best
        verdict[hits[first]] = 1
    return np.column_stack([found[:, :2].numpy(), verdict])


def _average_precision(verdicts: Numbers, objects: int) -> float:
    """Of a class with so many objects that count; verdicts best first."""
    verdicts = verdicts[verdicts != 0]
    right = np.cumsum(verdicts > 0)
    return eleven_points(right / np.arange(1, len(verdicts) + 1), right / objects)


def eleven_points(precision: Numbers, recall: Numbers) -> float:
    """The mean of the best precision at recalls of at least 0, 0.1, ..., 1."""
    # A tenth and its multiples are not exact: 3 of 10 found is a recall of 0.3.
    levels = np.arange(11) / 10 - 1e-9
    return float(np.mean([precision[recall >= level].max(initial=0.0) for level in levels]))


def coco(found: Sequence[Tensor], truth: Sequence[Tensor], classes: int, side: int) -> float:
    """COCO's mean average precision, over overlaps of 0.5, 0.55, ..., 0.95 and all classes that have an object.

    Computed by COCO's own code, pycocotools, in pixels of an image of `side`. Ignored objects are its crowds.
    """
    purpose = "COCO's mean average precision"
    api = import_extra("pycocotools.coco", "detection", purpose)
    evaluation = import_extra("pycocotools.cocoeval", "detection", purpose)
    objects = [_annotations(number, _objects(rows), side) for number, rows in enumerate(truth)]
    detections = [_annotations(number, _table(rows), side, scores=True) for number, rows in enumerate(found)]
    if not any(one["iscrowd"] == 0 for rows in objects for one in rows):
        return math.nan
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        judge = evaluation.COCOeval(
            _dataset(api, objects, classes, len(truth)), _dataset(api, detections, classes, len(truth)), "bbox"
        )
        judge.evaluate()
        judge.accumulate()
    precision = judge.eval["precision"][..., 0, -1]  # objects of all areas, the 100 best detections of an image
    return float(precision[precision > -1].mean())


def _annotations(image: int, rows: Tensor, side: int, scores: bool = False) -> list[dict[str, Any]]:
    """Objects or detections of an image as COCO writes them."""
    found = []
    for row in rows.tolist():
        kind, x0, y0, x1, y1 = (row[0], *row[2:]) if scores else row[:5]
        box = [x0 * side, y0 * side, (x1 - x0) * side, (y1 - y0) * side]
        one = {"image_id": image, "category_id": int(kind), "bbox": box, "area": box[2] * box[3]}
        found.append(one | ({"score": row[1], "iscrowd": 0} if scores else {"iscrowd": int(row[5] > 0)}))
    return found


def _dataset(api: Any, annotations: Sequence[list[dict[str, Any]]], classes: int, images: int) -> Any:
    """What COCO reads from a file."""
    rows = [one for rows in annotations for one in rows]
    made = api.COCO()
    made.dataset = {
        "images": [{"id": number} for number in range(images)],
        "categories": [{"id": number} for number in range(classes)],
        # From 1 on: an object of number 0 counts as none.
        "annotations": [{**one, "id": number} for number, one in enumerate(rows, start=1)],
    }
    made.createIndex()
    return made

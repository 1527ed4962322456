"""Mean average precision: by hand, and VOC's beside COCO's."""

import builtins
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailorfl.detection import coco, voc07
from tailorfl.errors import UserError

LEFT, RIGHT, BELOW = [0.1, 0.1, 0.3, 0.3], [0.6, 0.1, 0.8, 0.3], [0.1, 0.6, 0.3, 0.8]
NEAR_LEFT = [0.1, 0.1, 0.3, 0.28]  # overlaps LEFT by 0.9


def found(*rows: tuple[int, float, list[float]]) -> Tensor:
    return torch.tensor([[kind, score, *box] for kind, score, box in rows]).reshape(-1, 6)


def truth(*rows: tuple[int, list[float]], ignored: tuple[int, ...] = (), padding: int = 1) -> Tensor:
    made = [[kind, *box, float(place in ignored)] for place, (kind, box) in enumerate(rows)]
    return torch.tensor(made + [[-1.0, 0, 0, 0, 0, 0]] * padding).reshape(-1, 6)


def test_what_is_all_found_scores_one() -> None:
    objects = [truth((0, LEFT), (1, RIGHT)), truth((1, BELOW)), truth()]
    detections = [found((0, 0.9, LEFT), (1, 0.3, RIGHT)), found((1, 0.8, BELOW)), found()]
    assert voc07(detections, objects, 3) == 1.0
    assert coco(detections, objects, 3, 100) == pytest.approx(1.0)


def test_what_is_not_found_scores_zero() -> None:
    objects = [truth((0, LEFT))]
    for detections in ([found()], [found((1, 0.9, LEFT))], [found((0, 0.9, RIGHT))]):
        assert voc07(detections, objects, 2) == 0.0
        assert coco(detections, objects, 2, 100) == 0.0


def test_eleven_points_by_hand() -> None:
    """Four objects. Right, wrong, right, wrong: precision 1 up to recall 1/4, 2/3 up to 1/2, then none."""
    objects = [truth((0, LEFT), (0, RIGHT)), truth((0, LEFT), (0, BELOW))]
    detections = [
        found((0, 0.9, LEFT), (0, 0.8, BELOW)),
        found((0, 0.7, LEFT), (0, 0.6, LEFT)),  # the second is of an object that has been found
    ]
    assert voc07(detections, objects, 1) == pytest.approx((3 * 1 + 3 * 2 / 3) / 11)
    # 101 recalls: 26 of 0 to 0.25, 25 up to 0.5; the same at each overlap, for the boxes are exact.
    assert coco(detections, objects, 1, 100) == pytest.approx((26 * 1 + 25 * 2 / 3) / 101)


def test_recalls_that_are_tenths_count() -> None:
    objects = [truth((0, LEFT)) for _ in range(10)]
    for many in range(11):
        detections = [found((0, 0.5, LEFT)) if place < many else found() for place in range(10)]
        assert voc07(detections, objects, 1) == pytest.approx((many + 1) / 11 if many else 0)


def test_overlap_decides() -> None:
    objects, detections = [truth((0, LEFT))], [found((0, 0.9, NEAR_LEFT))]
    assert voc07(detections, objects, 1) == 1.0
    assert voc07(detections, objects, 1, overlap=0.95) == 0.0
    # Right at 0.5, 0.55, ..., 0.85, and at 0.9 by a hair: the box is 18 of 20 pixels high.
    assert coco(detections, objects, 1, 100) == pytest.approx(0.85, abs=0.051)


def test_ignored_objects_neither_help_nor_hurt() -> None:
    objects = [truth((0, LEFT), (0, RIGHT), ignored=(1,))]
    just_one = [found((0, 0.8, LEFT))]
    also_ignored = [found((0, 0.8, LEFT), (0, 0.9, RIGHT), (0, 0.7, RIGHT))]
    assert voc07(just_one, objects, 1) == voc07(also_ignored, objects, 1) == 1.0
    assert coco(just_one, objects, 1, 100) == coco(also_ignored, objects, 1, 100) == pytest.approx(1.0)


def test_a_class_without_an_object_that_counts_is_left_out() -> None:
    objects = [truth((0, LEFT), (1, RIGHT), ignored=(1,))]
    detections = [found((0, 0.8, LEFT), (1, 0.9, BELOW), (2, 0.9, BELOW))]
    assert voc07(detections, objects, 3) == 1.0
    assert coco(detections, objects, 3, 100) == pytest.approx(1.0)


def test_without_an_object_there_is_no_score() -> None:
    for objects in ([], [truth()], [truth((0, LEFT), ignored=(0,))]):
        detections = [found((0, 0.9, LEFT)) for _ in objects]
        assert math.isnan(voc07(detections, objects, 2))
        assert math.isnan(coco(detections, objects, 2, 100))


def test_an_object_of_the_first_image_and_class_counts_in_coco() -> None:
    """It is object number 0, which pycocotools would take for none."""
    objects = [truth((0, LEFT)), truth((0, RIGHT))]
    assert coco([found((0, 0.9, LEFT)), found()], objects, 1, 64) == pytest.approx(51 / 101)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor], int]:
    """Images whose objects and detections are cells of a grid: each overlaps one wholly or not at all."""
    cells = [[x / 4, y / 4, x / 4 + 0.2, y / 4 + 0.2] for x in range(4) for y in range(4)]
    scores = iter(draw(st.permutations([number / 64 for number in range(1, 64)])))
    detections, objects = [], []
    for _ in range(draw(st.integers(1, 3))):
        wanted = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 15)), max_size=6, unique=True))
        got = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 15)), max_size=10))
        objects.append(truth(*((kind, cells[cell]) for kind, cell in wanted)))
        detections.append(found(*((kind, next(scores), cells[cell]) for kind, cell in got)))
    return detections, objects, sum(len(rows) - 1 for rows in objects)


@given(scenes())
@settings(max_examples=60, deadline=None)
def test_the_two_measures_agree_where_boxes_are_exact(scene: tuple[list[Tensor], list[Tensor], int]) -> None:
    """They take the same precisions at eleven and at 101 recalls, at most a step of the eleven apart."""
    detections, objects, many = scene
    ours, theirs = voc07(detections, objects, 2), coco(detections, objects, 2, 64)
    assert math.isnan(ours) == math.isnan(theirs) == (many == 0)
    if many:
        assert ours == pytest.approx(theirs, abs=0.1)
        assert (ours == 0) == (theirs == 0)
        # The order of images does not matter, nor do detections of a class that no image has.
        extra = [torch.cat([rows, found((5, 0.99, LEFT))]) for rows in detections]
        assert voc07(extra[::-1], objects[::-1], 2) == pytest.approx(ours)
        assert coco(extra[::-1], objects[::-1], 6, 64) == pytest.approx(theirs)


def test_coco_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    coco([found((0, 0.9, LEFT))], [truth((0, LEFT))], 1, 64)
    assert capsys.readouterr().out == ""


def test_without_pycocotools_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("pycocotools"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr("importlib.import_module", lambda name: missing(name))
    with pytest.raises(UserError, match=r"needs the package pycocotools, .* install tailorfl\[detection\]"):
        coco([found()], [truth((0, LEFT))], 1, 64)

"""What a detector found: thresholds, suppression, order and number."""

import pytest
import torch
from torch import Tensor

from tailorfl.detection.anchors import grid_anchors
from tailorfl.detection.boxes import encode, overlaps
from tailorfl.detection.detections import detect

ANCHORS = grid_anchors([(4, 4)], [5])
CLASSES = 3


def outputs_of(*rows: tuple[int, list[float], list[float]]) -> Tensor:
    """Outputs that have at an anchor these probabilities of the classes and this box, elsewhere background."""
    outputs = torch.zeros(1, len(ANCHORS), 1 + CLASSES + 4)
    outputs[..., 0] = 20.0
    for place, scores, box in rows:
        outputs[0, place, : 1 + CLASSES] = torch.tensor([1 - sum(scores), *scores]).clamp(min=1e-9).log()
        outputs[0, place, -4:] = encode(torch.tensor(box), ANCHORS[place])
    return outputs


def test_objects_come_best_first_with_class_score_and_box() -> None:
    [found] = detect(
        outputs_of((7, [0, 0.4, 0], [0.1, 0.1, 0.3, 0.4]), (30, [0.9, 0, 0], [0.5, 0.5, 0.9, 0.7])), ANCHORS
    )
    wanted = torch.tensor([[0, 0.9, 0.5, 0.5, 0.9, 0.7], [1, 0.4, 0.1, 0.1, 0.3, 0.4]])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_of_boxes_that_overlap_the_best_of_a_class_stays() -> None:
    near = (8, [0.7, 0.2, 0.0], [0.1, 0.1, 0.5, 0.45])
    [found] = detect(outputs_of((7, [0.6, 0.3, 0], [0.1, 0.1, 0.5, 0.5]), near), ANCHORS)
    # Overlap 0.875. Of class 0 the second box is better, of class 1 the first.
    assert found[:, :2].flatten().tolist() == pytest.approx([0, 0.7, 1, 0.3], abs=1e-5)
    torch.testing.assert_close(found[:, 5], torch.tensor([0.45, 0.5]), rtol=0, atol=1e-5)
    [all_found] = detect(outputs_of((7, [0.6, 0.3, 0], [0.1, 0.1, 0.5, 0.5]), near), ANCHORS, overlap=0.9)
    assert len(all_found) == 4


def test_scores_up_to_the_threshold_and_background_are_left_out() -> None:
    outputs = outputs_of((7, [0.02, 0.2, 0], [0.1, 0.1, 0.3, 0.4]))
    assert [len(found) for found in detect(outputs, ANCHORS)] == [1]
    assert [len(found) for found in detect(outputs, ANCHORS, threshold=0.01)] == [2]
    [nothing] = detect(outputs, ANCHORS, threshold=0.5)
    assert nothing.shape == (0, 6)


def test_boxes_end_at_the_borders_and_must_be_seen() -> None:
    inside, outside = (7, [0.5, 0, 0], [-0.5, 0.2, 0.4, 1.7]), (30, [0, 0.5, 0], [1.1, 0.2, 1.4, 0.5])
    [found] = detect(outputs_of(inside, outside), ANCHORS)
    torch.testing.assert_close(found, torch.tensor([[0, 0.5, 0.0, 0.2, 0.4, 1.0]]), rtol=0, atol=1e-5)


def test_at_most_so_many_are_found_the_best_ones() -> None:
    torch.manual_seed(0)
    anchors = grid_anchors([(16, 16), (8, 8)], [5, 7])
    outputs = torch.randn(2, len(anchors), 1 + 5 + 4)
    every, some = detect(outputs, anchors, most=10**6), detect(outputs, anchors, most=20)
    for many, few in zip(every, some, strict=True):
        assert len(many) > 200
        assert torch.equal(few, many[:20])
        assert (many[:-1, 1] >= many[1:, 1]).all()
        for kind in range(5):
            boxes = many[many[:, 0] == kind, 2:]
            assert overlaps(boxes, boxes).triu(1).max() <= 0.45
    assert [len(found) for found in detect(outputs, anchors)] == [200, 200]


def test_outputs_that_are_no_numbers_find_nothing() -> None:
    outputs = torch.full((1, len(ANCHORS), 1 + CLASSES + 4), float("nan"))
    assert [len(found) for found in detect(outputs, ANCHORS)] == [0]

"""The multibox loss: matches and losses by hand, against plain loops, stacked and traced."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tailorfl.detection.anchors import grid_anchors
from tailorfl.detection.boxes import encode, overlaps
from tailorfl.detection.multibox import match, multibox_losses

ANCHORS = grid_anchors([(8, 8), (4, 4)], [5, 5]).double()
QUARTERS = torch.tensor([[0.0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]]).double()
NOTHING = [-1.0, 0, 0, 0, 0, 0]


def objects(*rows: list[float], most: int | None = None) -> Tensor:
    padding = [NOTHING] * ((most or max(len(rows), 1)) - len(rows))
    return torch.tensor([*rows, *padding], dtype=torch.float64)


def drawn(images: int, most: int, classes: int, seed: int = 0) -> Tensor:
    """Some objects in each image, of which some are ignored, and padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(images, most, 6, generator=generator, dtype=torch.float64)
    size = 0.05 + 0.6 * rows[..., 3:5]
    rows[..., 1:3] *= 1 - size
    rows[..., 3:5] = rows[..., 1:3] + size
    rows[..., 0] = (rows[..., 0] * (classes + 1)).floor() - 1
    rows[..., 5] = (rows[..., 5] < 0.2).double()
    rows[rows[..., 0] < 0] = torch.tensor(NOTHING, dtype=torch.float64)
    return rows


def test_an_anchor_is_to_find_the_object_it_overlaps_most_if_by_half() -> None:
    targets = objects([3, 0, 0, 0.5, 0.4, 0], [1, 0.5, 0.1, 1, 0.5, 0], [2, 0.1, 0.6, 0.2, 0.7, 0])
    boxes, classes = match(targets, QUARTERS)
    # The third object overlaps no anchor by half, and has its best one all the same.
    assert classes.tolist() == [4, 2, 3, 0]
    torch.testing.assert_close(boxes[:3], targets[:, 1:5])


def test_every_object_has_an_anchor_even_if_others_want_the_same() -> None:
    """Three objects in one quarter: the best one has it, and the others the anchors that are left, in order."""
    targets = objects([0, 0.0, 0, 0.4, 0.4, 0], [1, 0, 0, 0.5, 0.5, 0], [2, 0.1, 0, 0.7, 0.4, 0])
    near = overlaps(targets[:, 1:5], QUARTERS)
    assert near.argmax(1).tolist() == [0, 0, 0]
    _, classes = match(targets, QUARTERS)
    assert classes[0] == 2
    assert classes[1] == 3, "the third object overlaps the second quarter"
    assert sorted(classes.tolist()) == [0, 1, 2, 3]


@given(st.integers(0, 10**6), st.integers(1, 8))
@settings(deadline=None)
def test_no_object_goes_without(seed: int, most: int) -> None:
    targets = drawn(1, most, 3, seed)[0]
    boxes, classes = match(targets, ANCHORS)
    near = overlaps(targets[:, 1:5], ANCHORS)
    counts = (targets[:, 0] >= 0) & (targets[:, 5] == 0)
    for row in range(most):
        is_its = (boxes == targets[row, 1:5]).all(1) & (classes == targets[row, 0] + 1) & (classes > 0)
        assert is_its.any() == counts[row]
    many = near[counts].max(0).values >= 0.5 if counts.any() else torch.zeros(len(ANCHORS)).bool()
    assert (classes[many] > 0).all()
    assert (classes > 0).sum() <= many.sum() + counts.sum()


def test_many_objects_in_one_place_leave_as_few_as_can_be_without_an_anchor() -> None:
    targets = objects(*[[0, 0.3, 0.3, 0.6 + 0.001 * n, 0.6, 0] for n in range(30)])
    boxes, classes = match(targets, ANCHORS)
    served = {tuple(box) for box in boxes[classes > 0].tolist()}
    assert len(served) >= 8


@pytest.mark.parametrize(
    "unseen",
    [
        NOTHING,
        [2, 0.5, 0.5, 1, 1, 1],  # ignored
        [2, 0.5, 0.5, 0.5, 1, 0],  # without a width
        [0, 0, 0, 0, 0, 0],  # the padding of a batch
    ],
)
def test_what_does_not_count_is_as_if_it_were_not_there(unseen: list[float]) -> None:
    seen = [1, 0.1, 0.1, 0.5, 0.5, 0]
    outputs = torch.randn(len(ANCHORS), 1 + 3 + 4, dtype=torch.float64)
    alone = multibox_losses(outputs, objects(seen), ANCHORS)
    assert torch.equal(multibox_losses(outputs, objects(seen, unseen), ANCHORS), alone)
    assert torch.equal(multibox_losses(outputs, objects(unseen, seen), ANCHORS), alone)
    nothing = multibox_losses(outputs, objects(), ANCHORS)
    assert torch.equal(multibox_losses(outputs, objects(unseen), ANCHORS), nothing)


def test_a_loss_by_hand() -> None:
    """One object at the first of four anchors: its class, its place, and the three others, all negatives."""
    targets = objects([1, 0, 0, 0.5, 0.4, 0])
    outputs = torch.zeros(4, 1 + 2 + 4, dtype=torch.float64)
    outputs[0, 2] = 1.0  # the right class
    outputs[1, 0] = 2.0  # background
    outputs[2, 1] = 3.0  # wrong
    code = encode(targets[0, 1:5], QUARTERS[0])  # y is shifted by -0.1 sides, the height stretched by 0.8
    torch.testing.assert_close(code, torch.tensor([0, -1.0, 0, 5 * math.log(0.8)]).double())
    outputs[0, 3:] = torch.tensor([0.0, -0.5, 0, 5 * math.log(0.8) + 3])
    right = math.log(2 + math.e) - 1
    negatives = (math.log(2 + math.e**2) - 2) + math.log(2 + math.e**3) + math.log(3)
    place = 0.5 * 0.5**2 + (3 - 0.5)
    found = multibox_losses(outputs, targets, QUARTERS)
    assert found.item() == pytest.approx(right + negatives + place)


def plain_loss(outputs: Tensor, targets: Tensor) -> float:
    """Of one image, with the matches of `match`."""
    boxes, classes = match(targets, ANCHORS)
    costs = [-torch.log_softmax(row[:-4], 0)[kind].item() for row, kind in zip(outputs, classes, strict=True)]
    positive = [place for place, kind in enumerate(classes.tolist()) if kind]
    negative = sorted((costs[place] for place in range(len(costs)) if place not in positive), reverse=True)
    total = sum(costs[place] for place in positive) + sum(negative[: max(3, 3 * len(positive))])
    for place in positive:
        far = (outputs[place, -4:] - encode(boxes[place], ANCHORS[place])).abs()
        total += torch.where(far < 1, far**2 / 2, far - 0.5).sum().item()
    return total / max(1, len(positive))


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_a_plain_loop(seed: int) -> None:
    torch.manual_seed(seed)
    targets, outputs = drawn(3, 5, 4, seed), torch.randn(3, len(ANCHORS), 1 + 4 + 4, dtype=torch.float64)
    found = multibox_losses(outputs, targets, ANCHORS)
    assert found.tolist() == pytest.approx([plain_loss(*image) for image in zip(outputs, targets, strict=True)])


def test_an_image_without_objects_teaches_background_with_three_anchors() -> None:
    outputs = torch.randn(len(ANCHORS), 1 + 2 + 4, dtype=torch.float64)
    slopes = grad(lambda given: multibox_losses(given, objects(), ANCHORS))(outputs)
    moved = slopes.abs().sum(1) > 0
    assert moved.sum() == 3
    assert (slopes[moved, 0] < 0).all()
    assert (slopes[:, -4:] == 0).all()


def test_ties_do_not_make_more_negatives() -> None:
    outputs = torch.zeros(len(ANCHORS), 1 + 2 + 4, dtype=torch.float64)
    assert multibox_losses(outputs, objects(), ANCHORS).item() == pytest.approx(3 * math.log(3))


def test_there_may_be_fewer_negatives_than_wanted() -> None:
    targets = objects(*([kind, *box, 0] for kind, box in enumerate(QUARTERS.tolist())))
    outputs = torch.zeros(4, 1 + 4 + 4, dtype=torch.float64)
    assert multibox_losses(outputs, targets, QUARTERS).item() == pytest.approx(math.log(5))


def test_a_perfect_network_has_no_loss() -> None:
    targets = drawn(2, 4, 3)
    boxes, classes = match(targets, ANCHORS)
    logits = 100 * torch.nn.functional.one_hot(classes, 1 + 3).double()
    outputs = torch.cat([logits, encode(boxes, ANCHORS)], -1)
    assert multibox_losses(outputs, targets, ANCHORS).abs().max() < 1e-9


def stacked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Gradients of a stack of clients."""
    return vmap(grad(lambda given, wanted: multibox_losses(given, wanted, ANCHORS).mean()))(outputs, targets)


def test_a_stack_of_clients_has_the_gradients_of_each_and_can_be_traced() -> None:
    targets, outputs = drawn(6, 5, 3), torch.randn(6, len(ANCHORS), 1 + 3 + 4, dtype=torch.float64)
    targets, outputs = targets.unflatten(0, (3, 2)), outputs.unflatten(0, (3, 2))
    found = stacked(outputs, targets)
    for client in range(3):
        given = outputs[client].clone().requires_grad_()
        multibox_losses(given, targets[client], ANCHORS).mean().backward()
        torch.testing.assert_close(found[client], given.grad)
    # A trace is right for other values too: nothing depends on those it was made with.
    trace = make_fx(stacked)(torch.zeros_like(outputs), drawn(6, 5, 3, seed=9).unflatten(0, (3, 2)))
    torch.testing.assert_close(trace(outputs, targets), found)
    operations = {str(node.target) for node in trace.graph.nodes}
    assert not [name for name in operations if "_local_scalar_dense" in name or "nonzero" in name]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_losses_have_the_precision_of_the_outputs(kind: torch.dtype) -> None:
    targets = drawn(2, 4, 3)
    outputs = torch.randn(2, len(ANCHORS), 1 + 3 + 4, dtype=torch.float64)
    found = multibox_losses(outputs.to(kind), targets.float(), ANCHORS.float())
    assert found.dtype == kind
    torch.testing.assert_close(found.double(), multibox_losses(outputs, targets, ANCHORS), rtol=1e-4, atol=1e-4)

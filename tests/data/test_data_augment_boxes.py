"""Augmentation of images with boxes: what happens to the pixels happens to the boxes."""

import colorsys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailorfl.cohort.optimizer import Optimizer
from tailorfl.cohort.samples import Samples
from tailorfl.cohort.schedule import mini_batches
from tailorfl.cohort.training import Training
from tailorfl.data import Augmentation, FederatedData, PartitionOptions, SourceOptions, federate, load_source
from tailorfl.data.objects import stack_objects
from tailorfl.errors import UserError

SIDE = 32
RED = torch.tensor([255, 0, 0], dtype=torch.uint8)
CANVAS = [124, 116, 104]


def scene(x0: int, y0: int, x1: int, y1: int) -> tuple[Tensor, Tensor]:
    """A red rectangle on black and its box, among padding."""
    image = torch.zeros(3, SIDE, SIDE, dtype=torch.uint8)
    image[:, y0:y1, x0:x1] = RED[:, None, None]
    box = [value / SIDE for value in (x0, y0, x1, y1)]
    return image, stack_objects([[[1, *box, 0]], [[0, *box, 0]] * 2])[0]


def drawn(augmentation: Augmentation, size: int, seed: int = 0) -> dict[str, Tensor]:
    draws = augmentation.draw(np.random.default_rng(seed), size)
    return {name: torch.from_numpy(numbers) for name, numbers in draws.items()}


def red_box(image: Tensor) -> list[float] | None:
    """The corners of what is more red than anything else, in pixels."""
    rows, columns = ((image[0] > 127) & (image[1] < 58)).nonzero(as_tuple=True)
    if len(rows) == 0:
        return None
    return [float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)]


corner = st.integers(0, SIDE - 6)
length = st.integers(4, SIDE)


@settings(max_examples=60, deadline=None)
@given(
    corner,
    corner,
    length,
    length,
    st.integers(0, 2**32),
    st.sampled_from(["flip", "expand", "sample", "expand,sample", "flip,expand,sample"]),
)
def test_a_box_still_encloses_what_it_enclosed(x: int, y: int, w: int, h: int, seed: int, text: str) -> None:
    image, objects = scene(x, y, min(x + w, SIDE), min(y + h, SIDE))
    augmentation = Augmentation.parse(text)
    found, boxes = augmentation.apply_with_boxes(
        image.expand(8, -1, -1, -1), objects.expand(8, -1, -1), drawn(augmentation, 8, seed)
    )
    assert found.dtype == torch.uint8
    assert boxes[:, 1].eq(torch.tensor([-1.0, 0, 0, 0, 0, 0])).all(), "padding stays padding"
    for one, (box, _) in zip(found, boxes, strict=True):
        assert box[0] == 1, "the only object is kept"
        assert box[5] == 0
        assert (box[1:5] >= 0).all()
        assert (box[1:5] <= 1).all()
        assert (box[1:3] < box[3:5]).all()
        seen = red_box(one)
        # Objects that shrink may be less than a pixel; of all others the rims are where the box says.
        if seen is None:
            assert min((box[3:5] - box[1:3]) * SIDE) < 2
        else:
            assert seen == pytest.approx((box[1:5] * SIDE).tolist(), abs=2)


def test_a_flip_takes_the_boxes_along() -> None:
    image, objects = scene(2, 3, 10, 20)
    draws = {"flip": torch.tensor([True, False])}
    found, boxes = Augmentation(flip=True).apply_with_boxes(
        image.expand(2, -1, -1, -1), objects.expand(2, -1, -1), draws
    )
    assert (boxes[0, 0, 1:5] * SIDE).tolist() == [22, 3, 30, 20]
    assert torch.equal(found[0], image.flip(-1))
    assert torch.equal(boxes[1], objects)
    assert boxes[0, 1].tolist() == [-1, 0, 0, 0, 0, 0]


def test_a_canvas_has_the_image_where_the_draws_say() -> None:
    image, objects = scene(0, 0, SIDE, SIDE)
    draws = {"canvas": torch.tensor(1.0), "across": torch.tensor(1.0), "down": torch.tensor(0.0)}
    found, boxes = Augmentation(expand=True).apply_with_boxes(image, objects, draws)
    half = SIDE // 2
    assert boxes[0].tolist() == [1, 0.5, 0, 1, 0.5, 0]
    assert (found[:, :half, half:] == RED[:, None, None]).all()
    assert (found[:, half:].flatten(1) == torch.tensor(CANVAS)[:, None]).all()
    assert found[:, 0, 0].tolist() == CANVAS


def test_a_canvas_of_no_more_than_the_image_changes_nothing() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, SIDE, SIDE)).astype(np.uint8))
    objects = scene(2, 3, 10, 20)[1].expand(4, -1, -1)
    draws = {name: torch.rand(4) for name in ("across", "down")} | {"canvas": torch.zeros(4)}
    found, boxes = Augmentation(expand=True).apply_with_boxes(images, objects, draws)
    assert torch.equal(found, images)
    assert torch.equal(boxes, objects)


def test_half_of_the_images_are_put_on_a_canvas_of_up_to_three_times_their_size() -> None:
    canvas = Augmentation(expand=True).draw(np.random.default_rng(0), 4000)["canvas"]
    assert (canvas == 0).mean() == pytest.approx(0.5, abs=0.03)
    assert canvas.max() == pytest.approx(2, abs=0.01)
    assert canvas.min() == 0


def parts_of(objects: Tensor, size: int = 1000) -> tuple[Tensor, Tensor]:
    """Left, top, width and height of random parts, found by looking at an image of ramps; and the objects in them."""
    pixels = 64
    ramp = ((torch.arange(pixels) + 0.5) / pixels * 255).round().expand(pixels, pixels)
    image = torch.stack([ramp, ramp.T, torch.zeros_like(ramp)]).to(torch.uint8)
    augmentation = Augmentation(sample=True)
    found, boxes = augmentation.apply_with_boxes(
        image.expand(size, -1, -1, -1), objects.expand(size, -1, -1), drawn(augmentation, size)
    )
    first, last = (found[:, :2, k, k].float() / 255 for k in (0, -1))  # the centres of the first and last pixels
    sides = (last - first) / (1 - 1 / pixels)
    return torch.cat([first - sides / (2 * pixels), sides], dim=1), boxes


def test_a_part_has_a_third_to_all_of_a_side_and_is_not_too_narrow() -> None:
    parts, boxes = parts_of(stack_objects([[[0, 0.4, 0.4, 0.6, 0.6, 0]]])[0])
    sides = parts[:, 2:]
    assert sides.min() == pytest.approx(0.3, abs=0.02)
    assert sides.max() == pytest.approx(1, abs=0.02)
    aspect = sides[:, 0] / sides[:, 1]
    assert 0.47 < aspect.min() < 0.55
    assert 1.8 < aspect.max() < 2.1
    assert (boxes[:, 0, 0] == 0).all()
    assert len(parts.unique(dim=0)) > 900
    # Without preference for a side.
    assert (parts[:, :2] + sides / 2).mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.02)


def test_objects_whose_centre_is_cut_off_are_dropped_and_the_others_clipped() -> None:
    objects = stack_objects([[[0, 0.0, 0.0, 0.5, 0.5, 0], [1, 0.6, 0.6, 1.0, 1.0, 0], [2, 0.9, 0.0, 1.0, 0.1, 1]]])[0]
    parts, boxes = parts_of(objects)
    dropped = 0
    for part, found in zip(parts, boxes, strict=True):
        for expected, one in zip(objects, found, strict=True):
            low, high = ((expected[k : k + 2] - part[:2]) / part[2:] for k in (1, 3))
            centre = (low + high) / 2
            if ((centre - 0.5).abs() - 0.5).abs().min() < 0.03:
                continue  # too near the rim to tell from pixels
            if bool(((centre > 0) & (centre < 1)).all()):
                assert one[1:5].tolist() == pytest.approx(torch.cat([low, high]).clamp(0, 1).tolist(), abs=0.05)
                assert (one[0], one[5]) == (expected[0], expected[5])
            else:
                dropped += 1
                assert one.tolist() == [-1, 0, 0, 0, 0, 0]
        assert ((found[:, 0] >= 0) & (found[:, 5] == 0)).any(), "every part shows an object that counts"
    assert dropped > 500


def test_without_an_object_that_counts_the_image_stays_whole() -> None:
    for objects in ([[0, 0.0, 0.0, 0.1, 0.1, 1]], []):
        image = torch.full((3, SIDE, SIDE), 7, dtype=torch.uint8)
        image[:, 0, 0] = 200
        augmentation = Augmentation(sample=True)
        targets = stack_objects([objects])[0]
        found, boxes = augmentation.apply_with_boxes(
            image.expand(16, -1, -1, -1), targets.expand(16, -1, -1), drawn(augmentation, 16)
        )
        assert (found == image).all()
        assert (boxes == targets).all()


def test_a_small_object_in_a_corner_is_found_by_most_parts() -> None:
    parts, boxes = parts_of(stack_objects([[[0, 0.0, 0.0, 0.06, 0.06, 0]]])[0])
    assert (boxes[:, 0, 0] == 0).all()
    assert (parts[:, 2:] < 0.98).any(1).float().mean() > 0.3


def coloured(pixel: list[int], **draws: float) -> list[int]:
    image = torch.tensor(pixel, dtype=torch.uint8)[:, None, None].expand(3, 2, 2)
    names = ("brightness", "contrast", "saturation", "hue")
    found = Augmentation(colour=True).apply(image, {name: torch.tensor(draws.get(name, 0.0)) for name in names})
    assert found.dtype == torch.uint8
    return found[:, 0, 0].tolist()


def test_colours_change_as_the_draws_say() -> None:
    assert coloured([10, 130, 250]) == [10, 130, 250]
    assert coloured([10, 130, 250], brightness=32 / 255) == [42, 162, 255]
    assert coloured([10, 130, 250], brightness=-32 / 255) == [0, 98, 218]
    assert coloured([10, 130, 250], contrast=-0.5) == [5, 65, 125]
    assert coloured([100, 100, 100], brightness=0.1, contrast=0.5) == [188, 188, 188]
    assert coloured([90, 90, 90], saturation=0.5, hue=20.0) == [90, 90, 90], "grey has no colour to change"
    strong, weak = coloured([150, 100, 100], saturation=0.5), coloured([150, 100, 100], saturation=-0.5)
    assert strong[0] - strong[1] == pytest.approx(75, abs=1)
    assert weak[0] - weak[1] == pytest.approx(25, abs=1)


@pytest.mark.parametrize("degrees", [-25.4, 10.0, 25.4])
@pytest.mark.parametrize("pixel", [[200, 60, 60], [60, 200, 60], [60, 60, 200], [200, 200, 60]])
def test_hue_is_turned_about_as_far_as_on_a_colour_wheel(pixel: list[int], degrees: float) -> None:
    before, after = (
        360 * colorsys.rgb_to_hsv(*(value / 255 for value in one))[0] for one in (pixel, coloured(pixel, hue=degrees))
    )
    assert (after - before + 180) % 360 - 180 == pytest.approx(degrees, rel=0.6)


def test_colours_are_changed_by_as_much_as_is_allowed_and_half_of_the_time() -> None:
    draws = Augmentation(colour=True).draw(np.random.default_rng(0), 4000)
    limits = {"brightness": 32 / 255, "contrast": 0.5, "saturation": 0.5, "hue": 25.4}
    assert set(draws) == set(limits)
    for name, limit in limits.items():
        assert (draws[name] == 0).mean() == pytest.approx(0.5, abs=0.03)
        assert np.abs(draws[name]).max() == pytest.approx(limit, rel=0.01)
        assert draws[name].mean() == pytest.approx(0, abs=limit / 20)


def test_images_of_many_clients_at_once_are_treated_as_those_of_one() -> None:
    augmentation = Augmentation.parse("flip,expand,sample,colour")
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (3, 5, 3, 12, 12)).astype(np.uint8))
    targets = load_source("synthetic-detection", None, SourceOptions(clients=1, samples=15)).targets.unflatten(
        0, (3, 5)
    )
    draws = [drawn(augmentation, 5, client) for client in range(3)]
    stacked = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    together, boxes = augmentation.apply_with_boxes(images, targets, stacked)
    assert together.shape == images.shape
    for client in range(3):
        alone, own = augmentation.apply_with_boxes(images[client], targets[client], draws[client])
        assert (alone.int() - together[client].int()).abs().max() <= 1  # sums in another order
        assert torch.equal(own, boxes[client])
        one, its = augmentation.apply_with_boxes(
            images[client, 0], targets[client, 0], {name: numbers[0] for name, numbers in draws[client].items()}
        )
        assert (one.int() - together[client, 0].int()).abs().max() <= 1
        assert torch.equal(its, boxes[client, 0])


def test_no_step_looks_at_values() -> None:
    """As a CUDA graph must not: on the device without values everything works but looking at them."""
    augmentation = Augmentation.parse("flip,expand,sample,colour")
    images, targets = (
        torch.zeros(2, 4, 3, 16, 16, dtype=torch.uint8, device="meta"),
        torch.zeros(2, 4, 5, 6, device="meta"),
    )
    draws = {name: numbers.view(2, 4).to("meta") for name, numbers in drawn(augmentation, 8).items()}
    found, boxes = augmentation.apply_with_boxes(images, targets, draws)
    assert (found.shape, found.dtype, found.device.type) == (images.shape, torch.uint8, "meta")
    assert (boxes.shape, boxes.device.type) == (targets.shape, "meta")


def test_what_was_drawn_before_is_drawn_still() -> None:
    old, new = (Augmentation.parse(text).draw(np.random.default_rng(0), 9) for text in ("flip", "colour,flip,sample"))
    assert np.array_equal(old["flip"], new["flip"])


@pytest.mark.parametrize(
    ("text", "boxes", "line"),
    [
        ("expand", False, "augment=expand is for images with boxes; allowed without: flip, cropPIXELS, rotate, colour"),
        ("flip,sample", False, "augment=sample is for images with boxes"),
        ("crop4", True, "augment=crop: the boxes would not follow; allowed with boxes: flip, colour, expand, sample"),
        ("rotate", True, "augment=rotate: the boxes would not follow"),
    ],
)
def test_what_does_not_go_with_boxes_or_without_is_refused(text: str, boxes: bool, line: str) -> None:
    augmentation = Augmentation.parse(text)
    augmentation.check(not boxes)
    with pytest.raises(UserError, match=line):
        augmentation.check(boxes)
    image, objects = scene(2, 3, 10, 20)
    apply = partial(augmentation.apply_with_boxes, image, objects) if boxes else partial(augmentation.apply, image)
    with pytest.raises(UserError, match=line):
        apply({})


def test_colours_need_colour_images() -> None:
    with pytest.raises(UserError, match="augment=colour needs colour images, these have 1 channel"):
        Augmentation(colour=True).apply(torch.zeros(1, 4, 4, dtype=torch.uint8), {})


# Training batches.


def federation() -> FederatedData:
    """Each image one red rectangle, wherever."""
    rng = np.random.default_rng(0)
    scenes = [scene(x, y, x + 12, y + 12) for x, y in rng.integers(0, SIDE - 12, (60, 2)).tolist()]
    source = load_source("synthetic-detection", None, SourceOptions(clients=2, samples=30, image_size=SIDE))
    images, objects = zip(*scenes, strict=True)
    source = type(source)(
        "red", "image", torch.stack(images), torch.stack(objects), 60, ("a", "b"), source.owner, source.owners
    )
    return federate(source, PartitionOptions(), 0).in_unit_pixels()


def follow(inputs: Tensor, targets: Tensor) -> None:
    for image, objects in zip((inputs.flatten(0, -4) * 255).round(), targets.flatten(0, -3), strict=True):
        assert red_box(image) == pytest.approx((objects[0, 1:5] * SIDE).tolist(), abs=2)


AUGMENTATION = Augmentation.parse("flip,expand,sample")


def test_the_boxes_of_a_training_batch_follow_its_images() -> None:
    data = federation()
    rows = torch.stack([data.train.of(client) for client in range(2)])
    samples = Samples(data, rows, torch.tensor([rows.shape[1]] * 2))
    streams = [(0, "test", client) for client in range(2)]
    schedule = mini_batches([rows.shape[1]] * 2, 8, 1, None, streams, AUGMENTATION)
    values = {"weight": torch.zeros(2, 3)}
    training = Training(
        None,
        None,
        Optimizer(),
        ("weight",),
        (0.1,),
        values,
        samples,
        schedule,
        AUGMENTATION,  # type: ignore[arg-type]
    )
    moved = False
    for _ in range(2):
        inputs, targets, *_ = training.inputs(2).batch
        follow(inputs, targets)
        moved |= not torch.equal(targets, training.batches.targets[int(training.done)])
        training.done += 1
    assert moved


def test_the_boxes_of_samples_in_order_follow_their_images() -> None:
    data = federation()
    rows = torch.stack([data.train.of(client) for client in range(2)])
    draws = [drawn(AUGMENTATION, rows.shape[1], client) for client in range(2)]
    stacked = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    samples = Samples(data, rows, torch.tensor([rows.shape[1]] * 2), augmentation=AUGMENTATION, draws=stacked)
    batches = list(samples.in_order(10))
    for batch in batches:
        follow(batch.inputs, batch.targets)
    assert not torch.equal(torch.cat([batch.targets for batch in batches], dim=1), data.targets[rows])

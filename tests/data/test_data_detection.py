"""Sources of images with objects: what they refuse, how they are divided, in groups and without."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from tailorfl.data import (
    Group,
    PartitionOptions,
    Source,
    SourceOptions,
    describe,
    federate,
    federate_groups,
    load_source,
    save_source,
    shade_counts,
)
from tailorfl.data.objects import main_class, renumbered, stack_objects
from tailorfl.errors import UserError

SMALL, LARGE, HUGE = (0.1, 0.1, 0.3, 0.3), (0.2, 0.2, 0.9, 0.8), (0.0, 0.0, 1.0, 1.0)


def targets_of(*images: list[tuple[int, tuple[float, ...], int]]) -> Tensor:
    return stack_objects([[[label, *box, ignored] for label, box, ignored in image] for image in images])


TARGETS = targets_of(
    [(0, SMALL, 0), (2, LARGE, 0)],
    [(1, SMALL, 0), (2, HUGE, 1)],  # what is ignored is not the main thing
    [(2, LARGE, 1)],
    [],
)


def source_of(targets: Tensor, train_size: int | None = None, classes: tuple[str, ...] = tuple("abc")) -> Source:
    """Images of one shade each, from which a row is known again."""
    shades = torch.arange(len(targets), dtype=torch.uint8)
    inputs = shades[:, None, None, None].expand(-1, 3, 8, 8).clone()
    return Source("shades", "image", inputs, targets, train_size or len(targets), classes)


def test_the_label_of_an_image_is_its_largest_object_that_counts() -> None:
    assert TARGETS.shape == (4, 2, 6)
    assert main_class(TARGETS).tolist() == [2, 1, 0, 0]
    source = source_of(TARGETS)
    assert source.detection
    assert not source.regression
    assert source.labels.tolist() == [2, 1, 0, 0]


def test_sources_without_objects_are_labelled_as_before() -> None:
    classes, numbers = load_source("digits"), load_source("synthetic-regression")
    assert not classes.detection
    assert torch.equal(classes.labels, classes.targets)
    assert numbers.labels.tolist() == [0] * len(numbers.targets)


def changed(slot: tuple[int, int, int], value: float) -> Tensor:
    targets = TARGETS.clone()
    targets[slot] = value
    return targets


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (changed((0, 1, 0), 3), r"object 1 of image 0 is \(3, 0.2, 0.2, 0.9, 0.8, 0\), allowed: class 0 to 2, or -1"),
        (changed((0, 1, 0), 0.5), "allowed: class 0 to 2, or -1"),
        (changed((0, 1, 0), -2), "allowed: class 0 to 2, or -1"),
        (changed((0, 1, 0), float("nan")), "allowed: class 0 to 2, or -1"),
        (changed((1, 0, 3), 1.2), "object 0 of image 1 .* allowed: a box from 0 to 1, in units of the image"),
        (changed((1, 0, 2), float("nan")), "allowed: a box from 0 to 1"),
        (changed((1, 0, 3), 0.1), "allowed: a box with x0 < x1 and y0 < y1"),
        (changed((1, 0, 5), 2), "allowed: ignored 0 or 1"),
        (changed((3, 0, 1), 0.5), "object 0 of image 3 .* allowed: zeros after the class -1"),
        (TARGETS.double(), r"objects are torch.float64 of shape \(4, 2, 6\), allowed: torch.float32 of shape"),
        (TARGETS[..., :5], r"shape \(4, 2, 5\), allowed"),
        (TARGETS[:, :0], r"shape \(4, 0, 6\), allowed"),
        (TARGETS[:, 0], "targets have 2 dimensions, allowed: 1, or 3"),
    ],
)
def test_objects_that_cannot_be_are_refused_in_a_line(targets: Tensor, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        source_of(targets)
    assert "\n" not in str(caught.value)


def test_objects_need_colour_images_and_class_names() -> None:
    good = source_of(TARGETS)
    for change in ({"inputs": good.inputs[:, :1]}, {"classes": ()}):
        with pytest.raises(UserError, match="objects need colour images, and classes with names"):
            replace(good, **change)


def test_renumbered_objects_close_up_and_the_rest_is_padding() -> None:
    found = renumbered(TARGETS, torch.tensor([-1, 1, 0]))
    assert found.shape == (4, 2, 6)
    assert found[0].tolist() == [pytest.approx([0, *LARGE, 0]), [-1, 0, 0, 0, 0, 0]]
    assert found[1, :, 0].tolist() == [1, 0]
    assert renumbered(TARGETS, torch.tensor([0, -1, -1])).shape == (4, 1, 6)
    assert renumbered(TARGETS, torch.tensor([-1, -1, -1])).tolist() == [[[-1, 0, 0, 0, 0, 0]]] * 4


def synthetic(**options: object) -> Source:
    return load_source("synthetic-detection", None, SourceOptions(**options))  # type: ignore[arg-type]


def test_a_federation_is_divided_by_the_largest_object() -> None:
    source = synthetic(clients=4, samples=60, classes=3, image_size=16)
    data = federate(source, PartitionOptions(partition="classes", clients=6, classes_per_client=1), 0)
    assert data.detection
    counts = data.label_counts()
    assert ((counts > 0).sum(1) == 1).all()
    for client in range(6):
        assert main_class(source.targets[data.train.of(client)]).unique().numel() == 1
    assert torch.equal(data.labels, source.labels)
    natural = federate(source, PartitionOptions(), 0)
    assert natural.names == ("0", "1", "2", "3")


def test_a_federation_of_objects_is_described() -> None:
    data = federate(synthetic(clients=3, samples=20, classes=3, image_size=16), PartitionOptions(), 0)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(describe(data))
    (line,) = (line for line in capture.get().splitlines() if "train objects" in line)
    each = [int((data.targets[data.train.of(client), :, 0] >= 0).sum()) for client in range(3)]
    assert [int(word) for word in line.split() if word.isdigit()] == [sum(each), *sorted(each)]
    assert "objects of 3 classes" in capture.get()
    assert "3 of 3 clients, 3 classes" in shade_counts(data)


def crowded(rows: int = 120, tests: int = 60) -> Source:
    """Images of two objects, the larger one of class 0, 1 or 2, the smaller one of the next; then one without any."""
    images = [[(k % 3, LARGE, 0), ((k + 1) % 3, SMALL, int(k % 5 == 0))] for k in range(rows + tests)]
    images[-1] = []
    return source_of(targets_of(*images), rows)


GROUPS = (Group(clients=2, image_size=16), Group(clients=2, classes=(2,)), Group(clients=1, classes=2))
IID = PartitionOptions(partition="iid", validation_fraction=0.2)


def test_groups_keep_the_objects_of_their_classes() -> None:
    source = crowded()
    data = federate_groups(GROUPS, lambda name: source, IID, 0)
    assert data.detection
    assert [group.classes for group in data.groups] == [("a", "b", "c"), ("c",), ("a", "b")]
    assert [group.input_shape for group in data.groups] == [(3, 16, 16), (3, 8, 8), (3, 8, 8)]
    for client in range(data.clients):
        own = data.of(client)
        for split in ("train", "validation", "test"):
            rows = data.rows(split).of(client)
            assert len(rows) > 0
            for row in rows.tolist():
                shade = int(own.inputs[row, 0, 0, 0])
                expected = [
                    (own.classes.index("abc"[int(label)]), *box)
                    for label, *box in source.targets[shade].tolist()
                    if label >= 0 and "abc"[int(label)] in own.classes
                ]
                found = [tuple(one) for one in own.targets[row].tolist() if one[0] >= 0]
                assert found == expected, "an object follows its image"
                if split != "test" or len(own.classes) < 3:
                    assert any(one[5] == 0 for one in found), "nothing counts in this image"


def test_groups_train_on_images_of_their_own_and_none_is_wasted() -> None:
    source = crowded()
    data = federate_groups(GROUPS, lambda name: source, IID, 0)

    def shades(split: str) -> list[int]:
        return [int(data.of(c).inputs[r, 0, 0, 0]) for c in range(5) for r in data.rows(split).of(c)]  # type: ignore[arg-type]

    used = shades("train") + shades("validation")
    assert sorted(used) == list(range(120)), "every image has an object that some group wants"
    assert min(shades("test")) >= 120
    tests = {c: [int(data.of(c).inputs[r, 0, 0, 0]) for r in data.rows("test").of(c)] for c in range(5)}
    full = [c for c in range(5) if len(data.of(c).classes) == 3]
    assert all((179 in tests[c]) == (c in full) for c in range(5)), "who knows all classes is tested on an empty image"


def test_a_group_gets_images_whose_largest_object_it_does_not_know() -> None:
    images = [[(0, LARGE, 0), (1, SMALL, 0)]] * 40
    source = source_of(targets_of(*images), 30)
    data = federate_groups([Group(clients=2, classes=(1, 2))], lambda name: source, IID, 0)
    assert int(data.train.counts.sum() + data.validation.counts.sum()) == 30
    assert data.label_counts().tolist()[0][0] > 0


def test_a_group_without_any_image_is_refused() -> None:
    source = source_of(targets_of(*[[(0, LARGE, 0)]] * 20), 10)
    with pytest.raises(UserError, match="train_size=0"):
        federate_groups([Group(clients=1, classes=(1, 2))], lambda name: source, IID, 0)


def test_a_prepared_source_of_objects_comes_back_the_same(tmp_path: Path) -> None:
    source = crowded()
    save_source(source, tmp_path / "s.safetensors")
    again = load_source(f"file:{tmp_path / 's.safetensors'}")
    assert torch.equal(again.targets, source.targets)
    assert torch.equal(again.inputs, source.inputs)
    assert (again.classes, again.train_size) == (source.classes, source.train_size)
    save_source(source, tmp_path / "few.safetensors", limit=12)
    few = load_source(f"file:{tmp_path / 'few.safetensors'}")
    assert (few.train_size, few.targets.shape) == (12, (18, 2, 6))


def test_synthetic_boxes_fit_their_shapes_to_the_pixel() -> None:
    source = synthetic(clients=2, samples=40, noise=0.0)
    assert source.inputs.shape == (80, 3, 64, 64)
    assert source.owner is not None
    for image, objects in zip(source.inputs.numpy(), source.targets.numpy(), strict=True):
        painted = np.zeros((64, 64), bool)
        real = objects[objects[:, 0] >= 0]
        assert 1 <= len(real) <= 3
        for _, *box, ignored in real:
            x0, y0, x1, y1 = (int(value) for value in np.array(box) * 64)
            assert (np.array([x0, y0, x1, y1]) == np.array(box) * 64).all()
            assert ignored == 0
            inside = (image != 128).any(0)[y0:y1, x0:x1]
            for side in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
                assert side.any()
            painted[y0:y1, x0:x1] = True
        assert (image[:, ~painted] == 128).all()


def test_synthetic_objects_of_a_class_have_one_colour() -> None:
    source = synthetic(clients=1, samples=60, classes=4, noise=0.0)
    colours: dict[int, set[tuple[int, ...]]] = {}
    for image, objects in zip(source.inputs, source.targets, strict=True):
        for label, x0, y0, x1, y1, _ in objects[objects[:, 0] >= 0].tolist():
            centre = image[:, int((y0 + y1) * 32), int((x0 + x1) * 32)]
            colours.setdefault(int(label), set()).add(tuple(centre.tolist()))
    assert sorted(colours) == [0, 1, 2, 3]
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 4


def test_synthetic_objects_are_determined_by_the_seed_and_small_images_refused() -> None:
    one, same, other = (synthetic(clients=1, samples=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.inputs, same.inputs)
    assert torch.equal(one.targets, same.targets)
    assert not torch.equal(one.inputs, other.inputs)
    with pytest.raises(UserError, match="image_size=8, allowed: at least 16"):
        synthetic(image_size=8)

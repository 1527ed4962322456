"""Federations of groups: who has which images, at which size, of which classes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from tailorfl.data import Group, PartitionOptions, Source, federate_groups, load_source
from tailorfl.data.resizing import resized
from tailorfl.errors import UserError

OPTIONS = PartitionOptions(partition="iid", validation_fraction=0.2)
CLASSES = 4


def images(rows: int = 160, tests: int = 40) -> Source:
    """Images of one shade each, from which a row is known again."""
    shades = torch.arange(rows + tests, dtype=torch.uint8)
    inputs = shades[:, None, None, None].expand(-1, 1, 8, 8).clone()
    targets = torch.arange(rows + tests) % CLASSES
    return Source("shades", "image", inputs, targets, rows, tuple("abcd"))


def reading(source: Source) -> Callable[[str], Source]:
    return lambda name: source


def shades_of(data, clients: Sequence[int], split: str) -> list[int]:
    return [int(data.of(c).inputs[row, 0, 0, 0]) for c in clients for row in data.rows(split).of(c)]


GROUPS = (
    Group(clients=2, image_size=16),
    Group(clients=3, image_size=8, classes=2),
    Group(clients=1, image_size=4, classes=(3, 1), name="tiny"),
)


def test_each_group_has_its_image_size_and_classes() -> None:
    data = federate_groups(GROUPS, reading(images()), OPTIONS, 0)
    assert data.group_of == (0, 0, 1, 1, 1, 2)
    assert [group.input_shape for group in data.groups] == [(1, 16, 16), (1, 8, 8), (1, 4, 4)]
    assert [group.classes for group in data.groups] == [tuple("abcd"), ("a", "b"), ("d", "b")]
    assert data.names == ("shades-16px-4/0", "shades-16px-4/1", *(f"shades-8px-2/{k}" for k in range(3)), "tiny/0")
    for client in range(data.clients):
        own = data.of(client)
        for split in ("train", "validation", "test"):
            rows = data.rows(split).of(client)
            assert len(rows) > 0
            assert torch.equal(rows, own.rows(split).of(client))
            shades, names = own.inputs[rows, 0, 0, 0].long(), [own.classes[k] for k in own.targets[rows].tolist()]
            assert names == ["abcd"[k] for k in (shades % CLASSES).tolist()], "a label follows its image"


def test_groups_of_one_source_train_on_rows_of_their_own() -> None:
    data = federate_groups(GROUPS, reading(images()), OPTIONS, 0)
    used = [row for split in ("train", "validation") for row in shades_of(data, range(data.clients), split)]
    assert len(used) == len(set(used))
    assert max(used) < 160 <= min(shades_of(data, range(data.clients), "test"))
    # Class a is the first two groups' alone: it is dealt two to three, by their clients.
    whose = [
        data.group_of[c]
        for c in range(6)
        for s in ("train", "validation")
        for k in shades_of(data, [c], s)
        if k % 4 == 0
    ]
    assert [whose.count(group) for group in range(3)] == [16, 24, 0]


def test_the_seed_decides_and_a_partition_is_taken_as_it_is() -> None:
    one, same, other = (federate_groups(GROUPS, reading(images()), OPTIONS, seed) for seed in (3, 3, 4))
    assert torch.equal(one.train.index, same.train.index)
    assert (
        not torch.equal(one.groups[0].targets, other.groups[0].targets)
        or one.train.index.tolist() != other.train.index.tolist()
    )
    again = federate_groups(GROUPS, reading(images()), OPTIONS, 3, one.partition())
    assert torch.equal(again.groups[2].train.index, one.groups[2].train.index)
    with pytest.raises(UserError, match="with other clients or rows than the groups have"):
        federate_groups(GROUPS[:2], reading(images()), OPTIONS, 3, one.partition())


def test_counts_of_classes_are_padded_to_the_most() -> None:
    data = federate_groups(GROUPS, reading(images()), OPTIONS, 0)
    counts = data.label_counts()
    assert counts.shape == (6, 4)
    assert counts.sum(1).tolist() == data.train.counts.tolist()
    assert counts[2:, 2:].sum() == 0


def test_resizing_keeps_what_an_image_shows() -> None:
    source = images()
    inputs = source.inputs.clone()
    inputs[..., :4], inputs[..., 4:] = 20, 220  # dark on the left
    for side in (4, 16, 32):
        found = resized(replace(source, inputs=inputs), side).inputs
        assert (found.dtype, tuple(found.shape[1:])) == (torch.uint8, (1, side, side))
        assert found[..., : side // 4].eq(20).all()
        assert found[..., -side // 4 :].eq(220).all()
        assert found.float().mean() == pytest.approx(120, abs=1)
    assert resized(source, 8) is source


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"classes": 1}, "classes=1: a client needs something to tell apart; allowed: 2 or more"),
        ({"classes": 5}, "classes=5 of shades; allowed: 2 to 4"),
        ({"classes": [0, 0]}, "different numbers from 0 to 3"),
        ({"classes": [0, 7]}, "different numbers from 0 to 3"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: dict[str, object], said: str) -> None:
    groups = [Group(clients=2), Group.model_validate({"clients": 2, **group})]
    with pytest.raises(UserError, match=said):
        federate_groups(groups, reading(images()), OPTIONS, 0)


def test_groups_are_of_images_and_have_clients() -> None:
    source = load_source("synthetic-regression")
    with pytest.raises(UserError, match="has no images with classes"):
        federate_groups([Group(clients=2)], reading(source), OPTIONS, 0)
    with pytest.raises(ValidationError, match="clients"):
        Group(clients=0)
    with pytest.raises(ValidationError, match="pixels"):
        Group.model_validate({"clients": 1, "pixels": 8})

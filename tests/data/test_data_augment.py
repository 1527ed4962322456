"""Augmentation, against results worked out by hand."""

import numpy as np
import pytest
import torch

from tailorfl.data import Augmentation
from tailorfl.errors import UserError

IMAGE = torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flip,crop4", Augmentation(flip=True, crop=4)),
        (" crop12 , rotate ", Augmentation(crop=12, rotate=True)),
        ("rotate,once", Augmentation(rotate=True, once=True)),
        ("none", Augmentation()),
        ("", Augmentation()),
    ],
)
def test_an_augmentation_is_read_from_a_list(text: str, expected: Augmentation) -> None:
    assert Augmentation.parse(text) == expected
    assert bool(expected) == (text not in ("", "none"))


def test_a_crop_beyond_the_image_is_refused() -> None:
    Augmentation.parse("crop8").check(boxes=False, side=8)
    with pytest.raises(UserError, match="augment=crop9: images are 8 pixels wide or high; allowed: crop1 to crop8"):
        Augmentation.parse("crop9").check(boxes=False, side=8)


@pytest.mark.parametrize("text", ["flop", "crop", "crop0", "crop-1", "flip,none", "flip,,rotate", "flip;rotate"])
def test_an_unknown_augmentation_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"is not known; allowed: none, or a list of flip, cropPIXELS"):
        Augmentation.parse(text)


@pytest.mark.parametrize("text", ["once", "once,once"])
def test_once_says_how_often_and_not_what(text: str) -> None:
    with pytest.raises(UserError, match=f"augment={text}: nothing is done, once or otherwise; allowed: none, or"):
        Augmentation.parse(text)


def test_a_flip_is_left_to_right() -> None:
    flipped = Augmentation(flip=True).apply(IMAGE.expand(2, 1, 3, 3), {"flip": torch.tensor([True, False])})
    assert flipped[0, 0].tolist() == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    assert torch.equal(flipped[1], IMAGE)
    assert flipped.dtype == torch.uint8


@pytest.mark.parametrize(
    ("top", "left", "expected"),
    [
        (1, 1, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (0, 0, [[0, 0, 0], [0, 1, 2], [0, 4, 5]]),
        (2, 1, [[4, 5, 6], [7, 8, 9], [0, 0, 0]]),
        (1, 2, [[2, 3, 0], [5, 6, 0], [8, 9, 0]]),
    ],
)
def test_a_crop_shifts_and_fills_with_zeros(top: int, left: int, expected: list) -> None:
    draws = {"top": torch.tensor(top), "left": torch.tensor(left)}
    assert Augmentation(crop=1).apply(IMAGE, draws)[0].tolist() == expected


def test_rotation_is_by_quarter_turns_counter_clockwise() -> None:
    turned = Augmentation(rotate=True).apply(IMAGE.expand(4, 1, 3, 3), {"turns": torch.arange(4)})
    assert turned[0, 0].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert turned[1, 0].tolist() == [[3, 6, 9], [2, 5, 8], [1, 4, 7]]
    assert turned[2, 0].tolist() == [[9, 8, 7], [6, 5, 4], [3, 2, 1]]
    assert turned[3, 0].tolist() == [[7, 4, 1], [8, 5, 2], [9, 6, 3]]


def test_rotation_needs_square_images() -> None:
    with pytest.raises(UserError, match="square images, these are 3x2"):
        Augmentation(rotate=True).apply(IMAGE[:, :2], {"turns": torch.tensor(1)})


def test_images_of_many_clients_at_once_are_treated_as_those_of_one() -> None:
    augmentation = Augmentation(flip=True, crop=2, rotate=True)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 5, 2, 6, 6)).astype(np.uint8))
    draws = [augmentation.draw(np.random.default_rng(client), 5) for client in range(3)]
    stacked = {name: torch.from_numpy(np.stack([draw[name] for draw in draws])) for name in draws[0]}
    together = augmentation.apply(images, stacked)
    for client in range(3):
        own = {name: torch.from_numpy(numbers) for name, numbers in draws[client].items()}
        assert torch.equal(augmentation.apply(images[client], own), together[client])
        for i in range(5):
            one = {name: numbers[i] for name, numbers in own.items()}
            assert torch.equal(augmentation.apply(images[client, i], one), together[client, i])


def test_draws_cover_all_there_is_and_depend_only_on_the_generator() -> None:
    augmentation = Augmentation(flip=True, crop=1, rotate=True)
    draws = augmentation.draw(np.random.default_rng(0), 500)
    assert {name: sorted(set(numbers.tolist())) for name, numbers in draws.items()} == {
        "flip": [False, True],
        "top": [0, 1, 2],
        "left": [0, 1, 2],
        "turns": [0, 1, 2, 3],
    }
    again = augmentation.draw(np.random.default_rng(0), 500)
    assert all(np.array_equal(draws[name], again[name]) for name in draws)


def test_no_augmentation_draws_nothing_and_changes_nothing() -> None:
    assert Augmentation().draw(np.random.default_rng(0), 3) == {}
    assert Augmentation().apply(IMAGE, {}) is IMAGE

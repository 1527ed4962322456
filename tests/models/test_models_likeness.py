"""Which networks are the same program: their clients may share a stack."""

import pytest
import torch
from torch import nn

from tailorfl.models import Network, build_module, networks
from tailorfl.models.likeness import same_program

SHAPES = {"text": ((12,), {"vocabulary": 30}), "ssd-resnet18": ((3, 256, 256), {"width": 0.1})}


def made(name: str, seed: int, **options: object) -> Network:
    shape, more = SHAPES.get(name, ((3, 32, 32), {}))
    torch.manual_seed(seed)
    return Network(build_module(name, shape, 4, **{**more, **options}), name)


@pytest.mark.parametrize("name", sorted(networks))
def test_a_network_with_other_initial_weights_is_the_same_program(name: str) -> None:
    assert same_program(made(name, 0), made(name, 1))


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("mlp", {"hidden": [8]}, {"hidden": [9]}),
        ("mlp", {"hidden": [8]}, {"hidden": [8, 8]}),
        ("cnn", {"channels": [4, 4]}, {"channels": [4, 5]}),
    ],
)
def test_a_network_of_another_size_is_another(name: str, one: dict, other: dict) -> None:
    assert not same_program(made(name, 0, **one), made(name, 0, **other))


def test_a_network_in_half_precision_is_another() -> None:
    wide, half = made("mlp", 0), made("mlp", 0)
    half.mixed = True
    assert not same_program(wide, half)


class Scaled(nn.Module):
    """A network with a number, a constant and frozen weights of its own."""

    def __init__(self, by: float = 1.0, constant: float = 0.0, frozen: float = 0.0) -> None:
        super().__init__()
        self.by, self.constant = by, torch.full((2,), constant)
        self.body = nn.Linear(2, 2)
        self.body.bias.requires_grad_(False).fill_(frozen)
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.by * self.body(x) + self.constant)


@pytest.mark.parametrize("other", [{"by": 2.0}, {"constant": 1.0}, {"frozen": 1.0}])
def test_what_is_set_or_constant_in_a_network_makes_it_another(other: dict) -> None:
    assert same_program(Network(Scaled()), Network(Scaled()))
    assert not same_program(Network(Scaled()), Network(Scaled(**other)))


def test_layers_of_the_same_form_that_compute_something_else_make_it_another() -> None:
    def network(between: nn.Module) -> Network:
        return Network(nn.Sequential(nn.Linear(2, 2), between, nn.Linear(2, 2)))

    assert same_program(network(nn.ReLU()), network(nn.ReLU()))
    assert not same_program(network(nn.ReLU()), network(nn.Tanh()))
    assert not same_program(network(nn.Dropout(0.1)), network(nn.Dropout(0.2)))


def test_shared_layers_in_another_order_make_it_another() -> None:
    def network(order: str) -> Network:
        parts = {"l": nn.Linear(2, 2), "t": nn.Tanh(), "r": nn.ReLU()}
        return Network(nn.Sequential(*(parts[letter] for letter in order), nn.Linear(2, 2)))

    assert same_program(network("lrtrtl"), network("lrtrtl"))
    assert not same_program(network("lrtrtl"), network("lrtltr"))


class Opaque:
    """Equal to nothing but itself."""


def test_what_cannot_be_compared_makes_it_another() -> None:
    one, other = Scaled(), Scaled()
    one.by = other.by = Opaque()
    assert same_program(Network(one), Network(other)), "the same object"
    other.by = Opaque()
    assert not same_program(Network(one), Network(other))

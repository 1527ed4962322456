"""The server's step, by hand."""

import math

import pytest
import torch

from tailorfl.exchange.messages import Server
from tailorfl.exchange.server_optimizer import server_step


def server(*numbers: float) -> Server:
    return Server({"w": torch.tensor(numbers, dtype=torch.float64)})


def target(*numbers: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(numbers, dtype=torch.float64)}


@pytest.mark.parametrize("kind", ["average", "sgd"])
def test_sgd_with_rate_one_and_no_momentum_takes_the_average(kind: str) -> None:
    at = server(1.0, -2.0)
    for step in (target(3.0, 5.0), target(0.25, 8.0)):
        server_step(at, step, kind, lr=1.0, momentum=0.0)
        assert at.values["w"].tolist() == step["w"].tolist()


def test_momentum_carries_the_last_update_on() -> None:
    at = server(10.0)
    server_step(at, target(8.0), "sgd", lr=0.5, momentum=0.5)  # g = 2, m = 2
    assert at.values["w"].item() == 9.0
    server_step(at, target(8.0), "sgd", lr=0.5, momentum=0.5)  # g = 1, m = 0.5 * 2 + 1 = 2
    assert at.values["w"].item() == 8.0


def test_two_steps_of_adam_by_hand() -> None:
    at = server(10.0)
    server_step(at, target(8.0), "adam", lr=0.1, momentum=0.0, betas=(0.9, 0.99), epsilon=1e-3)
    first, second = 0.1 * 2, 0.01 * 4
    value = 10 - 0.1 * first / (math.sqrt(second) + 1e-3)
    assert at.values["w"].item() == pytest.approx(value, abs=1e-12)
    server_step(at, target(8.0), "adam", lr=0.1, momentum=0.0, betas=(0.9, 0.99), epsilon=1e-3)
    first, second = 0.9 * first + 0.1 * (value - 8), 0.99 * second + 0.01 * (value - 8) ** 2
    assert at.values["w"].item() == pytest.approx(value - 0.1 * first / (math.sqrt(second) + 1e-3), abs=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_statistics_are_replaced_and_not_stepped(kind: str) -> None:
    at = Server({"w": torch.tensor([4.0]), "running_mean": torch.tensor([4.0])})
    average = {"w": torch.tensor([2.0]), "running_mean": torch.tensor([2.0])}
    server_step(at, average, kind, lr=0.1, momentum=0.9, plain=frozenset({"running_mean"}))
    assert at.values["running_mean"].item() == 2.0
    assert at.values["w"].item() > 2.0
    assert not any("running_mean" in name for name in at.state)


def test_what_was_not_averaged_stays() -> None:
    at = Server({"w": torch.tensor([4.0]), "b": torch.tensor([3.0])})
    server_step(at, {"w": torch.tensor([2.0])}, "sgd", lr=1.0, momentum=0.9)
    assert at.values["b"].item() == 3.0

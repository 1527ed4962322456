"""What was simulated is what is deployed: the same numbers, from the same method files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="needs the extra flower")

from flower_runs import (
    client_tensors,
    grid_of,
    rounds_of,
    serve_on,
    server_tensors,
    simulate,
    site_tensors,
    small,
)

from tailorfl.methods import methods
from tailorfl.study.config import Config

QUICK: dict[str, dict[str, Any]] = {
    "ppfe": {"local_epochs": 1},
    "pfps-lwc": {"local_epochs": 2},
    "pfedme": {"local_epochs": 1, "inner_steps": 2},
    "pflego": {"tau": 5},
}
MEASURED = ("seconds", "seconds_evaluation")


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6)


def same(config: Config, folder: Path) -> None:
    expected = simulate(config, folder)
    found = serve_on(grid_of(config, folder))
    assert found is not None
    close(server_tensors(folder / "simulated"), server_tensors(folder / "flower"))
    close(client_tensors(folder / "simulated"), site_tensors(folder / "state"))
    for one, other in zip(rounds_of(folder / "simulated"), rounds_of(folder / "flower"), strict=True):
        assert set(one) == set(other)
        for key in set(one) - set(MEASURED):
            assert other[key] == (pytest.approx(one[key], abs=1e-6) if isinstance(one[key], float | dict) else one[key])
    assert found["personalized_accuracy"] == pytest.approx(expected["personalized_accuracy"], abs=1e-6)


@pytest.mark.parametrize("method", methods())
def test_every_method_is_the_same_on_flower(method: str, tmp_path: Path) -> None:
    same(small(method, **QUICK.get(method, {})), tmp_path)


def test_groups_of_clients_with_other_networks(tmp_path: Path) -> None:
    large = {"name": "large", "clients": 2, "image_size": 16, "classes": 10}
    groups = [large, {"name": "small", "clients": 2, "image_size": 8, "classes": 4}]
    settings = {"clients": None, "groups": groups, "network": "stride-cnn", "base_size": 4, "network_options": {}}
    more = {"partition": "iid", "selection": "per-group", "clients_per_round": 0.5, "local_epochs": 1}
    same(small("scalablefl", **settings, **more), tmp_path)


def test_clients_that_join_late_and_clients_that_never_train(tmp_path: Path) -> None:
    same(small("fedper", clients=6, new_clients=1, joining_clients=1, joining_round=2, local_epochs=1), tmp_path)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_validation_data_and_other_precisions(precision: str, tmp_path: Path) -> None:
    same(small("fedrep", validation_fraction=0.2, precision=precision, local_epochs=1), tmp_path)

"""The methods on real images: what each is for must show."""

import os
from functools import cache
from pathlib import Path

import pytest
from method_runs import run

from tailorfl.methods import methods
from tailorfl.study.build import build
from tailorfl.study.config import configure

DATA = Path(os.environ.get("TAILOR_DATA", "nowhere"))
ONE_FOR_ALL = {"fedavg", "fedprox", "fedsgd", "fedbn"}  # fedbn: the network has no norm layers
SETTINGS = {
    "data": "fashion-mnist",
    "clients": 20,
    "classes_per_client": 2,
    "samples_per_client": 200,
    "clients_per_round": 10,
    "local_epochs": 3,
    "rounds": 15,
    "evaluate_every": 0,
    "network": "mlp",
    "network_options": {"hidden": [64]},
    "device": "cpu",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (DATA / "FashionMNIST").is_dir(), reason="TAILOR_DATA has no FashionMNIST"),
]


@cache
def accuracy(method: str) -> float:
    last = run(build(configure(method, SETTINGS), DATA))[-1].evaluation
    assert last is not None
    assert last.personalized.accuracy is not None
    return last.personalized.accuracy


@pytest.mark.parametrize("method", sorted(set(methods()) - ONE_FOR_ALL))
def test_a_personalized_method_beats_one_model_for_all(method: str) -> None:
    assert accuracy(method) > accuracy("fedavg") + 0.05


@pytest.mark.parametrize("method", ["fedavg-ft", "fedper", "fedrep", "ditto", "fedbabu"])
def test_the_well_known_ones_are_right_nineteen_times_out_of_twenty(method: str) -> None:
    assert accuracy(method) >= 0.95

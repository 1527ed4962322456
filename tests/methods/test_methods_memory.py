"""What a method keeps with each client beside its model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from method_runs import SMALL, differences, federation, run, state

from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.study.config import configure
from tailorfl.study.run import Run

SOURCE = '''
import torch
from tailorfl.methods.fedavg import FedAvg

class Counting(FedAvg):
    """Counts the rounds of each client, from ten."""
    poison: bool = False

    def memory(self, network):
        return {"rounds": torch.full((1,), 10.0)}

    def train(self, clients, received):
        clients.memory["rounds"] += 1
        if self.poison:
            clients.memory["rounds"][[row for row, client in enumerate(clients.clients) if client == 1]] = torch.nan
        return super().train(clients, received)
'''


MODULES = """
from torch import nn

class Dropping(nn.Sequential):
    def __init__(self, input_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, classes))

class NormHead(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))

    def forward(self, inputs):
        return self.top(self.body(inputs))
"""


@contextmanager
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> Iterator[None]:
    """A user's module in the folder where tailor is called."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(name, None)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with importable(tmp_path, monkeypatch, "drawing_modules", MODULES):
        yield "drawing_modules"


@pytest.mark.parametrize("method", ["apfl", "per-fedavg", "fedavg"])
def test_what_a_network_drops_does_not_depend_on_what_ran_before(method: str, modules: str) -> None:
    found = []
    for before in (1, 2):
        torch.manual_seed(before)
        built = federation(method, network=f"{modules}:Dropping", network_options={}, rounds=2)
        losses = [record.evaluation.personalized.loss.tolist() for record in run(built)]
        found.append((losses, state(built)))
    assert found[0][0] == found[1][0]
    assert not differences(found[0][1], found[1][1])


def test_norms_in_the_head_count_each_real_sample_once(modules: str) -> None:
    """FedProto runs body and head apart, so without a pull it must still be local training."""
    settings = {"network": f"{modules}:NormHead", "network_options": {}, "precision": "float64", "batch_size": 7}
    built = {
        name: federation(method, **settings, engine=engine, partition="dirichlet", samples_per_client=None, **options)
        for name, method, engine, options in (
            ("local", "local", "stacked", {}),
            ("stacked", "fedproto", "stacked", {"lam": 0, "prediction": "head"}),
            ("alone", "fedproto", "one-by-one", {"lam": 0, "prediction": "head"}),
        )
    }
    kept = {}
    for name, one in built.items():
        run(one)
        kept[name] = {key: t for key, t in one.federation.store.flat().items() if "memory/" not in key}
    for name in ("stacked", "alone"):
        assert kept[name].keys() == kept["local"].keys()
        for key, tensor in kept["local"].items():
            torch.testing.assert_close(kept[name][key], tensor, rtol=0, atol=1e-8)


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with importable(tmp_path, monkeypatch, "counting_method", SOURCE):
        yield "counting_method:Counting"


def test_a_clients_memory_goes_from_one_of_its_rounds_to_the_next(counting: str) -> None:
    built = federation(counting, rounds=5)
    taken = [client for record in run(built) for client in record.selected]
    kept = {client: entry["memory/rounds"].item() for client, entry in built.federation.store.entries.items()}
    assert kept == {client: 10 + taken.count(client) for client in set(taken)}


def test_memory_does_not_travel(counting: str) -> None:
    plain, remembering = run(federation("fedavg")), run(federation(counting))
    assert [(one.bytes_up, one.bytes_down) for one in plain] == [(one.bytes_up, one.bytes_down) for one in remembering]


def test_a_client_whose_memory_is_not_finite_is_left_out(counting: str) -> None:
    built = federation(counting, poison=True, clients_per_round=6)
    assert [record.diverged for record in run(built)] == [[1]] * 3
    assert all(entry["memory/rounds"].isfinite().all() for entry in built.federation.store.entries.values())


def test_memory_outlives_a_restart(counting: str, tmp_path: Path) -> None:
    config = configure(counting, {**SMALL, "rounds": 4})
    seen: list[int] = []
    stopping = Run(config, tmp_path / "run", watch=lambda line: seen.append(1), stop=lambda: len(seen) == 2)
    assert stopping.execute() is None
    assert Run(config, tmp_path / "run").execute(resume=True) is not None
    built = federation(counting, rounds=4)
    run(built)
    found = newest_checkpoint(tmp_path / "run/checkpoints", torch.device("cpu"))
    assert found is not None
    assert found.clients.keys() == built.federation.store.flat().keys()
    assert all(torch.equal(tensor, found.clients[name]) for name, tensor in built.federation.store.flat().items())

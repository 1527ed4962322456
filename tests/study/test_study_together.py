"""Runs together in one process: each ends as it ends alone, though their clients share stacks."""

import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from study_runs import Tailor, pairs, results, small, tensors
from test_study_workers import Seen

from tailorfl.cohort.joined import Joined
from tailorfl.methods import methods
from tailorfl.study.cells import Cell, Failure, Way, in_batches, run_cells

EXACT: dict[str, Any] = {"precision": "float64", "evaluate_every": 1, "checkpoint_every": 1}
GROUPS = [
    {"name": "large", "clients": 3, "image_size": 16, "classes": 6},
    {"name": "small", "clients": 3, "image_size": 8, "classes": 3},
]
BROKEN = """
from tailorfl.methods.fedavg import FedAvg

class Breaks(FedAvg):
    def train(self, clients, received):
        if clients.round == 2:
            raise RuntimeError("not today")
        return super().train(clients, received)
"""


def cells(folder: Path, *methods: str, seeds: Sequence[int] = (0, 1, 2), **settings: Any) -> list[Cell]:
    made = [(name, seed, small(name, seed=seed, **{**EXACT, **settings})) for seed in seeds for name in methods]
    return [Cell(f"{name}, seed {seed}", config, folder / name / str(seed)) for name, seed, config in made]


def run(cells: list[Cell], seen: Seen | None = None, stop: Any = bool, **way: Any) -> bool:
    """Whether all ended; if nobody looks at how, none may have failed."""
    watch = seen or Seen()
    whole = run_cells(cells, Way(**way), watch, lambda cell, result: None, stop)
    assert seen or not [result for result in watch.results.values() if isinstance(result, Failure)]
    return whole


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many runs the clients of each stack were."""
    sizes: list[int] = []
    real = Joined.of

    def of(parts: Any, *more: Any) -> Joined:
        sizes.append(len(parts))
        return real(parts, *more)

    monkeypatch.setattr(Joined, "of", of)
    return sizes


def alike(one: Path, other: Path) -> None:
    """Whether two runs ended alike up to rounding in double precision."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-9, equal_nan=True)
    _close(results(one), results(other))


def _close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            _close(value, other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            _close(mine, theirs)
    elif isinstance(one, float) or (isinstance(one, str) and one.replace(".", "", 1).isdigit()):
        assert math.isclose(float(one), float(other), rel_tol=1e-7, abs_tol=1e-7)
    else:
        assert one == other


@pytest.mark.parametrize("method", list(methods()))
def test_every_method_learns_together_what_it_learns_alone(method: str, tmp_path: Path) -> None:
    seeds = (0, 1)
    assert run(cells(tmp_path / "alone", method, seeds=seeds))
    assert run(cells(tmp_path / "together", method, seeds=seeds), together=2)
    for seed in seeds:
        alike(tmp_path / "alone" / method / str(seed), tmp_path / "together" / method / str(seed))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", ["fedper", "fedprox", "pflego", "ppfe"])
def test_runs_together_on_a_gpu_learn_what_they_learn_alone(method: str, tmp_path: Path, joined: list[int]) -> None:
    own = {"image_size": 16, "network": "ppfe-cnn", "network_options": {"channels": [4, 4], "hidden": [8]}}
    for where, together in (("alone", 1), ("together", 3)):
        assert run(cells(tmp_path / where, method, device="cuda", **own), together=together)
    assert 3 in joined or method == "pflego"
    for seed in range(3):
        alike(tmp_path / "alone" / method / str(seed), tmp_path / "together" / method / str(seed))


def test_seeds_of_a_method_share_all_stacks(tmp_path: Path, joined: list[int]) -> None:
    assert run(cells(tmp_path, "fedper"), together=3)
    assert joined == [3, 3, 3], "a stack of the clients of three seeds in each of three rounds"


def test_methods_share_stacks_where_they_train_alike(tmp_path: Path, joined: list[int]) -> None:
    assert run(cells(tmp_path, "fedavg", "fedper", "local", "fedprox", seeds=[0]), together=4)
    assert joined == [3] * 3, "FedProx has a loss of its own, and trains alone"


def test_many_steps_are_traced_together(tmp_path: Path, joined: list[int]) -> None:
    more = {"local_epochs": 5, "batch_size": 5, "rounds": 2}
    assert run(cells(tmp_path / "alone", "fedper", **more))
    assert run(cells(tmp_path / "together", "fedper", **more), together=3)
    assert joined == [3, 3]
    for seed in range(3):
        alike(tmp_path / "alone" / "fedper" / str(seed), tmp_path / "together" / "fedper" / str(seed))


def test_runs_of_other_sizes_go_together_and_end_when_they_end(tmp_path: Path, joined: list[int]) -> None:
    def made(folder: Path) -> list[Cell]:
        long = cells(folder / "long", "fedavg", seeds=[0], rounds=5, samples_per_client=30, clients_per_round=5)
        return [*long, *cells(folder / "short", "fedavg", seeds=[1])]

    assert run(made(tmp_path / "together"), together=2)
    assert joined == [2, 2, 2], "then the long one is alone"
    assert run(made(tmp_path / "alone"))
    for place in ("long/fedavg/0", "short/fedavg/1"):
        alike(tmp_path / "alone" / place, tmp_path / "together" / place)


def test_a_stack_holds_no_more_clients_than_it_may(tmp_path: Path, joined: list[int]) -> None:
    assert run(cells(tmp_path, "fedavg", stack_size=6), together=3)
    assert joined == [2] * 3, "three clients of each run; the third run trains alone"


def test_groups_learn_together_what_they_learn_alone(tmp_path: Path) -> None:
    settings = {"engine": "stacked", "stack_size": 6, "network": "stride-cnn", "base_size": 4, "groups": GROUPS}
    for where, together in (("alone", 1), ("together", 2)):
        made = [
            Cell(name, small(name, **_without_clients(**settings), partition="iid", rounds=2), tmp_path / where / name)
            for name in ("scalablefl", "local")
        ]
        assert run(made, together=together)
    for name in ("scalablefl", "local"):
        alike(tmp_path / "alone" / name, tmp_path / "together" / name)


def _without_clients(**settings: Any) -> dict[str, Any]:
    off = {"clients": None, "network_options": {}, "samples_per_client": None, "clients_per_round": 1.0}
    return {**EXACT, **off, **settings}


def test_what_was_stopped_together_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    seen = Seen()
    assert not run(cells(tmp_path / "out", "fedper"), seen, lambda: any(what == 1 for _, what in seen.told), together=3)
    assert all(seen.of(f"fedper, seed {seed}") == ["begun", 1] for seed in range(3))
    assert run(cells(tmp_path / "out", "fedper"), together=3, resume=True)
    assert run(cells(tmp_path / "alone", "fedper"))
    for seed in range(3):
        alike(tmp_path / "alone" / "fedper" / str(seed), tmp_path / "out" / "fedper" / str(seed))


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "broken_of_mine.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    return "broken_of_mine:Breaks"


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, broken: str) -> None:
    seen = Seen()
    assert run(cells(tmp_path / "out", "fedavg", broken, "fedper", seeds=[0]), seen, together=3)
    failed = seen.results[f"{broken}, seed 0"]
    assert isinstance(failed, Failure)
    assert "not today" in failed.reason
    for name in ("fedavg", "fedper"):
        assert seen.results[f"{name}, seed 0"]["rounds"] == 3  # type: ignore[index]
        assert run(cells(tmp_path / "alone", name, seeds=[0]))
        alike(tmp_path / "alone" / name / "0", tmp_path / "out" / name / "0")


ODD = """
from dataclasses import dataclass

import torch
from torch import nn

from tailorfl.cohort.objective import cross_entropy
from tailorfl.methods.fedavg import FedAvg


class Unhashable:
    def __eq__(self, other):
        return True

    def __call__(self, client, batch):
        return cross_entropy(client, batch)


class Odd(FedAvg):
    def train(self, clients, received):
        clients.load(received.tensors)
        clients.fit(Unhashable())
        return clients.take(received.tensors)


@dataclass
class Scale:
    by: torch.Tensor


class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.scale = Scale(torch.ones(2))
        self.flat, self.head = nn.Flatten(), nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.flat(x))
"""


def test_what_cannot_be_compared_is_trained_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_of_mine.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    odd = ("odd_of_mine:Odd", "fedavg")
    own = {"network": "odd_of_mine:Net", "network_options": {}}
    for settings in ({"engine": "one-by-one"}, own):
        for where, together in (("alone", 1), ("out", 2)):
            folder = tmp_path / where / str(len(settings))
            assert run(cells(folder, *odd, seeds=[0], **settings), together=together)
        for name in odd:
            alike(
                tmp_path / "alone" / str(len(settings)) / name / "0", tmp_path / "out" / str(len(settings)) / name / "0"
            )


def test_what_goes_wrong_with_results_ends_all_runs_and_is_said(tmp_path: Path) -> None:
    def full(cell: Cell, result: Any) -> None:
        raise OSError("the disk is full")

    long = [*cells(tmp_path, "fedavg", seeds=[0]), *cells(tmp_path, "fedper", seeds=[0, 1], rounds=500)]
    with pytest.raises(OSError, match="the disk is full"):
        run_cells(long, Way(together=3), Seen(), full)
    assert not {cell.title for cell in long} & {thread.name for thread in threading.enumerate()}
    assert not (tmp_path / "fedper" / "0" / "summary.json").exists()


def test_what_cannot_be_trained_together_is_trained_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> Joined:
        raise torch.OutOfMemoryError("too much")

    assert run(cells(tmp_path / "alone", "fedper"))
    monkeypatch.setattr(Joined, "of", too_much)
    assert run(cells(tmp_path / "out", "fedper"), together=3)
    for seed in range(3):
        alike(tmp_path / "alone" / "fedper" / str(seed), tmp_path / "out" / "fedper" / str(seed))


def test_what_runs_say_is_told_with_the_run_it_is_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tailorfl"):
        assert run(cells(tmp_path, "fedavg", "fedper", seeds=[0]), together=2)
    assert {"fedavg, seed 0: mlp runs stacked", "fedper, seed 0: mlp runs stacked"} <= set(caplog.messages)


def test_cells_that_may_share_stacks_are_batched_together(tmp_path: Path) -> None:
    batches = in_batches(cells(tmp_path, "fedavg", "fedper"), 3)
    titles = [[cell.title for cell in batch] for batch in batches]
    assert titles == [[f"{name}, seed {seed}" for seed in range(3)] for name in ("fedavg", "fedper")]
    assert all(len(batch) == 1 for batch in in_batches(cells(tmp_path, "fedavg", "fedper"), 1))


def test_batches_run_side_by_side_in_processes(tmp_path: Path, broken: str, quick_workers: None) -> None:
    seen = Seen()
    assert run(cells(tmp_path / "out", "fedavg", "fedper", broken, seeds=[0, 1]), seen, together=2, jobs=2)
    assert run(cells(tmp_path / "alone", "fedavg", "fedper", seeds=[0, 1]))
    assert sorted(seen.results) == sorted({title for title, _ in seen.told})
    assert all(isinstance(seen.results[f"{broken}, seed {seed}"], Failure) for seed in (0, 1))
    for name in ("fedavg", "fedper"):
        for seed in (0, 1):
            assert seen.of(f"{name}, seed {seed}") == ["begun", 1, 2, 3, "ended"]
            alike(tmp_path / "alone" / name / str(seed), tmp_path / "out" / name / str(seed))


def test_the_command_runs_seeds_together(tmp_path: Path, study: Tailor, joined: list[int]) -> None:
    out = tmp_path / "out"
    arguments = ["fedper", "fedavg", *pairs(**EXACT), "seeds=2", "--together", "2", "--out", str(out)]
    status, said, err = study("compare", *arguments)
    assert status == 0, err
    assert "fedper" in said
    assert joined == [2] * 6
    status, _, err = study("compare", *arguments[:-4], "--together", "0", "--out", str(tmp_path / "other"))
    assert status == 2
    assert "--together" in err
    assert not (tmp_path / "other").exists()

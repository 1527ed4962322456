"""Cells side by side: the same results as one after the other, and what happens when a process dies or is stopped."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_runs import Tailor, identical, pairs, small, start

from tailorfl.study.cells import Cell, Failure, Result, Way, run_cells

SETTINGS: dict[str, Any] = {"evaluate_every": 1, "checkpoint_every": 1}
METHODS = ("fedper", "local")
TITLES = [f"{method}-{seed}" for seed in (0, 1) for method in METHODS]

# Methods of a user's own, in the folder where the command is called.
PLUGINS = """
import os, signal, warnings
from tailorfl.methods.fedavg import FedAvg

class Dies(FedAvg):
    def train(self, clients, received):
        os.kill(os.getpid(), signal.SIGKILL)

class Warns(FedAvg):
    def train(self, clients, received):
        warnings.warn("mind this", stacklevel=1)
        return super().train(clients, received)
"""


class Seen:
    """What was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.results: dict[str, Result] = {}

    def begun(self, cell: Cell) -> None:
        self.told.append((cell.title, "begun"))

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        self.told.append((cell.title, line["round"]))

    def ended(self, cell: Cell, result: Result) -> None:
        self.told.append((cell.title, "ended"))
        self.results[cell.title] = result

    def of(self, title: str) -> list[Any]:
        return [what for of, what in self.told if of == title]


def cells(folder: Path, *methods: str) -> list[Cell]:
    if methods:
        return [Cell(name, small(name, **SETTINGS), folder / name.replace(":", ".")) for name in methods]
    made = {f"{method}-{seed}": small(method, seed=seed, **SETTINGS) for seed in (0, 1) for method in METHODS}
    return [Cell(title, config, folder / title) for title, config in made.items()]


def run(cells: list[Cell], seen: Seen, stop: Callable[[], bool] = bool, **way: Any) -> bool:
    return run_cells(cells, Way(**way), seen, lambda cell, result: None, stop)


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run(cells(folder), Seen())
    return folder


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins_of_mine.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)


def test_cells_side_by_side_end_as_one_after_the_other_to_the_bit(
    tmp_path: Path, one_by_one: Path, quick_workers: None
) -> None:
    seen = Seen()
    assert run(cells(tmp_path), seen, jobs=2)
    assert all(identical(one_by_one / title, tmp_path / title) for title in TITLES)
    assert all(seen.of(title) == ["begun", 1, 2, 3, "ended"] for title in TITLES)
    assert {title for title, what in seen.told[:2] if what == "begun"} == set(TITLES[:2]), "two begin at once"


def test_a_process_that_is_killed_costs_only_its_cell(tmp_path: Path, plugins: None, quick_workers: None) -> None:
    seen = Seen()
    assert run(cells(tmp_path, "fedper", "plugins_of_mine:Dies", "fedavg", "local"), seen, jobs=2)
    dead = seen.results.pop("plugins_of_mine:Dies")
    assert dead == Failure("its process was killed (SIGKILL; is there enough memory?)")
    assert sorted(seen.results) == ["fedavg", "fedper", "local"]
    assert all(isinstance(result, dict) and result["rounds"] == 3 for result in seen.results.values())


def test_what_a_process_logs_is_told_with_the_cell_it_is_about(
    tmp_path: Path, plugins: None, quick_workers: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tailorfl"):
        assert run(cells(tmp_path, "plugins_of_mine:Warns", "local"), Seen(), jobs=2)
    assert any(line.startswith("plugins_of_mine:Warns: ") and "mind this" in line for line in caplog.messages)
    assert "local: mlp runs stacked" in caplog.messages


def test_cells_that_were_stopped_side_by_side_go_on_and_end_the_same(
    tmp_path: Path, one_by_one: Path, quick_workers: None
) -> None:
    seen = Seen()
    assert not run(cells(tmp_path), seen, lambda: any(what == 1 for _, what in seen.told), jobs=2)
    assert [title for title in TITLES if seen.of(title)] == TITLES[:2], "no other cell begins"
    finished = {title: (tmp_path / title / "summary.json").stat().st_mtime_ns for title in seen.results}
    seen = Seen()
    assert run(cells(tmp_path), seen, resume=True, jobs=2)
    assert all(seen.of(title) == ["ended"] for title in finished), "what is finished is taken as it is"
    assert {title: (tmp_path / title / "summary.json").stat().st_mtime_ns for title in finished} == finished
    assert all(identical(one_by_one / title, tmp_path / title) for title in TITLES)


# The command.


def compare(folder: Path, *more: str, **settings: Any) -> list[str]:
    return ["compare", *METHODS, *pairs(**SETTINGS | settings), "seeds=2", "--jobs", "2", "--out", str(folder), *more]


def test_the_command_runs_cells_in_processes_that_it_starts(tmp_path: Path, one_by_one: Path, study: Tailor) -> None:
    status, _, err = study(*compare(tmp_path / "out"))
    assert status == 0
    assert "cell 4 of 4: local, seed 1" in err
    assert "fedper, seed 1: round 3 of 3" in err
    for seed in (0, 1):
        assert all(identical(one_by_one / f"{m}-{seed}", tmp_path / "out" / m / f"seed-{seed}") for m in METHODS)


def test_an_interrupt_stops_all_processes_after_their_round(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(compare(out, rounds=2000, evaluate_every=0, checkpoint_every=5000))
    while len(list(out.rglob("rounds.jsonl"))) < 2:
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    for log in out.rglob("rounds.jsonl"):
        rounds = len(log.read_text().splitlines())
        assert 1 <= rounds < 2000
        assert [path.name for path in (log.parent / "checkpoints").iterdir()] == [f"round-{rounds:06d}"]


def test_a_command_that_is_killed_takes_its_processes_along_and_can_be_resumed(
    tmp_path: Path, one_by_one: Path
) -> None:
    out = tmp_path / "out"
    killed = start(compare(out), die_at=("replace", 1))  # of the command itself: the first results that it writes
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    resumed = start(compare(out, "--resume"))
    resumed.join()
    assert resumed.exitcode == 0
    for seed in (0, 1):
        assert all(identical(one_by_one / f"{m}-{seed}", out / m / f"seed-{seed}") for m in METHODS)

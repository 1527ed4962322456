"""A run may be killed at any moment: resumed, it ends as if it had never stopped."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_runs import execute, identical, pairs, start

SETTINGS: dict[str, Any] = {"rounds": 6, "evaluate_every": 1, "checkpoint_every": 2}
METHODS = ("fedper", "local")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that nobody disturbed."""
    folders = {method: tmp_path_factory.mktemp("whole") / method for method in METHODS}
    for method, folder in folders.items():
        execute(folder, method, **SETTINGS)
    return folders.__getitem__


def command(method: str, folder: Path, *more: str, **settings: Any) -> list[str]:
    return ["run", method, *pairs(**SETTINGS, **settings), "--quiet", "--out", str(folder), *more]


def finish(method: str, folder: Path) -> None:
    process = start(command(method, folder, "--resume"))
    process.join()
    assert process.exitcode == 0


# Renames, in order: partition, classes, configuration, checkpoints of rounds 2, 4 and 6, clients, summary.
@pytest.mark.parametrize("rename", range(1, 9))
def test_a_run_killed_before_any_of_its_renames_goes_on(rename: int, tmp_path: Path, uninterrupted: Callable) -> None:
    killed = start(command("fedper", tmp_path / "run"), die_at=("replace", rename))
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "run/summary.json").exists()
    finish("fedper", tmp_path / "run")
    assert identical(uninterrupted("fedper"), tmp_path / "run")


@pytest.mark.parametrize("flush", [1, 3, 5, 6, 12])
def test_a_run_killed_while_it_flushes_a_file_goes_on(flush: int, tmp_path: Path, uninterrupted: Callable) -> None:
    killed = start(command("local", tmp_path / "run"), die_at=("fsync", flush))
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    finish("local", tmp_path / "run")
    assert identical(uninterrupted("local"), tmp_path / "run")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_again_and_again_at_random_moments_goes_on(
    method: str, tmp_path: Path, uninterrupted: Callable
) -> None:
    draws = random.Random(5)
    for wait in (0.0, *(draws.uniform(0.0, 0.6) for _ in range(6))):
        process = start(command(method, tmp_path / "run", "--resume"))
        process.join(wait)
        process.kill()
        process.join()
    finish(method, tmp_path / "run")
    assert identical(uninterrupted(method), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_a_random_moment_goes_on(
    method: str, seed: int, tmp_path: Path, uninterrupted: Callable
) -> None:
    process = start(command(method, tmp_path / "run"))
    process.join(random.Random(seed).uniform(0, 0.6))
    process.kill()
    process.join()
    finish(method, tmp_path / "run")
    assert identical(uninterrupted(method), tmp_path / "run")


def test_an_interrupt_stops_after_the_round_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", {"rounds": 150, "checkpoint_every": 1000, "evaluate_every": 0}
    arguments = ["run", "fedper", *pairs(**settings), "--quiet", "--out", str(folder)]
    process = start(arguments)
    while not (folder / "rounds.jsonl").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    assert 1 <= len(lines) < 150
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"round-{len(lines):06d}"]
    resumed = start(["run", "--resume", "--out", str(folder), "--quiet"])
    resumed.join()
    assert resumed.exitcode == 0
    execute(tmp_path / "whole", **settings)
    assert identical(tmp_path / "whole", folder)


def test_a_replacement_that_was_killed_can_be_repeated(tmp_path: Path, uninterrupted: Callable) -> None:
    """Killed after the old run was deleted and before the new one had its configuration."""
    execute(tmp_path / "run", "fedper", **SETTINGS | {"rounds": 2})
    killed = start(command("fedper", tmp_path / "run", "--force"), die_at=("replace", 3))
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    again = start(command("fedper", tmp_path / "run", "--force"))
    again.join()
    assert again.exitcode == 0
    assert identical(uninterrupted("fedper"), tmp_path / "run")

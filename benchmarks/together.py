"""Seeds of a method one after the other against together in one process, where their clients share stacks.

    python benchmarks/together.py [--device cuda] [--method NAME] [--network NAME] [--seeds N] [--rounds N]

The seconds are those of whole runs in this process, building and capturing included, without imports. Both ways are
taken in turns, and the best of a few repeats counts. The settings are those of PPFE's table 1: 10 of 100 clients a
round, 150 images each, batches of 10, 5 epochs; images are made up. A CPU stacks no convolutions, hence another
network there.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tailorfl.study.cells import Cell, Failure, Result, Way, run_cells
from tailorfl.study.config import configure

SETTINGS: dict[str, Any] = {
    "data": "synthetic",
    "image_size": 32,
    "clients": 100,
    "clients_per_round": 10,
    "samples_per_client": 150,
    "batch_size": 10,
    "local_epochs": 5,
    "lr": 0.01,
    "momentum": 0.5,
    "evaluate_every": 0,
}


class Nobody:
    """Who is told of rounds, and does not care."""

    def begun(self, cell: Cell) -> None: ...

    def round(self, cell: Cell, line: dict[str, Any]) -> None: ...

    def ended(self, cell: Cell, result: Result) -> None:
        if isinstance(result, Failure):
            raise SystemExit(result.reason)


def seconds(together: int, seeds: int, method: str, settings: dict[str, Any]) -> float:
    """Of all seeds, so many of them at a time."""
    with tempfile.TemporaryDirectory() as folder:
        cells = [
            Cell(f"seed {seed}", configure(method, {**settings, "seed": seed}), Path(folder) / str(seed))
            for seed in range(seeds)
        ]
        start = time.perf_counter()
        run_cells(cells, Way(together=together), Nobody(), lambda cell, result: None)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--network")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    network = given.network or ("ppfe-cnn" if given.device.startswith("cuda") else "linear")
    settings = {**SETTINGS, "network": network, "rounds": given.rounds, "device": given.device}
    seconds(1, 1, given.method, {**settings, "rounds": 2})  # imports, and whatever a device needs to wake up
    found: dict[int, list[float]] = {1: [], given.seeds: []}
    for _ in range(given.repeats):
        for together, taken in found.items():
            taken.append(seconds(together, given.seeds, given.method, settings))
    one, all_of_them = (min(taken) for taken in found.values())
    print(f"{given.method}, {network}, {given.rounds} rounds, {given.seeds} seeds on {given.device}")
    print(f"one after the other {one:.1f} s, together {all_of_them:.1f} s: {one / all_of_them:.1f} times as fast")


if __name__ == "__main__":
    main()

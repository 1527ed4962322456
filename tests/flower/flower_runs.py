"""Runs of an experiment in the simulator and on Flower, and what they leave behind."""

import json
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Context, RecordDict
from inline_grid import Answer, InlineGrid
from safetensors.torch import load_file
from torch import Tensor

from tailorfl.flower.server import serve
from tailorfl.study.config import Config, configure
from tailorfl.study.run import Run

SMALL = {
    "data": "digits",
    "clients": 4,
    "clients_per_round": 3,
    "rounds": 3,
    "evaluate_every": 1,
    "engine": "one-by-one",
    "stack_size": 1,  # as nodes compute, a client at a time
    "device": "cpu",
    "network_options": {"hidden": [16]},
}


def small(method: str, **settings: Any) -> Config:
    return configure(method, {**SMALL, **settings})


def grid_of(config: Config, folder: Path, answers: dict[int, Answer] | None = None, **options: Any) -> InlineGrid:
    """A federation of trial nodes 10, 11, ...: number 10 + k is client k."""
    clients = config.experiment.clients or sum(group.clients for group in config.experiment.groups)
    run_config = {
        "experiment": yaml.safe_dump(config.flat()),
        "out": str(folder / "flower"),
        "state": str(folder / "state"),
        "nodes": clients,
        **options,
    }
    return InlineGrid(run_config, {10 + k: {"partition": k} for k in range(clients)}, answers or {})


def serve_on(grid: InlineGrid) -> dict[str, Any] | None:
    return serve(grid, Context(1, 0, {}, RecordDict(), grid.run_config))


def simulate(config: Config, folder: Path) -> dict[str, Any]:
    summary = Run(config, folder / "simulated").execute()
    assert summary is not None
    return summary


def server_tensors(run: Path) -> dict[str, Tensor]:
    """What the server had after the last round."""
    return load_file(sorted((run / "checkpoints").iterdir())[-1] / "server.safetensors")


def client_tensors(run: Path) -> dict[str, Tensor]:
    """What the simulator's clients had, CLIENT/NAME."""
    folder = sorted((run / "checkpoints").iterdir())[-1]
    return {name: t for path in folder.glob("clients-*.safetensors") for name, t in load_file(path).items()}


def site_tensors(state: Path) -> dict[str, Tensor]:
    """What sites have on their disks, CLIENT/NAME."""
    found: dict[str, Tensor] = {}
    for client in sorted(next(state.iterdir()).iterdir()):
        files = sorted(client.glob("round-*.safetensors"))
        found |= (
            {f"{client.name.removeprefix('client-')}/{name}": t for name, t in load_file(files[-1]).items()}
            if files
            else {}
        )
    return found


def rounds_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]

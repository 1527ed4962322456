"""Small federations for the tests of methods."""

from pathlib import Path
from typing import Any

import torch

from tailorfl.federation.rounds import Round
from tailorfl.models.network import Values
from tailorfl.study.build import Built, build
from tailorfl.study.config import Config, configure
from tailorfl.study.run import Run

SMALL = {
    "data": "digits",
    "clients": 6,
    "clients_per_round": 4,
    "samples_per_client": 24,
    "rounds": 3,
    "evaluate_every": 1,
    "local_epochs": 1,
    "lr": 0.05,
    "network_options": {"hidden": [8]},
    "device": "cpu",
}
IMAGES = {
    "data": "synthetic",
    "partition": "natural",
    "image_size": 16,
    "samples": 12,
    "clients": 4,
    "network": "stride-cnn",
    "network_options": {"stages": 2, "width": 0.25},
    "samples_per_client": None,
}


def federation(method: str, **settings: Any) -> Built:
    return build(configure(method, {**SMALL, **settings}))


def run(built: Built, done: int = 0) -> list[Round]:
    return list(built.loop.run(done))


def state(built: Built) -> Values:
    """All that a run has learnt: the server's tensors and every client's."""
    server = {f"server/{name}": tensor for name, tensor in built.server.values.items()}
    return server | {f"state/{name}": t for name, t in built.server.state.items()} | built.federation.store.flat()


def differences(one: Values, other: Values) -> list[str]:
    """The names under which two runs differ, bit by bit."""
    names = dict.fromkeys([*one, *other])
    return [n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])]


def whole_and_resumed(config: Config, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summaries of a run in ``whole``, and of one in ``parted`` that was stopped after two rounds and resumed."""
    whole, parted = Run(config, folder / "whole"), Run(config, folder / "parted")
    seen: list[int] = []
    parted.watch = lambda line: seen.append(line["round"])
    parted.stop = lambda: len(seen) == 2
    summary = whole.execute()
    assert parted.execute() is None
    resumed = Run(config, folder / "parted").execute(resume=True)
    assert summary is not None
    assert resumed is not None
    return summary, resumed

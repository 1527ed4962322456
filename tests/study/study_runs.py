"""Small runs on disk for the tests of studies, in this process or in one that may be killed."""

import csv
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tailorfl.cli import main
from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.models.network import Values
from tailorfl.study import workers
from tailorfl.study.config import Config, configure
from tailorfl.study.run import Run

Said = tuple[int, str, str]
Tailor = Callable[..., Said]

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 5,
    "clients_per_round": 3,
    "samples_per_client": 20,
    "rounds": 3,
    "local_epochs": 1,
    "network_options": {"hidden": [8]},
    "device": "cpu",
}

processes = multiprocessing.get_context("forkserver")
# The slow imports of a run, once for all processes: what a run imports late is named here too.
LATE = (
    "tailorfl.study.tables",
    "tailorfl.study.reproduce",
    "tailorfl.study.workers",
    "sklearn.datasets",
    "torch._dynamo",
)
processes.set_forkserver_preload(["tailorfl.study.run", *LATE, "scipy.stats", "pyarrow.parquet"])


def small(method: str = "fedper", **settings: Any) -> Config:
    return configure(method, {**SMALL, **settings})


def pairs(**settings: Any) -> list[str]:
    """The same settings as the command takes them."""
    return [f"{key}={json.dumps(value)}" for key, value in {**SMALL, **settings}.items()]


def execute(folder: Path, method: str = "fedper", **settings: Any) -> dict[str, Any]:
    summary = Run(small(method, **settings), folder).execute()
    assert summary is not None
    return summary


def without_times(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith("seconds")}


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def clients(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open() as file:
        return list(csv.DictReader(file))


def results(folder: Path) -> dict[str, Any]:
    """All that a run found out, but not how long it took."""
    return {
        "rounds": [without_times(line) for line in rounds(folder)],
        "summary": without_times(json.loads((folder / "summary.json").read_text())),
        "clients": clients(folder),
    }


def tensors(folder: Path) -> Values:
    """The last checkpoint's."""
    found = newest_checkpoint(folder / "checkpoints", torch.device("cpu"))
    assert found is not None
    server = {f"server/{name}": tensor for name, tensor in found.server.values.items()}
    return server | {f"state/{name}": tensor for name, tensor in found.server.state.items()} | found.clients


def identical(one: Path, other: Path) -> bool:
    """Whether two runs ended alike, to the last bit."""
    mine, theirs = tensors(one), tensors(other)
    alike = mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    return alike and results(one) == results(other)


def start(arguments: list[str], die_at: tuple[str, int] | None = None) -> Any:
    """The command in a process of its own; it kills itself at the n-th call of a function of ``os``, if asked to."""
    process = processes.Process(target=_command, args=(arguments, die_at))
    process.start()
    return process


def _command(arguments: list[str], die_at: tuple[str, int] | None) -> None:
    torch.set_num_threads(1)
    workers.SPAWN = processes
    if die_at is not None:
        name, left = die_at
        real = getattr(os, name)

        def deadly(*given: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)

        setattr(os, name, deadly)
    sys.argv = ["tailor", *arguments]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (closed with the process)
    main()


def command(arguments: list[str], patch: pytest.MonkeyPatch, name: str = "reproduce") -> int:
    patch.setattr(sys, "argv", ["tailor", name, *arguments])
    root, package = logging.getLogger(), logging.getLogger("tailorfl")
    handlers, levels = list(root.handlers), (root.level, package.level)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        package.setLevel(levels[1])
    return int(ended.value.code or 0)

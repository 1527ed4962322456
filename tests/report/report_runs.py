"""Run folders written by hand, so that every number on a page is known."""

import csv
import json
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path,
    method: str = "fedavg",
    seed: int = 0,
    rounds: int = 3,
    planned: int | None = None,
    clients: int = 4,
    finished: bool = True,
    accuracy: float = 0.5,
    **settings: Any,
) -> Path:
    """A run whose accuracy grows by 0.01 a round from ``accuracy`` on, client k being 0.01 k above the mean."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"method": method, "data": "digits", "clients": clients, "rounds": planned or rounds, "seed": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, **settings}, sort_keys=False))
    lines = [round_line(number, accuracy) for number in range(1, rounds + 1)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        end = accuracy + 0.01 * rounds
        _write_clients(folder / "clients.csv", clients, end)
        (folder / "summary.json").write_text(json.dumps({**config, **summary(rounds, clients, end)}))
    return folder


def round_line(number: int, accuracy: float) -> dict[str, Any]:
    mean = accuracy + 0.01 * number
    return {
        "round": number,
        "loss": 1.0 / number,
        "personalized_accuracy": mean,
        "personalized_loss": 0.5,
        "global_accuracy": mean - 0.1,
        "accuracy_p10": mean - 0.05,
        "accuracy_p90": mean + 0.05,
        "bytes_up": 1000,
        "bytes_down": 2000,
        "seconds": 0.5,
        "seconds_evaluation": 0.25,
    }


def summary(rounds: int, clients: int, accuracy: float) -> dict[str, Any]:
    return {
        "personalized_accuracy": accuracy,
        "personalized_loss": 0.5,
        "personalized_accuracy_std": 0.02,
        "worst_decile_accuracy": accuracy - 0.1,
        "global_accuracy": accuracy - 0.1,
        "bytes_up": 1000 * rounds,
        "bytes_down": 2000 * rounds,
        "shared_parameters": 1234,
        "training_loss": 1.0 / rounds,
        "seconds_training": 0.5 * rounds,
        "seconds_evaluation": 0.25 * rounds,
    }


def _write_clients(path: Path, clients: int, accuracy: float) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "new", "train", "test", "accuracy", "loss", "global_accuracy"])
        middle = (clients - 1) / 2
        for client in range(clients):
            own = accuracy + 0.01 * (client - middle)
            writer.writerow([f"c{client}", 0, 30, 10, own, 0.5, own - 0.1])

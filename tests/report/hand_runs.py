"""Folders of runs whose every number is chosen by a test."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tailorfl.report.results import Entry, Results
from tailorfl.report.runs import read_run

Rows = Iterable[Sequence[Any]]

CLIENTS = ("client", "new", "train", "validation", "test", "accuracy", "loss", "global_accuracy", "joined")
CLASSES = ("client", "class", "train")
NOTES = ("round", "client", "name", "value")


def make_run(
    folder: Path,
    method: str = "fedavg",
    lines: Iterable[Mapping[str, Any]] = (),
    served: Iterable[Mapping[str, Any]] | None = None,
    classes: Rows = (),
    measures: Iterable[Mapping[str, Any]] = (),
    notes: Rows = (),
    summary: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """What is given, in the files that a run writes; no summary: it has not ended."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"method": method, "data": "digits", "seed": 0, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if served is not None:
        write_table(folder / "clients.csv", CLIENTS, [[row.get(name, "") for name in CLIENTS] for row in served])
    if rows := list(classes):
        write_table(folder / "classes.csv", CLASSES, rows)
    if measured := list(measures):
        write_table(folder / "measures.csv", tuple(measured[0]), [list(row.values()) for row in measured])
    if noted := list(notes):
        write_table(folder / "notes.csv", NOTES, noted)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_table(path: Path, head: Sequence[str], rows: Rows) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def line(number: int, accuracy: float | None = None, **figures: Any) -> dict[str, Any]:
    """A round; with an accuracy, one after which clients were evaluated."""
    tested = {} if accuracy is None else {"personalized_accuracy": accuracy, "personalized_loss": 1 - accuracy}
    return {"round": number, "loss": 1 / number, "bytes_up": 100, "bytes_down": 200, **tested, **figures}


def client(name: str, accuracy: Any, shared: Any = "", **columns: Any) -> dict[str, Any]:
    known = {"client": name, "new": 0, "train": 30, "validation": 0, "test": 10, "accuracy": accuracy, "loss": 0.5}
    return {**known, "global_accuracy": shared, "joined": 1, **columns}


def together(*entries: tuple[str, Sequence[Path]], panel: str = "") -> Results:
    """Runs under labels that a test gives them."""
    made = [Entry(label, tuple(read_run(folder) for folder in folders), panel) for label, folders in entries]
    return Results("by hand", "comparison", tuple(made))

"""A run on disk as plain values, also one that is still being written."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tailorfl.errors import UserError
from tailorfl.study.folder import CLASSES, CLIENTS, CONFIG, ERROR, MEASURES, NOTES, ROUNDS, SUMMARY

Notes = dict[int, dict[str, dict[str, float]]]  # round, client, name

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many runs are read again and again while one is watched
LARGEST = 1e100  # what is beyond it was not measured; sums and squares of such numbers are no longer finite
# Whether files that are links are read: for who has named a folder, not for somebody in a browser.
links_lead_on = ContextVar("links_lead_on", default=True)
NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")


@dataclass(frozen=True)
class ClientResult:
    """A row of ``clients.csv``; None where a figure does not exist."""

    name: str
    new: bool
    train: int
    test: int
    accuracy: float | None
    loss: float | None
    global_accuracy: float | None


@dataclass(frozen=True)
class ClassCounts:
    """Who has how many training rows of which class: [clients][classes]."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    train: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RunResult:
    """A run's folder; without a summary, and with fewer rounds, while it trains or where it was stopped."""

    folder: Path
    config: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    clients: list[ClientResult] = field(default_factory=list)
    classes: ClassCounts | None = None
    measures: list[dict[str, str]] = field(default_factory=list)  # round, client, and what a method measures
    notes: Notes = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    error: str = ""  # why it failed, in a line

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(number(self.config.get("seed")) or 0)

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def evaluated(self) -> list[dict[str, Any]]:
        """The lines of rounds after which clients were evaluated."""
        return [line for line in self.rounds if "personalized_loss" in line]

    @property
    def regression(self) -> bool:
        """Whether there are losses only."""
        last = self.evaluated[-1:] or ([self.summary] if self.summary else [])
        return bool(last) and all(number(line.get("personalized_accuracy")) is None for line in last)

    @property
    def figures(self) -> dict[str, Any]:
        """The summary, or what can be said so far."""
        if self.summary is not None:
            return self.summary
        said = self.evaluated[-1] if self.evaluated else {}
        return {
            **said,
            "method": self.method,
            "data": self.config.get("data"),
            "seed": self.seed,
            "rounds": len(self.rounds),
            **{key: self.total(key) for key in ("bytes_up", "bytes_down")},
            "seconds_training": self.total("seconds"),
            "seconds_evaluation": self.total("seconds_evaluation"),
        }

    def total(self, key: str) -> float:
        """A figure of the rounds, added up."""
        return sum(number(line.get(key)) or 0.0 for line in self.rounds)

    @property
    def served(self) -> list[ClientResult]:
        """The clients that take part in training; empty while the run goes on."""
        return [client for client in self.clients if not client.new]

    @cached_property
    def federation(self) -> tuple[Any, ...]:
        """What two runs have in common whose clients can be compared one by one; empty while it is not known."""
        return tuple((client.name, client.train, client.test) for client in self.served)

    def is_like(self, other: "RunResult") -> bool:
        """Whether the clients of both can be compared one by one."""
        return bool(self.federation) and self.seed == other.seed and self.federation == other.federation

    @property
    def planned(self) -> int:
        """Rounds to do; a run that was finished early, or by other means, has done all of its own."""
        return len(self.rounds) if self.finished else max(len(self.rounds), int(number(self.config.get("rounds")) or 0))


def groups_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """How well each group is served, by a summary or a line of the rounds; empty where there are no groups."""
    groups = figures.get("group_accuracies")
    found = {name: number(value) for name, value in groups.items()} if isinstance(groups, dict) else {}
    return {name: value for name, value in found.items() if value is not None}


def read_run(folder: Path) -> RunResult:
    """A run as far as it is written; a line that is being written is left out."""
    return RunResult(
        folder=folder,
        config=_read_config(folder / CONFIG),
        rounds=read_rounds(folder / ROUNDS),
        clients=_read_clients(folder / CLIENTS),
        classes=_read_classes(folder / CLASSES),
        measures=read_table(folder / MEASURES, ("round", "client")),
        notes=_read_notes(folder / NOTES),
        summary=_read_summary(folder / SUMMARY),
        error=read_error(folder / ERROR),
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        found = read_yaml(text_of(file))
    except ValueError as error:
        raise UserError(f"{file} is not YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("method"), str):
        raise UserError(f"{file} names no method; allowed: the folder of a run")
    return {str(key): value for key, value in found.items()}


def read_rounds(file: Path) -> list[dict[str, Any]]:
    """The lines of ``rounds.jsonl`` that are whole; none where it is not there yet."""
    if not file.is_file():
        return []
    lines = _bytes(file).split(b"\n")
    found = []
    for place, line in enumerate(lines[:-1], start=1):  # what follows the last line's end is empty, or half a line
        try:
            read = read_json(line)
        except ValueError as error:
            raise UserError(f"{file}, line {place}: not JSON; was the file changed?") from error
        at = number(read.get("round")) if isinstance(read, dict) else None
        if at is None:
            raise UserError(f"{file}, line {place}: no round; was the file changed?")
        found.append({**read, "round": int(at)})
    return found


def _read_summary(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found = read_json(text_of(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON; was it changed?") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no figures; was it changed?")
    return found


def read_error(file: Path) -> str:
    """Why a run failed, in a line; empty where it did not."""
    lines = [line.strip() for line in text_of(file).splitlines() if line.strip()] if file.is_file() else []
    return lines[-1] if lines else ""


def _read_clients(file: Path) -> list[ClientResult]:
    rows = read_table(file, ("client", "new", "train", "test", "accuracy", "loss"))
    return [
        ClientResult(
            row["client"],
            row["new"] == "1",
            int(number(row["train"]) or 0),
            int(number(row["test"]) or 0),
            number(row["accuracy"]),
            number(row["loss"]),
            number(row.get("global_accuracy")),
        )
        for row in rows
    ]


def _read_classes(file: Path) -> ClassCounts | None:
    counts: dict[str, Counter[str]] = {}
    for row in read_table(file, ("client", "class", "train")):
        counts.setdefault(row["client"], Counter())[row["class"]] += int(number(row["train"]) or 0)
    if not counts:
        return None
    classes = tuple(sorted({name for own in counts.values() for name in own}, key=natural))
    return ClassCounts(tuple(counts), classes, tuple(tuple(own[name] for name in classes) for own in counts.values()))


def _read_notes(file: Path) -> Notes:
    found: Notes = {}
    for row in read_table(file, ("round", "client", "name", "value")):
        value, at = number(row["value"]), number(row["round"])
        if value is not None and at is not None:
            found.setdefault(int(at), {}).setdefault(row["client"], {})[row["name"]] = value
    return found


def read_table(file: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """The whole rows of a CSV file; none where it is not there yet."""
    if not file.is_file():
        return []
    text = text_of(file)
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""), restkey="")
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.reader.line_num}: {error}; was it changed?") from error
    if missing and whole:
        raise UserError(f"{file} has no column {missing[0]}; was it changed?")
    return [row for row in rows if None not in row.values()]  # a name with a line's end in it may be cut there


def is_barred(file: Path) -> bool:
    """Whether it may lead to what the one who asks is not to see."""
    return not links_lead_on.get() and file.is_symlink()


def _bytes(file: Path) -> bytes:
    if is_barred(file):
        raise UserError(f"{file} is a link, which may lead anywhere; allowed: the file itself")
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def text_of(file: Path) -> str:
    """Of a file that may end within a letter."""
    data = _bytes(file)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.end == len(data):
            return data[: error.start].decode()
        raise UserError(f"{file} is not text; was it changed?") from error


def read_yaml(text: str) -> Any:
    """What it holds; ValueError, in one line, where it is none."""
    try:
        return yaml.load(text, LOADER)
    except (yaml.YAMLError, ValueError) as error:  # of a date that there is not, too
        raise ValueError(" ".join(str(error).split())) from error


def read_json(text: str | bytes) -> Any:
    """What it holds; numbers that nobody can have measured are None."""
    return json.loads(text, parse_constant=number, parse_float=number, parse_int=_whole)


def _whole(digits: str) -> int | None:
    return None if number(digits) is None else int(digits)


def number(value: Any) -> float | None:
    """A number that can be measured, or None for anything else: empty, null, words, infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < LARGEST else None


def natural(text: str) -> tuple[Any, ...]:
    """A key that sorts names with numbers in them as people do: 2 before 10, and 0.03 before 0.1."""
    parts = [part for part in NUMBER.split(text) if part]
    return tuple((0, float(part), part) if NUMBER.fullmatch(part) else (1, 0.0, part) for part in parts)

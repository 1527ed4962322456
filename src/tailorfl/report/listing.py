"""A folder of runs as a list: what each is, how far it came, and which belong together."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tailorfl.data.occupied import is_occupied
from tailorfl.errors import UserError
from tailorfl.report.results import read_asked, read_options
from tailorfl.report.runs import is_barred, number, read_table, read_yaml, text_of
from tailorfl.report.tables import Cell, Head, Table, figure, word
from tailorfl.study.folder import CLASSES, CLIENTS, CONFIG, ERROR, MEASURES, NOTES, ROUNDS, SUMMARY
from tailorfl.study.tables import number as as_number
from tailorfl.study.tables import percent
from tailorfl.study.tidy import ASKED, RESULTS, told_by

MAIN = (CONFIG, ROUNDS, SUMMARY)
FILES = (*MAIN, CLIENTS, CLASSES, MEASURES, NOTES, ERROR)  # that are read of a run
MOST = 6  # methods that are named of a folder
LAST = 65536  # bytes of a file in which its last line is looked for


Stamps = tuple[tuple[int, int] | None, ...]  # of files: when changed, and how large


@dataclass(frozen=True)
class State:
    """What a run's files look like from outside, and whether a command works there."""

    stamps: Stamps  # of FILES
    trains: bool

    @property
    def changed(self) -> float:
        """When one of the files that are always there last was, in seconds."""
        return max((stamp[0] / 1e9 for stamp in self.stamps[: len(MAIN)] if stamp), default=0.0)

    @property
    def word(self) -> str:
        """Of a run that has not come to its end."""
        return "training" if self.trains else "failed" if self.stamps[FILES.index(ERROR)] else "stopped"


def state_of(folder: Path) -> State:
    stamps = stamps_of(folder / name for name in FILES)
    return State(stamps, stamps[FILES.index(SUMMARY)] is None and is_occupied(folder))


def stamps_of(files: Iterable[Path]) -> Stamps:
    return tuple(map(_stamp, files))


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def list_runs(root: Path, runs: Mapping[Path, State]) -> dict[str, Any]:
    """The runs below a folder, and the folders that hold several of them: comparisons, sweeps, studies."""
    return {
        "title": title_of(root),
        "runs": asdict(_runs(root, runs)),
        "folders": asdict(_folders(root, runs)),
        "settings": _settings(root, runs),
    }


def title_of(root: Path) -> str:
    """By the folder's own name, also where it is named as the current one."""
    return f"Runs: {Path(os.path.abspath(root)).name or root}"


RUN_HEADS = (
    Head("run", words=True),
    Head("method", words=True),
    Head("data", words=True),
    Head("clients"),
    Head("seed"),
    Head("state", "done, training now, failed, or stopped", words=True),
    Head("rounds", "done, of those to do"),
    Head("accuracy", "of the clients' own models at the last evaluation, in %"),
    Head("test loss", "of the same models"),
    Head("training loss", "of the last round"),
    Head("last change"),
)


def _runs(root: Path, runs: Mapping[Path, State]) -> Table:
    rows = tuple((word(run.relative_to(root).as_posix()), *_row(run, state)) for run, state in runs.items())
    return Table("runs", "Runs", "", RUN_HEADS, rows)


@lru_cache(maxsize=4096)  # of many runs few change from one look to the next
def _row(folder: Path, state: State) -> tuple[Cell, ...]:
    """What is shown of it beside its name."""
    config, summary, lines = _mapping(folder / CONFIG), _mapping(folder / SUMMARY), last_lines(folder / ROUNDS)
    planned, done = (int(number(of.get(key)) or 0) for of, key in ((config, "rounds"), (lines[-1], "round")))
    tested = summary or next((line for line in reversed(lines) if "personalized_loss" in line), {})
    return (
        word(config.get("method", "")),
        word(config.get("data", "")),
        _whole(summary.get("clients", config.get("clients"))),
        _whole(config.get("seed")),
        word("done" if summary else state.word),
        Cell(str(done) if summary else f"{done} of {planned}", done),
        figure(number(tested.get("personalized_accuracy")), percent),
        figure(number(tested.get("personalized_loss")), as_number),
        figure(number(lines[-1].get("loss")), as_number),
        Cell("", state.changed),  # in the browser's own time
    )


def _settings(root: Path, runs: Mapping[Path, State]) -> dict[str, Any]:
    """By which runs are found beside what is shown of them: what all have alike, and what each has of its own."""
    found = {run.relative_to(root).as_posix(): _words(run, state) for run, state in runs.items()}
    alike = frozenset[str]().union(*found.values()).intersection(*found.values())
    return {"alike": sorted(alike), "own": {name: sorted(words - alike) for name, words in found.items()}}


@lru_cache(maxsize=4096)
def _words(folder: Path, state: State) -> frozenset[str]:
    """Its settings as they are typed, without spaces, for those part the words of a filter."""
    return frozenset(f"{key}={_typed(value)}" for key, value in _mapping(folder / CONFIG).items())


def _typed(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value).replace("'", "")
    return "".join(text.split()).lower()


def _whole(value: Any) -> Cell:
    found = number(value)
    return Cell("-" if found is None else f"{found:.0f}", found)


def _folders(root: Path, runs: Mapping[Path, State]) -> Table:
    """The folders of commands with several runs, also where all but one of them are missing, by name.

    Parts of what a command wrote are not listed.
    """
    held: dict[Path, list[Path]] = {}
    for run in runs:
        for parent in run.parents:
            if root in parent.parents:
                held.setdefault(parent, []).append(run)
    studies = {folder: _study(folder) for folder in held}
    asked = {folder for folder in held if (folder / ASKED).is_file()}
    written = asked | {folder for folder in held if studies[folder] or (folder / RESULTS).is_file()}
    rows = tuple(
        (
            word(folder.relative_to(root).as_posix()),
            *map(word, _what(folder, studies[folder], {run: runs[run] for run in held[folder]})),
            Cell(str(len(held[folder])), len(held[folder])),
            Cell("", max(runs[run].changed for run in held[folder])),
        )
        for folder in sorted(held)
        if (len(held[folder]) > 1 or folder in asked) and written.isdisjoint(folder.parents)
    )
    words = (Head(name, words=True) for name in ("folder", "what", "methods", "data"))
    heads = (*words, Head("runs"), Head("last change"))
    return Table("folders", "Comparisons, sweeps and studies", "", heads, rows)


def _study(folder: Path) -> str:
    """The name of the study that is there; of one that cannot be read, too, the others are listed."""
    try:
        return str(read_options(folder).get("study", ""))
    except UserError:
        return ""


def _what(folder: Path, study: str, runs: Mapping[Path, State]) -> tuple[str, str, str]:
    """Of what a command wrote there its kind, or the study's name, the methods, and the data.

    What was asked for says it, or the table. Where neither is there, runs say what they are themselves.
    """
    try:
        rows, asked = read_table(folder / RESULTS, ()), read_asked(folder)
    except UserError:  # none of ours
        rows, asked = [], {}
    swept = "values" in asked if asked else told_by(rows) != ["method"]
    kind = "" if not (rows or asked) else "sweep" if swept else "comparison"
    said = rows or [_of_run(run, state) for run, state in runs.items()]
    methods, data = (list(dict.fromkeys(row[key] for row in said if row.get(key))) for key in ("method", "data"))
    return study or kind, _some(asked.get("methods") or methods), _some(data)


def _of_run(run: Path, state: State) -> dict[str, str]:
    return {head.name: cell.text for head, cell in zip(RUN_HEADS[1:], _row(run, state), strict=True)}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def last_lines(file: Path) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON lines, without reading all of it; at least one, which may be empty."""
    found, most = list[Any](), LAST
    if is_barred(file):
        return [{}]
    try:
        with file.open("rb") as opened:
            size = start = opened.seek(0, os.SEEK_END)
            while start and not found:  # a line may be longer than what was read of it
                start = opened.seek(max(0, size - most))
                lines = opened.read().split(b"\n")[:-1]
                found = [json.loads(line) for line in lines[1 if start else 0 :]]  # the first is cut then
                most *= 4
    except (OSError, ValueError):
        found = []
    return [line for line in found if isinstance(line, dict)] or [{}]


def _mapping(file: Path) -> dict[str, Any]:
    """Of a JSON or YAML file; empty where it is not there or is being written."""
    try:
        text = text_of(file)
        found = json.loads(text) if file.suffix == ".json" else read_yaml(text)
    except (UserError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

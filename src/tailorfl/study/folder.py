"""What a run leaves in its folder, by name, and how a folder is told to be a run's."""

import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tailorfl.data.occupied import occupied
from tailorfl.errors import UserError

CONFIG, ROUNDS, CLIENTS, SUMMARY = "config.yaml", "rounds.jsonl", "clients.csv", "summary.json"
CLASSES = "classes.csv"  # only where clients are simulated and tell classes apart: who has how much of which
MEASURES = "measures.csv"  # only where a method measures something of its own
NOTES = "notes.csv"  # only where a method writes something down of the clients of a round
PARTITION, CHECKPOINTS, EXPORTS = "partition.safetensors", "checkpoints", "export"
ERROR = (
    "error.txt"  # only of several runs, where one failed: why, and what happened if it is the code's or the machine's
)
# Only where a run was logged elsewhere too: event files, which of MLflow's runs it is, and MLflow's own store.
TENSORBOARD, MLFLOW, MLFLOW_STORE = "tensorboard", "mlflow.json", "mlflow.db"
PAGE = "report.html"  # only at the end, where the extra for it is installed
FEDERATION = "federation"  # a folder; only where clients live on other machines: what the server knows of them


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, a dictionary each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def called(folder: Path) -> str:
    """The name of a run: that of its folder; where that is only a seed's, with those above it."""
    parts = folder.resolve().parts
    return "/".join(parts[-3:] if parts[-1].startswith("seed-") else parts[-1:])


def runs_in(folder: Path) -> list[Path]:
    """The runs of a study or of one of its parts, by name."""
    return sorted(file.parent for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/{CONFIG}"))


def is_free(folder: Path) -> bool:
    """Nothing is there, or only what a run leaves that is killed while it begins."""
    beginnings = (PARTITION, f".{PARTITION}.", CLASSES, f".{CLASSES}.", f".{CONFIG}.", FEDERATION, ERROR)
    return not folder.exists() or (
        folder.is_dir() and all(path.name.startswith(beginnings) for path in folder.iterdir())
    )


def clear(folder: Path, error: bool = True) -> None:
    """Delete what a run wrote; its configuration last, because without it the folder is not known for a run."""
    for part in (CHECKPOINTS, EXPORTS, TENSORBOARD):
        shutil.rmtree(folder / part, ignore_errors=True)
    beside, results = (PAGE, MLFLOW, MLFLOW_STORE), (ROUNDS, MEASURES, NOTES, CLIENTS, SUMMARY)
    for name in (*((ERROR,) if error else ()), *beside, *results, CLASSES, PARTITION, CONFIG):
        (folder / name).unlink(missing_ok=True)


def remove(run: Path, above: Path) -> None:
    """Delete what a run wrote, and the folders below this one that are empty then."""
    with occupied(run):
        clear(run)
    for emptied in (run, *run.parents):
        if emptied == above or any(emptied.iterdir()):
            break
        emptied.rmdir()


def take_away(runs: Collection[Path], files: Iterable[str], above: Path, again: Collection[Path]) -> None:
    """Delete runs below a folder, and files in it that were made of them; the folders of those to come ``again`` stay.

    These are about to be run here, and may be locked by who runs them.
    """
    for run in runs:
        if run in again:
            clear(run, error=False)  # one of this time, which has failed already: it takes away that of the last itself
        else:
            remove(run, above)
    for name in files:
        (above / name).unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Refuse a folder that this user cannot write to, before anything is computed."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written: {existing} is {_why(existing)}; allowed: another --out")


def _why(path: Path) -> str:
    return "read-only for this user" if path.is_dir() else "not a folder"

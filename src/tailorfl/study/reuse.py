"""Finished runs that lie elsewhere: a cell with the same settings takes one over, and trains nothing."""

import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tailorfl.errors import UserError
from tailorfl.study.cells import Cell
from tailorfl.study.config import Config, read_config
from tailorfl.study.folder import CONFIG, ERROR, MLFLOW, MLFLOW_STORE, PAGE, SUMMARY, TENSORBOARD, is_free
from tailorfl.study.run import MAY_CHANGE

log = logging.getLogger(__name__)

OF_ITS_OWN = (ERROR, PAGE, MLFLOW, MLFLOW_STORE, TENSORBOARD)  # of a run where it was made


def check_places(places: Iterable[Path]) -> None:
    """Refuse what is no folder, before anything runs."""
    for place in places:
        if not place.is_dir():
            raise UserError(f"--reuse {place}: no such folder; allowed: one with finished runs below it")


def take_over(cells: Sequence[Cell], places: Sequence[Path]) -> None:
    """Give the cells that have no run yet a copy of one from below these places, where there is one."""
    there = {_key(config): run for place in places for run, config in _finished(place)}
    for cell in cells:
        run = there.get(_key(cell.config))
        if run is not None and is_free(cell.folder):
            _copy(run, cell.folder)
            log.info("%s: taken over from %s", cell.title, run)


def _finished(place: Path) -> Iterable[tuple[Path, Config]]:
    for summary in sorted(place.rglob(SUMMARY)):
        try:
            yield summary.parent, read_config(summary.parent / CONFIG)
        except (UserError, OSError):  # of another version, of a method that is not installed, or no run
            continue


def _key(config: Config) -> str:
    """All that a run depends on, but not where it is computed."""
    return json.dumps({key: value for key, value in config.flat().items() if key not in MAY_CHANGE}, sort_keys=True)


def _copy(run: Path, folder: Path) -> None:
    """Whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=folder.parent) as room:
        copy = Path(room) / folder.name
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(*OF_ITS_OWN))
        if folder.exists():  # with nothing but the beginnings of a run in it
            shutil.rmtree(folder)
        copy.rename(folder)

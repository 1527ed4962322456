"""The cells of a study: runs that stand by themselves, one after the other or side by side."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tailorfl.data.atomic import whole_file
from tailorfl.errors import UserError, in_a_line
from tailorfl.study.config import Config
from tailorfl.study.loggers import Logs
from tailorfl.study.run import ERROR, SUMMARY, Run


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a study."""

    title: str
    config: Config
    folder: Path


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result, in one line."""

    reason: str
    refused: bool = False  # the user's to put right: a wrong value, data that is missing


@dataclass(frozen=True)
class Way:
    """How the cells of a study are run."""

    data_dir: Path | None = None
    resume: bool = False
    force: bool = False
    jobs: int = 1  # side by side
    loggers: tuple[str, ...] = ()


Result = dict[str, Any] | Failure  # a summary, or why there is none
Ended = Callable[[Cell, Result], None]
Stop = Callable[[], bool]


class Watch(Protocol):
    """Who is told what happens."""

    def begun(self, cell: Cell) -> None: ...

    def round(self, cell: Cell, line: dict[str, Any]) -> None: ...

    def ended(self, cell: Cell, result: Result) -> None: ...


def run_cells(cells: Sequence[Cell], way: Way, watch: Watch, ended: Ended, stop: Stop = bool) -> bool:
    """Run every cell, or take it as it is where it is finished; False if it was stopped before all had ended.

    A cell that fails does not keep the others from running. ``ended`` is given each result as it comes.
    """

    def end(cell: Cell, result: Result) -> None:
        watch.ended(cell, result)
        ended(cell, result)

    kept = finished(cells, way)
    for cell in kept:
        result = execute(cell, way)
        assert result is not None
        end(cell, result)
    left = [cell for cell in cells if cell not in kept]
    if way.jobs == 1 or len(left) < 2:
        return _one_by_one(left, way, watch, end, stop)
    from tailorfl.study.workers import side_by_side

    return side_by_side(left, way, watch, end, stop)


def finished(cells: Sequence[Cell], way: Way) -> list[Cell]:
    """Those that a study which goes on takes as they are."""
    return [cell for cell in cells if way.resume and (cell.folder / SUMMARY).is_file()]


def _one_by_one(cells: Sequence[Cell], way: Way, watch: Watch, end: Ended, stop: Stop) -> bool:
    for cell in cells:
        if stop():
            return False
        watch.begun(cell)
        result = execute(cell, way, partial(watch.round, cell), stop)
        if result is None:
            return False
        end(cell, result)
    return True


def execute(
    cell: Cell, way: Way, watch: Callable[[dict[str, Any]], None] = lambda line: None, stop: Stop = bool
) -> Result | None:
    """One cell in this process: its summary, why there is none, or None if it was stopped."""
    error = cell.folder / ERROR
    with suppress(OSError):
        error.unlink()  # of the last attempt
    try:
        with Logs(way.loggers, cell.config, cell.folder, way.resume, watch) as logs:
            summary = Run(cell.config, cell.folder, way.data_dir, logs, stop).execute(way.resume, way.force)
            logs.end(summary)
            return summary
    except UserError as problem:
        return Failure(str(problem), refused=True)
    except OSError as problem:  # a full disk, a file that may not be read
        keep_error(error, traceback.format_exc())
        return Failure(in_a_line(problem), refused=True)
    except (Exception, SystemExit) as problem:  # of the code, a plug-in or the machine: the other cells go on
        said = " ".join(str(problem).split())
        kept = keep_error(error, traceback.format_exc())
        return Failure(f"{type(problem).__name__}: {said}{f' (see {error})' if kept else ''}")


def keep_error(path: Path, text: str) -> bool:
    """Why a run failed, in its folder; False where not even that can be written."""
    try:
        with whole_file(path) as temporary:
            temporary.write_text(text)
    except OSError:  # the disk may be what failed
        return False
    return True


def check_folders(cells: Sequence[Cell], way: Way) -> None:
    """Refuse what would lose or mix something, before anything is computed."""
    for cell in cells:
        Run(cell.config, cell.folder).check_folder(way.resume, way.force)

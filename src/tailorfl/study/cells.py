"""The cells of a study: runs that stand by themselves, one after the other, side by side, or together."""

import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from tailorfl.data.atomic import whole_file
from tailorfl.errors import UserError, in_a_line
from tailorfl.federation.in_process import InProcess
from tailorfl.study.config import Config
from tailorfl.study.folder import ERROR, SUMMARY
from tailorfl.study.loggers import Logs
from tailorfl.study.run import Run


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
    together: int = 1  # in each of them at a time
    loggers: tuple[str, ...] = ()
    reuse: tuple[Path, ...] = ()  # below which finished runs are looked for


Result = dict[str, Any] | Failure  # a summary, or why there is none
Ended = Callable[[Cell, Result], None]
Told = Callable[[Cell, dict[str, Any]], None]  # a line of ``rounds.jsonl``
Stop = Callable[[], bool]
Replace = Callable[[], None]  # takes away what the cells replace, before the first of them writes anything
Batch = tuple[Cell, ...]  # that run at a time in one process


class Watch(Protocol):
    """Who is told what happens."""

    def begun(self, cell: Cell) -> None: ...

    def round(self, cell: Cell, line: dict[str, Any]) -> None: ...

    def ended(self, cell: Cell, result: Result) -> None: ...


def run_cells(
    cells: Sequence[Cell], way: Way, watch: Watch, ended: Ended, stop: Stop = bool, replace: Replace | None = None
) -> bool:
    """Run every cell, or take it as it is where it is finished; False if it was stopped before all had ended.

    A cell that fails does not keep the others from running. ``ended`` is given each result as it comes. ``replace`` is
    called once, when the first of them is ready to train: where none can run, nothing that was there is lost.
    """

    def end(cell: Cell, result: Result) -> None:
        watch.ended(cell, result)
        ended(cell, result)

    once = cache(replace) if replace else None

    if way.reuse:
        from tailorfl.study.reuse import take_over

        take_over(cells, way.reuse)
    kept = finished(cells, way)
    for cell in kept:
        result = execute(cell, changed(way, resume=True))
        assert result is not None
        end(cell, result)
    batches = in_batches([cell for cell in cells if cell not in kept], way.together)
    if way.jobs == 1 or len(batches) < 2:
        return _one_by_one(batches, way, watch, end, stop, once)
    from tailorfl.study.workers import side_by_side

    return side_by_side(batches, way, watch, end, stop, once)


def finished(cells: Sequence[Cell], way: Way) -> list[Cell]:
    """Those that are taken as they are: of a study that goes on, or from elsewhere."""
    return [cell for cell in cells if (way.resume or way.reuse) and (cell.folder / SUMMARY).is_file()]


def in_batches(cells: Sequence[Cell], together: int) -> list[Batch]:
    """Cells that run at a time; where several do, those of the same method and data beside each other."""
    if together == 1:
        return [(cell,) for cell in cells]
    alike: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        experiment = cell.config.experiment
        alike.setdefault((repr(cell.config.method), experiment.network, experiment.data), []).append(cell)
    ordered = [cell for group in alike.values() for cell in group]
    return [tuple(ordered[start : start + together]) for start in range(0, len(ordered), together)]


def _one_by_one(
    batches: Sequence[Batch], way: Way, watch: Watch, end: Ended, stop: Stop, replace: Replace | None
) -> bool:
    for batch in batches:
        if stop():
            return False
        for cell in batch:
            watch.begun(cell)
        if not execute_batch(batch, way, watch.round, end, stop, replace):
            return False
    return True


def execute_batch(batch: Batch, way: Way, watch: Told, end: Ended, stop: Stop, replace: Replace | None = None) -> bool:
    """The cells of a batch, at a time; False if it was stopped before all had ended."""
    if len(batch) > 1:
        from tailorfl.study.together import run_together

        return run_together(batch, way, watch, end, stop, replace)
    result = execute(batch[0], way, partial(watch, batch[0]), stop, replace=replace)
    if result is not None:
        end(batch[0], result)
    return result is not None


def execute(
    cell: Cell,
    way: Way,
    watch: Callable[[dict[str, Any]], None] = lambda line: None,
    stop: Stop = bool,
    where: Callable[..., InProcess] = InProcess,
    replace: Replace | None = None,
) -> Result | None:
    """One cell in this process: its summary, why there is none, or None if it was stopped."""
    error = cell.folder / ERROR
    with suppress(OSError):
        error.unlink()  # of the last attempt
    try:
        with Logs(way.loggers, cell.config, cell.folder, way.resume, watch) as logs:
            run = Run(cell.config, cell.folder, way.data_dir, logs, stop, where=where, replace=replace)
            summary = run.execute(way.resume, way.force)
            logs.end(summary)
            return summary
    except UserError as problem:
        return Failure(str(problem), refused=True)
    except OSError as problem:  # a full disk, a file that may not be read
        keep_error(error, traceback.format_exc())
        return Failure(in_a_line(problem), refused=True)
    except (Exception, SystemExit) as problem:  # of the code, a plug-in or the machine: the other cells go on
        if isinstance(problem.__context__, BrokenPipeError):  # nobody reads what is printed: the command ends
            raise
        said = " ".join(str(problem).split())
        kept = keep_error(error, traceback.format_exc())
        return Failure(f"{type(problem).__name__}: {said}{f' (see {error})' if kept else ''}")


def check_some_ran(failures: Collection[Failure], cells: int) -> None:
    """Where all cells are refused for one reason, that is an error in what was asked for."""
    reasons = {failure.reason for failure in failures if failure.refused}
    if len(failures) == cells and len(reasons) == 1 and all(failure.refused for failure in failures):
        raise UserError(reasons.pop())


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

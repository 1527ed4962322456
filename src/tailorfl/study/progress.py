"""What a person sees while runs are under way: live bars on a terminal, a line now and then elsewhere."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from tailorfl.study.cells import Cell, Failure, Result

WIDE = 120  # letters on a line that take a whole bar
SILENCE = 60.0  # seconds after which a round is told though clients were not tested after it
ENOUGH = 2  # rounds after the first, by which the others can be judged
UNKNOWN = "-:--:--"


def bars(console: Console) -> Progress:
    """A bar a run: title, rounds, the time that it took and that is left, and the last figures.

    These are cut on a narrow terminal, and not the rest.
    """
    narrow = console.width < WIDE
    clock = Column(no_wrap=True, min_width=7)
    return Progress(
        TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, ratio=2)),
        BarColumn(bar_width=8 if narrow else 30),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(table_column=clock),
        TextColumn("{task.fields[left]}", style="progress.remaining", table_column=clock),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, ratio=3)),
        expand=narrow,
        console=console,
        disable=not console.is_terminal,
    )


def add_bar(progress: Progress, title: str, rounds: int) -> TaskID:
    return progress.add_task(title, total=rounds, figures="", left=UNKNOWN)


class Figures:
    """What is said of a run after a round: its training loss, and how clients were served at the last evaluation."""

    def __init__(self) -> None:
        self.evaluated = ""

    def __call__(self, line: dict[str, Any]) -> str:
        if "personalized_loss" in line:
            self.evaluated = _tested(line["personalized_accuracy"], line["personalized_loss"])
        loss = "-" if line["loss"] is None else f"{line['loss']:.4g}"
        return f"training loss {loss}{self.evaluated}"


def _tested(accuracy: float | None, loss: float | None) -> str:
    if accuracy is not None:
        return f", accuracy {100 * accuracy:.2f} %"
    return "" if loss is None else f", test loss {loss:.4g}"


@dataclass
class _Running:
    """A run under way: since when, from which round on, how far it is, and when something was said of it."""

    title: str
    rounds: int
    begun: float
    task: TaskID
    figures: Figures = field(default_factory=Figures)
    first: int | None = None  # one that is resumed has done some before
    ready: float = 0.0  # when the first round had ended
    number: int = 0
    latest: float = 0.0  # when the last round had ended
    told: float = field(init=False)

    def __post_init__(self) -> None:
        self.told = self.begun

    def reached(self, number: int, now: float) -> None:
        if self.first is None:
            self.first, self.ready = number, now
        self.number, self.latest = number, now

    @property
    def pace(self) -> float | None:
        """Seconds a round, without the first: before it has ended, processes start and programs are traced."""
        after = self.number - (self.first or 0)
        return (self.latest - self.ready) / after if self.first is not None and after >= ENOUGH else None

    @property
    def rest(self) -> float | None:
        """How many seconds were left when the last round had ended: they do not grow while one is waited for."""
        return None if self.pace is None else self.pace * (self.rounds - self.number)

    @property
    def whole(self) -> float | None:
        """How many seconds such a run takes from its start to its end, also if this one is resumed."""
        return None if self.pace is None else self.ready - self.begun + self.pace * (self.rounds - 1)

    @property
    def left(self) -> str:
        """The rest for a bar."""
        return UNKNOWN if self.rest is None else str(timedelta(seconds=round(self.rest)))

    def said(self, line: dict[str, Any], figures: str, left: str, now: float) -> str | None:
        """A line on this round where there is no terminal: on evaluations, and after a silence with the time left."""
        tested = "personalized_loss" in line
        if not tested and now - self.told < SILENCE:
            return None
        self.told = now
        return f"{self.title}: round {line['round']} of {self.rounds}, {figures}{'' if tested else left}"


class RunProgress:
    """Shows the rounds of one run; a context manager."""

    def __init__(self, console: Console, title: str, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.live, self.clock = console, bars(console), clock
        self.run = _Running(title, rounds, clock(), add_bar(self.live, title, rounds))

    def __enter__(self) -> "RunProgress":
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def __call__(self, line: dict[str, Any]) -> None:
        """A round has ended; ``line`` is what is written of it."""
        run, now = self.run, self.clock()
        run.reached(line["round"], now)
        figures = run.figures(line)
        self.live.update(run.task, completed=line["round"], figures=figures, left=run.left)
        if self.console.is_terminal:
            return
        left = f"; about {in_words(run.rest)} left" if run.rest else ""
        said = run.said(line, figures, left, now)
        if said is not None:
            self.console.print(said, highlight=False, markup=False, soft_wrap=True)


class CellsProgress:
    """Shows the cells of a study: a bar for each that runs, how many are done, and the time left; a context manager.

    Nothing is printed before one of them has come to a round or is done: where all are refused alike, the command has
    one line to say.
    """

    def __init__(
        self, console: Console, cells: Sequence[Cell], at_once: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.clock, self.at_once = console, clock, at_once
        self.waiting, self.of = list(cells), len(cells)
        self.running: dict[Cell, _Running] = {}
        self.seconds: dict[tuple[str, str], list[float]] = {}  # by method and data: what cells took
        self.done, self.failed, self.reasons = 0, 0, set[str]()
        self.bars, self.held, self.silent = bars(console), list[str](), True
        self.live = Live(self, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> "CellsProgress":
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def __rich__(self) -> ConsoleRenderable:
        counts = f"{self.done} done, {self.failed} failed, {len(self.waiting) + len(self.running)} left"
        return Group(self.bars, Text(f"{counts}{self.left()}"))

    def begun(self, cell: Cell) -> None:
        self.waiting.remove(cell)
        rounds = cell.config.experiment.rounds
        self.running[cell] = _Running(cell.title, rounds, self.clock(), add_bar(self.bars, cell.title, rounds))
        self._say(f"cell {self.of - len(self.waiting)} of {self.of}: {cell.title}{self.left()}")

    def round(self, cell: Cell, line: dict[str, Any]) -> None:
        run = self.running[cell]
        run.reached(line["round"], self.clock())
        figures = run.figures(line)
        self.bars.update(run.task, completed=line["round"], figures=figures, left=run.left)
        self._speak()
        said = None if self.console.is_terminal else run.said(line, figures, self.left(), self.clock())
        if said is not None:
            self._say(said)

    def ended(self, cell: Cell, result: Result) -> None:
        run = self.running.pop(cell, None)
        if run is None:  # it was finished before
            self.waiting.remove(cell)
        else:
            self.bars.remove_task(run.task)
        if isinstance(result, Failure):
            self.failed += 1
            self._say(f"failed: {cell.title}: {'as before' if result.reason in self.reasons else result.reason}")
            self.reasons.add(result.reason)
            return
        self.done += 1
        self._speak()
        if run is not None and (seconds := run.whole if run.first != 1 else self.clock() - run.begun):
            self.seconds.setdefault(_like(cell), []).append(seconds)

    def left(self) -> str:
        """How long the rest may take: as long as cells of the same method and data, or any, took so far."""
        # Copies: the thread that draws asks too, while cells begin and end.
        now, waiting, running = self.clock(), list(self.waiting), dict(self.running)
        took = {like: list(seconds) for like, seconds in list(self.seconds.items())}
        for cell, run in running.items():
            if run.whole is not None:
                took.setdefault(_like(cell), []).append(run.whole)
        every = [seconds for found in took.values() for seconds in found]
        if not every or not (waiting or running):
            return ""

        def usual(cell: Cell) -> float:
            return fmean(took.get(_like(cell), every))

        rests = [usual(cell) for cell in waiting]
        for cell, run in running.items():
            rests.append(max(0.0, usual(cell) - (now - run.begun)) if run.rest is None else run.rest)
        return f"; about {in_words(max(sum(rests) / self.at_once, *rests))} left"

    def _speak(self) -> None:
        """Say what was held back, and from now on everything."""
        self.silent = False
        for line in self.held:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        self.held = []

    def _say(self, line: str) -> None:
        self.held.append(line)
        if not self.silent:
            self._speak()


def _like(cell: Cell) -> tuple[str, str]:
    return cell.config.method_name, cell.config.experiment.data


def in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class StopOnInterrupt:
    """Turns the first Ctrl-C into a wish to stop after the round; the second one stops at once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.wanted = False

    def __enter__(self) -> "StopOnInterrupt":
        self.before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            self.console.print("stopped at once; --resume goes on from the last checkpoints")
            raise KeyboardInterrupt
        self.wanted = True
        self.console.print("stopping after this round; once more to stop at once")

"""Several runs at a time in one process: they take turns, and clients that they train alike share a stack."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tailorfl.cohort import Engine
from tailorfl.cohort.joining import Handed, Joiner
from tailorfl.cohort.training import Training
from tailorfl.federation.in_process import InProcess
from tailorfl.study.cells import Cell, Ended, Replace, Result, Stop, Told, Way, execute

PATIENCE = 10.0  # seconds for runs to end where the command does


def run_together(
    cells: Sequence[Cell], way: Way, watch: Told, ended: Ended, stop: Stop, replace: Replace | None = None
) -> bool:
    """Run these cells at the same time; False if they were stopped before all had ended."""
    meeting = _Meeting(len(cells))
    results: list[Result | None] = []

    def attend(number: int, cell: Cell) -> None:
        result = execute(cell, way, partial(watch, cell), stop, partial(meeting.place, number), replace)
        results.append(result)
        if result is not None:
            ended(cell, result)

    with _titled({cell.title for cell in cells}):
        for number, cell in enumerate(cells):
            meeting.invite(cell.title, partial(attend, number, cell))
        meeting.hold()
    return None not in results


class _Over(BaseException):
    """Ends a run at once: no failure of its own, after which others would go on."""


@dataclass(eq=False)
class _Request(Handed):
    """What a run has handed over, and waits for."""

    number: int = 0  # of the run
    done: threading.Event = field(default_factory=threading.Event)


class _Meeting:
    """Where runs hand over what they train. When all of them wait, all of it is trained, and they go on.

    Of the runs one works at a time, so that they disturb each other as little as runs one after the other.
    """

    def __init__(self, members: int) -> None:
        self.members = members  # that have not ended
        self.floor = threading.Lock()  # of whom works
        self.change = threading.Condition()
        self.requests: list[_Request] = []
        self.failure: BaseException | None = None
        self.over = False
        self.threads: list[threading.Thread] = []
        self.joiner = Joiner()

    # What runs do, each in a thread.

    def invite(self, title: str, attend: Callable[[], None]) -> None:
        threads = torch.get_num_threads()

        def work() -> None:
            with self.floor:
                try:
                    torch.set_num_threads(threads)
                    attend()
                except BaseException as error:  # not of the run, which says so itself: of what is done with its results
                    self.failure = error
                finally:
                    with self.change:
                        self.members -= 1
                        self.change.notify()

        self.threads.append(threading.Thread(target=work, name=title, daemon=True))
        self.threads[-1].start()

    def place(self, number: int, *given: Any) -> InProcess:
        """Where the clients of a run live: in this process, with an engine that hands over."""
        own: list[Any] = [_Member(one, self, number) if isinstance(one, Engine) else one for one in given]
        return InProcess(*own)

    def train(self, request: _Request) -> None:
        """Wait until it is trained; others work meanwhile."""
        with self.change:
            self.requests.append(request)
            self.change.notify()
        if self.over:
            request.done.set()
        self.floor.release()
        request.done.wait()
        self.floor.acquire()
        if self.over:
            raise _Over
        if request.error is not None:
            raise request.error

    # What is done when all of them wait.

    def hold(self) -> None:
        """Train what is handed over, until all runs have ended."""
        requests: list[_Request] = []
        try:
            while requests := self._handed_over():
                self.joiner.train(requests)
                for request in requests:
                    request.done.set()
        except BaseException:  # Ctrl-C once more, or what went wrong with results: nobody waits for the runs
            self.over = True
            for waiting in (*requests, *self.requests):
                waiting.done.set()
            until = time.monotonic() + PATIENCE
            for thread in self.threads:
                thread.join(max(0.0, until - time.monotonic()))
            raise
        for thread in self.threads:
            thread.join()

    def _handed_over(self) -> list[_Request]:
        with self.change:
            self.change.wait_for(lambda: self.failure is not None or len(self.requests) == self.members)
            if self.failure is not None:
                raise self.failure
            requests, self.requests = self.requests, []
        # What is trained with what then depends on the runs alone, and not on who was faster.
        return sorted(requests, key=lambda request: request.number)


class _Member(Engine):
    """The engine of one run, which hands over the training of stacks."""

    def __init__(self, engine: Engine, meeting: _Meeting, number: int) -> None:
        super().__init__(*engine.settings)
        self.alone, self.meeting, self.number = engine, meeting, number

    def run(self, training: Training) -> None:
        if self.stacks(training.network) and training.schedule.steps.any():
            self.meeting.train(_Request(training, self.known(training), self.alone, number=self.number))
        else:
            super().run(training)


class _Titles(logging.Filter):
    """Says of which run a message is."""

    def __init__(self, titles: set[str]) -> None:
        super().__init__()
        self.titles = titles

    def filter(self, record: logging.LogRecord) -> bool:
        title = threading.current_thread().name
        if title in self.titles and not getattr(record, "titled", False):  # several handlers are given the same record
            record.msg, record.args, record.titled = f"{title}: {record.getMessage()}", (), True
        return True


@contextmanager
def _titled(titles: set[str]) -> Iterator[None]:
    handlers, titles_of = list(logging.getLogger().handlers), _Titles(titles)
    for handler in handlers:
        handler.addFilter(titles_of)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(titles_of)

"""Cells side by side: each in a process of its own, with its share of the cores."""

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from tailorfl.study.cells import (
    Batch,
    Cell,
    Ended,
    Failure,
    Replace,
    Result,
    Stop,
    Watch,
    Way,
    execute_batch,
    keep_error,
)
from tailorfl.study.config import configure
from tailorfl.study.folder import ERROR
from tailorfl.study.loggers import prepare

SPAWN = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
LISTEN = 0.2  # seconds between two looks at whether to stop
PATIENCE = 10.0  # seconds for a process to end after its last batch
# What a process tells: of a cell, where it replaces another that it is ready; at last of its batch.
READY, ROUND, LOG, ENDED, OVER = "ready", "round", "log", "ended", "over"

Message = tuple[str, int, Any]  # what it is about, the cell's number in the batch or the level of the log, and the rest

log = logging.getLogger(__name__)


def side_by_side(
    batches: Sequence[Batch], way: Way, watch: Watch, end: Ended, stop: Stop, replace: Replace | None = None
) -> bool:
    """Run cells in ``way.jobs`` processes; False if it was stopped before all had ended.

    The threads of this process are divided among them. A process that dies takes its batch with it, and no other.
    """
    prepare(way.loggers)
    pool = _Pool(batches, way, watch, end, replace)
    try:
        while pool.waiting or pool.workers:
            if stop():
                pool.ask_to_stop()
            pool.fill()
            pool.listen()
    finally:
        for worker in pool.workers:  # after a second Ctrl-C, or an error here; a run can be killed at any moment
            worker.process.kill()
            worker.close()
    return pool.ended == sum(map(len, batches))


class _Pool:
    """The batches that wait, and the processes with those that run."""

    def __init__(self, batches: Sequence[Batch], way: Way, watch: Watch, end: Ended, replace: Replace | None) -> None:
        self.way, self.watch, self.end, self.replace = way, watch, end, replace
        self.replaced = SPAWN.Event() if replace else None
        self.waiting, self.workers, self.ended = deque(batches), list[_Worker](), 0
        self.stopping = False
        self.threads = max(1, torch.get_num_threads() // way.jobs)

    def fill(self) -> None:
        while self.waiting and len(self.workers) < self.way.jobs:
            self.workers.append(_Worker(self.way, self.threads, self.replaced))
            self._next(self.workers[-1])

    def listen(self) -> None:
        """What the processes tell, one message of each."""
        speaking = wait([worker.pipe for worker in self.workers], LISTEN)
        for worker in [one for one in self.workers if one.pipe in speaking]:
            kind, number, told = worker.hear()
            if kind == ROUND:
                self.watch.round(worker.batch[number], told)
            elif kind == LOG:
                log.log(number, told)
            elif kind == READY:
                self._replace()
            elif kind == ENDED:
                self._ended(worker, worker.batch[number], told)
            else:
                self._over(worker, told)

    def _replace(self) -> None:
        """A run is ready to train, and waits for what it replaces to be taken away."""
        assert self.replace is not None
        assert self.replaced is not None
        self.replace()
        self.replaced.set()

    def _ended(self, worker: "_Worker", cell: Cell, result: Result) -> None:
        self.ended += 1
        worker.left.remove(cell)
        self.end(cell, result)

    def _over(self, worker: "_Worker", died: str | None) -> None:
        """A batch is done, or was stopped, or its process died of something."""
        for cell in list(worker.left) if died else ():
            keep_error(cell.folder / ERROR, f"{died}\n")
            self._ended(worker, cell, Failure(str(died)))
        if self.waiting and not died:
            self._next(worker)
        else:
            self.workers.remove(worker)
            worker.close()

    def _next(self, worker: "_Worker") -> None:
        batch = self.waiting.popleft()
        for cell in batch:
            self.watch.begun(cell)
        worker.give(batch)

    def ask_to_stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.waiting.clear()
            for worker in self.workers:
                worker.send(None)


class _Worker:
    """A process that runs one batch after the other."""

    batch: Batch
    left: list[Cell]  # of it, that have not ended

    def __init__(self, way: Way, threads: int, replaced: Event | None) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        level = logging.getLogger("tailorfl").getEffectiveLevel()
        self.process = SPAWN.Process(target=_work, args=(theirs, way, threads, level, replaced), daemon=True)
        with _deaf():
            self.process.start()
        theirs.close()

    def give(self, batch: Batch) -> None:
        self.batch, self.left = batch, list(batch)
        self.send([(cell.title, cell.config.flat(), str(cell.folder)) for cell in batch])

    def send(self, what: Any) -> None:
        with suppress(OSError):  # it died; hear() will say so
            self.pipe.send(what)

    def hear(self) -> Message:
        try:
            message: Message = self.pipe.recv()
            return message
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            return OVER, 0, f"its process {_how_it_ended(self.process.exitcode)}"

    def close(self) -> None:
        self.pipe.close()  # at which it ends
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()
        self.process.close()


def _how_it_ended(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed ({name}{'; is there enough memory?' if name == 'SIGKILL' else ''})"


@contextmanager
def _deaf() -> Iterator[None]:
    """What is started meanwhile does not hear Ctrl-C: the command hears it, and says when to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# In the process.


def _work(pipe: Connection, way: Way, threads: int, level: int, replaced: Event | None) -> None:
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    torch.set_num_threads(threads)
    voice = _Voice(pipe)
    logging.basicConfig(level=logging.WARNING, handlers=[voice], force=True)
    logging.getLogger("tailorfl").setLevel(level)
    logging.captureWarnings(True)

    def replace() -> None:
        assert replaced is not None
        if not replaced.is_set():
            voice.tell(READY, 0, None)
            replaced.wait()

    with suppress(EOFError, OSError):  # the command was killed
        while (task := pipe.recv()) is not None:
            batch = tuple(Cell(title, configure(one["method"], one), Path(folder)) for title, one, folder in task)
            voice.title = f"{batch[0].title}: " if len(batch) == 1 else ""  # runs together say who they are
            # Whatever comes while a batch runs is the wish to stop, the end of the pipe too.
            execute_batch(
                batch,
                way,
                lambda cell, line: voice.tell(ROUND, batch.index(cell), line),  # noqa: B023 (called before the next)
                lambda cell, result: voice.tell(ENDED, batch.index(cell), result),  # noqa: B023
                pipe.poll,
                replace if replaced else None,
            )
            voice.tell(OVER, 0, None)


def _end_with_the_command() -> None:
    """Where the command is killed its runs are too: who resumes it must not find them at work in their folders."""
    command = multiprocessing.parent_process()
    assert command is not None
    wait([command.sentinel])
    os._exit(1)


class _Voice(logging.Handler):
    """Tells the command what happens here, the log included."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe, self.turn = pipe, threading.Lock()  # threads that train clients may log
        self.title = ""

    def tell(self, kind: str, number: int, what: Any) -> None:
        with self.turn, suppress(OSError):  # nobody listens any more: the run stops after this round
            self.pipe.send((kind, number, what))

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(LOG, record.levelno, f"{self.title}{record.getMessage()}")

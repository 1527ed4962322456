"""A folder in which one command works at a time."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailorfl.errors import UserError

WAIT, PAUSE = 0.25, 0.05  # seconds: who only looks whether a folder is in use holds it for a moment


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Work in this folder; refused while another command does. It is made, and taken away if nothing came into it.

    A process that is killed occupies nothing. Where a system has no such locks, nobody is refused.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    for last in (False, True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            break
        except FileNotFoundError:  # another command has just taken an empty folder above away
            if last:
                raise
    try:
        with _opened(folder) as descriptor:
            if not _free(descriptor, WAIT):
                raise _in_use(folder)
            yield
    finally:
        with suppress(OSError):  # something is in it
            for path in new:
                path.rmdir()


def is_occupied(folder: Path) -> bool:
    """Whether a command works there now. Any number may look at the same time."""
    try:
        with _opened(folder) as descriptor:
            return not _free(descriptor, shared=True)
    except OSError:
        return False


def check_unused(folders: Iterable[Path]) -> None:
    """Refuse if a command works in one of these."""
    for folder in sorted(folders):
        if is_occupied(folder):
            raise _in_use(folder)


def _in_use(folder: Path) -> UserError:
    return UserError(f"{folder} is in use by another command; allowed: another --out, or to wait until it ends")


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """None where a folder cannot be opened: not on a system of this kind."""
    if os.name != "posix":
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _free(descriptor: int | None, wait: float = 0.0, shared: bool = False) -> bool:
    """Nobody else works there, as far as that can be told: file systems on a network may have no locks for folders."""
    try:
        return descriptor is None or locked(descriptor, wait, PAUSE, shared)
    except OSError:
        return True


def locked(descriptor: int, wait: float, pause: float, shared: bool = False) -> bool:
    """Take the lock of what is open, for as long as it is; False if another process has it for so many seconds.

    A shared one is in the way only of those that want it for themselves.
    """
    import fcntl

    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        time.sleep(min(pause, wait))

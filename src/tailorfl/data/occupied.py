"""A folder in which one command works at a time."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailorfl.errors import UserError

TRIES, PAUSE = 5, 0.05  # who only looks whether a folder is in use holds it for a moment


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Work in this folder; refused while another command does. It is made, and taken away if nothing came into it.

    A process that is killed occupies nothing. Where a system has no such locks, nobody is refused.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _opened(folder) as descriptor:
            if not _locked_soon(descriptor):
                raise UserError(
                    f"{folder} is in use by another command; allowed: another --out, or to wait until it ends"
                )
            yield
    finally:
        with suppress(OSError):  # something is in it
            for path in new:
                path.rmdir()


def is_occupied(folder: Path) -> bool:
    """Whether a command works there now."""
    try:
        with _opened(folder) as descriptor:
            return not _locked(descriptor)
    except OSError:
        return False


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


def _locked_soon(descriptor: int | None) -> bool:
    for _ in range(TRIES):
        if _locked(descriptor):
            return True
        time.sleep(PAUSE)
    return False


def _locked(descriptor: int | None) -> bool:
    if descriptor is None:
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # file systems on a network may have no locks for folders
        return True
    return True

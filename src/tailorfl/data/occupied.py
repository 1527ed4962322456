"""A folder in which one command works at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailorfl.errors import UserError


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Work in this folder; refused while another command does. It is made, and taken away if nothing came into it.

    A process that is killed occupies nothing. Where a system has no such locks, nobody is refused.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
    try:
        if descriptor is not None and not _locked(descriptor):
            raise UserError(f"{folder} is in use by another command; allowed: another --out, or to wait until it ends")
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
        with suppress(OSError):  # something is in it
            for path in new:
                path.rmdir()


def _locked(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # file systems on a network may have no locks for folders
        return True
    return True

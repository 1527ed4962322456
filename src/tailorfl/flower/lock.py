"""One at a time: a lock on a file, which a process that is killed does not hold."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailorfl.errors import UserError

PAUSE = 0.5  # seconds between two tries


@contextmanager
def alone(lock: Path, taken: str = "", wait: float = 0.0) -> Iterator[None]:
    """Hold the lock; if another has it for longer than ``wait`` seconds, refuse and say that it is ``taken``."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + wait
    with lock.open("w") as file:
        while not _held(file.fileno()):
            if time.monotonic() >= end:
                raise UserError(taken or f"{lock.parent} is in use by another command (it holds {lock.name})")
            time.sleep(min(PAUSE, wait))
        yield


def _held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

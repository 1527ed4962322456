"""One at a time: a lock on a file, which a process that is killed does not hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailorfl.data.occupied import locked
from tailorfl.errors import UserError

PAUSE = 0.5  # seconds between two tries


@contextmanager
def alone(lock: Path, taken: str = "", wait: float = 0.0) -> Iterator[None]:
    """Hold the lock; if another has it for longer than ``wait`` seconds, refuse and say that it is ``taken``."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        if not _held(file.fileno(), wait):
            raise UserError(taken or f"{lock.parent} is in use by another command (it holds {lock.name})")
        yield


def _held(descriptor: int, wait: float) -> bool:
    try:
        return locked(descriptor, wait, PAUSE)
    except OSError:  # without locks two servers could write the same state
        return False

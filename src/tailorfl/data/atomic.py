"""Files that are either whole or not there."""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tailorfl.errors import UserError

ENDINGS = {"HTML": (".html", ".htm"), "CSV": (".csv", ".tsv")}  # of kinds that have several


def check_named(option: str, path: Path, kind: str, inputs: Iterable[Path] = ()) -> None:
    """Refuse a name whose file is not to be replaced: one of another kind by its ending, or an input, or in one.

    ``kind`` is what a command writes, as its ending says: CSV, HTML, PNG.
    """
    endings = ENDINGS.get(kind, (f".{kind.lower()}",))
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; allowed: the name of a file (.{kind.lower()})")
    if not path.exists():
        return
    if path.suffix.lower() not in endings:
        raise UserError(
            f"{option} {path} is there and is not {kind} by its name; "
            f"allowed: a new name, or a .{kind.lower()} file to replace"
        )
    target = path.resolve()
    if any(source in (target, *target.parents) for source in map(Path.resolve, inputs)):
        raise UserError(f"{option} {path} is an input; allowed: another name")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, renamed to it at the end; nothing stays behind if the writing fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """The same, and on the disk when it ends: a crash of the machine leaves the old file or the new one."""
    with whole_file(path) as temporary:
        yield temporary
        flush(temporary)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

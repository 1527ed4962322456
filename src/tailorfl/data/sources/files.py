"""Finds a source's files in the data folder, and says which are missing and how to get them."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from tailorfl.errors import UserError


def data_folder(data_dir: Path | None) -> Path | None:
    """The folder that was given, else that of the environment variable TAILOR_DATA."""
    if data_dir is not None:
        return data_dir
    named = os.environ.get("TAILOR_DATA")
    return Path(named) if named else None


def present(folder: Path | None, file: str) -> Path | None:
    """The file under the folder, unpacked or with .gz, or None."""
    if folder is None:
        return None
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def missing(source: str, folder: Path | None, expected: Sequence[str]) -> UserError:
    """The one line for files that are not there."""
    where = f"{folder} does not have them" if folder else "no data folder is set (--data-dir or TAILOR_DATA)"
    return UserError(f"data={source} needs {', '.join(expected)} in the data folder; {where}; {obtain(source, folder)}")


def obtain(source: str, folder: Path | None) -> str:
    """How to get a source's files, as it is typed."""
    return f"`tailor data prepare {source} --data-dir {quote(str(folder)) if folder else 'FOLDER'}` downloads them"


def find(source: str, folder: Path | None, expected: Sequence[str]) -> list[Path]:
    """All expected files, in order; names may end in .gz on disk."""
    found = [present(folder, file) for file in expected]
    absent = [file for file, path in zip(expected, found, strict=True) if path is None]
    if absent:
        raise missing(source, folder, absent)
    return [path for path in found if path is not None]

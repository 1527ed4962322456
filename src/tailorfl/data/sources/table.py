"""Reads tables, CSV or Parquet: a row a sample, numeric columns as features, a label and perhaps a client column."""

import csv
import gzip
import io
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.extras import import_extra
from tailorfl.data.reason import reason
from tailorfl.data.source import Column, Kind, Reading, Source, SourceOptions
from tailorfl.data.sources.text import EncodedText, encode
from tailorfl.errors import UserError

Columns = Mapping[str, Sequence[Any]]
LARGEST = float(np.finfo(np.float32).max)  # of a number: all are computed in float32
MANY_REAL_LABELS = 50  # more different real numbers than this are not classes


def load_csv(path: str, folder: Path | None, options: SourceOptions) -> Source:
    name = f"csv:{path}"
    columns = read_csv(Path(path), f"data={name}")
    return table_source(name, columns, height(columns), options)


def load_parquet(path: str, folder: Path | None, options: SourceOptions) -> Source:
    name = f"parquet:{path}"
    columns = read_parquet(Path(path), f"data={name}")
    return table_source(name, columns, height(columns), options)


def read_csv(file: Path, what: str, used: Collection[str] | None = None) -> Columns:
    """The columns of a file by their names, as text; ``what`` it is, for error lines. None where it has no rows.

    All of them must have names of their own, or those that are ``used``.
    """
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        header, *rows = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""))) or [[]]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{what} cannot be read: {reason(error)}") from error
    rows = [row for row in rows if row]
    uneven = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if uneven is not None:
        raise UserError(f"{what}: row {uneven + 1} has {len(rows[uneven])} values, the header has {len(header)}")
    columns = list(zip(header, zip(*rows, strict=True), strict=True)) if rows else []
    named = [(name, values) for name, values in columns if name or any(values)]  # spreadsheets end in empty ones
    _check_names([name for name, _ in named if used is None or name in used], what)
    return dict(named)


def read_parquet(file: Path, what: str) -> Columns:
    parquet = import_extra("pyarrow.parquet", "parquet", what)
    try:
        table = parquet.read_table(file)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise UserError(f"{what} cannot be read: {reason(error)}") from error
    return {column: table.column(column).to_pylist() for column in table.column_names}


def _check_names(names: Sequence[str], what: str) -> None:
    """Columns are told apart by their names: of two with the same one, only the last would be kept."""
    repeated = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if repeated is not None:
        raise UserError(f"{what} has two columns named {repeated!r}; allowed: every name once")


def height(columns: Columns) -> int:
    """How many rows a table has."""
    return len(next(iter(columns.values()), ()))


def table_source(
    name: str, columns: Columns, train_size: int, options: SourceOptions, classes: tuple[str, ...] | None = None
) -> Source:
    """A source from columns of equal length; ``classes`` names the numbers of a label column that has them already."""
    if not columns or not train_size:
        raise UserError(f"data={name} has no rows")
    label = column_named(name, columns, "label_column", options.label_column or list(columns)[-1])
    client = column_named(name, columns, "client_column", options.client_column)
    text = column_named(name, columns, "text_column", options.text_column)
    for option, column in (("label_column", label), ("client_column", client)):
        if column:
            _check_filled(name, option, column, columns[column])
    targets, found_classes = read_targets(name, label, columns[label], options, classes)
    owner, owners = read_owners(columns[client]) if client else (None, ())
    encoded: EncodedText | None = None
    if text:
        encoded = encode([str(value) for value in columns[text]], train_size, options)
        reading = Reading((Column(text),))
    else:
        features = {column: values for column, values in columns.items() if column not in (label, client)}
        if not features:
            raise UserError(f"data={name} has no feature columns beside the label and the client")
        numbers = read_numbers(features, f"data={name}")
        reading = Reading(_described(list(features), numbers[:train_size]))
        inputs = standardize(numbers, reading.columns)
    kind: Kind = "text" if encoded else "features"
    return Source(
        name=name,
        kind=kind,
        inputs=encoded.ids if encoded else inputs,
        targets=targets,
        train_size=train_size,
        classes=found_classes,
        owner=owner,
        owners=owners,
        vectors=encoded.vectors if encoded else None,
        vocabulary=encoded.vocabulary if encoded else (),
        reading=reading,
    )


def column_named(name: str, columns: Columns, option: str, wanted: str | None) -> str:
    """The wanted column, "" where none is wanted."""
    if wanted and wanted not in columns:
        raise UserError(f"data={name}: no column {option}={wanted}; allowed: {', '.join(columns)}")
    return wanted or ""


def read_targets(
    name: str, column: str, values: Sequence[Any], options: SourceOptions, classes: tuple[str, ...] | None = None
) -> tuple[Tensor, tuple[str, ...]]:
    """Real numbers for a regression, else class numbers and names, in the order of numbers or of the alphabet."""
    if options.task == "regression":
        return torch.from_numpy(_column(f"data={name}", column, values).astype(np.float32)), ()
    if classes:
        return torch.from_numpy(_column(f"data={name}", column, values).astype(np.int64)), classes
    numeric = _as_numbers(values)
    if numeric is None:
        return _numbered(values)
    found, numbers = np.unique(numeric, return_inverse=True)
    if len(found) > MANY_REAL_LABELS and not np.all(found == np.round(found)):
        raise UserError(
            f"data={name}: label_column={column} has {len(found)} different real numbers; "
            "allowed: classes, or task=regression"
        )
    return torch.from_numpy(numbers.astype(np.int64)), tuple(f"{value:g}" for value in found)


def _check_filled(name: str, option: str, column: str, values: Sequence[Any]) -> None:
    """A row without a label, or without a client, belongs nowhere."""
    empty = next((row for row, value in enumerate(values, 1) if value is None or not str(value).strip()), None)
    if empty is not None:
        raise UserError(f"data={name}: {option}={column} is empty in row {empty}; allowed: a value in every row")


def read_owners(values: Sequence[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """Natural client numbers and names, by the alphabet."""
    return _numbered(values)


def _numbered(values: Sequence[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """The number of each value's name among all names; blanks around one are a slip, and make no other name of it."""
    names, numbers = np.unique(np.array([str(value).strip() for value in values]), return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, names))


def standardize(numbers: np.ndarray, columns: Sequence[Column]) -> Tensor:
    """float32 [rows, columns]: each column with mean 0 and deviation 1 over the rows that describe it."""
    mean, deviation = (np.array([getattr(column, of) for column in columns]) for of in ("mean", "deviation"))
    return torch.from_numpy(((numbers - mean) / deviation).astype(np.float32))


def _described(names: Sequence[str], train: np.ndarray) -> tuple[Column, ...]:
    """A constant column has deviation 1, and so becomes 0."""
    deviation = train.std(axis=0)
    deviation[deviation == 0] = 1
    return tuple(map(Column, names, train.mean(axis=0).tolist(), deviation.tolist()))


def read_numbers(columns: Columns, what: str) -> np.ndarray:
    """float64 [rows, columns]; a value that is missing or no number is refused, as in training."""
    return np.stack([_column(what, column, values) for column, values in columns.items()], axis=1)


def _column(what: str, column: str, values: Sequence[Any]) -> np.ndarray:
    numbers = _as_numbers(values)
    if numbers is None:
        odd = next(value for value in values if _as_numbers([value]) is None)
        raise UserError(f"{what}: column {column} has {odd!r:.40}, allowed: a number in every row")
    large = np.flatnonzero(np.abs(numbers) > LARGEST)
    if len(large):
        row = int(large[0])
        raise UserError(f"{what}: column {column} has {values[row]} in row {row + 1}, allowed: up to {LARGEST:.1e}")
    return numbers


def _as_numbers(values: Sequence[Any]) -> np.ndarray | None:
    """As float64, or None where a value is missing or no finite number."""
    try:
        numbers = np.array(values, np.float64)
    except (TypeError, ValueError):
        return None
    return numbers if numbers.ndim == 1 and np.isfinite(numbers).all() else None

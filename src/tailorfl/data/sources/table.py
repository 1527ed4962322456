"""Reads tables, CSV or Parquet: a row a sample, numeric columns as features, a label and perhaps a client column."""

import csv
import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.extras import import_extra
from tailorfl.data.reason import reason
from tailorfl.data.source import Kind, Source, SourceOptions
from tailorfl.data.sources.text import EncodedText, encode
from tailorfl.errors import UserError

Columns = Mapping[str, Sequence[Any]]
MANY_REAL_LABELS = 50  # more different real numbers than this are not classes


def load_csv(path: str, folder: Path | None, options: SourceOptions) -> Source:
    name, file = f"csv:{path}", Path(path)
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        header, *rows = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""))) or [[]]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data={name} cannot be read: {reason(error)}") from error
    rows = [row for row in rows if row]
    uneven = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if uneven is not None:
        raise UserError(f"data={name}: row {uneven + 1} has {len(rows[uneven])} values, the header has {len(header)}")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else {}
    return table_source(name, columns, len(rows), options)


def load_parquet(path: str, folder: Path | None, options: SourceOptions) -> Source:
    parquet = import_extra("pyarrow.parquet", "parquet", f"data=parquet:{path}")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise UserError(f"data=parquet:{path} cannot be read: {reason(error)}") from error
    columns = {column: table.column(column).to_pylist() for column in table.column_names}
    return table_source(f"parquet:{path}", columns, table.num_rows, options)


def table_source(
    name: str, columns: Columns, train_size: int, options: SourceOptions, classes: tuple[str, ...] | None = None
) -> Source:
    """A source from columns of equal length; ``classes`` names the numbers of a label column that has them already."""
    if not columns or not train_size:
        raise UserError(f"data={name} has no rows")
    label = column_named(name, columns, "label_column", options.label_column or list(columns)[-1])
    client = column_named(name, columns, "client_column", options.client_column)
    text = column_named(name, columns, "text_column", options.text_column)
    targets, found_classes = read_targets(name, label, columns[label], options, classes)
    owner, owners = read_owners(columns[client]) if client else (None, ())
    encoded: EncodedText | None = None
    if text:
        encoded = encode([str(value) for value in columns[text]], train_size, options)
    else:
        features = {column: values for column, values in columns.items() if column not in (label, client)}
        inputs = standardize(_numbers(name, features), train_size)
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
        return torch.from_numpy(_column(name, column, values).astype(np.float32)), ()
    if classes:
        return torch.from_numpy(_column(name, column, values).astype(np.int64)), classes
    numeric = _as_numbers(values)
    if numeric is None:
        names, numbers = np.unique(np.array([str(value) for value in values]), return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, names))
    found, numbers = np.unique(numeric, return_inverse=True)
    if len(found) > MANY_REAL_LABELS and not np.all(found == np.round(found)):
        raise UserError(
            f"data={name}: label_column={column} has {len(found)} different real numbers; "
            "allowed: classes, or task=regression"
        )
    return torch.from_numpy(numbers.astype(np.int64)), tuple(f"{value:g}" for value in found)


def read_owners(values: Sequence[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """Natural client numbers and names, by the alphabet."""
    names, numbers = np.unique(np.array([str(value) for value in values]), return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(map(str, names))


def standardize(features: np.ndarray, train_size: int) -> Tensor:
    """Each column with mean 0 and deviation 1 over the training rows; a constant column becomes 0."""
    train = features[:train_size]
    deviation = train.std(axis=0)
    deviation[deviation == 0] = 1
    return torch.from_numpy(((features - train.mean(axis=0)) / deviation).astype(np.float32))


def _numbers(name: str, columns: Columns) -> np.ndarray:
    if not columns:
        raise UserError(f"data={name} has no feature columns beside the label and the client")
    return np.stack([_column(name, column, values) for column, values in columns.items()], axis=1)


def _column(name: str, column: str, values: Sequence[Any]) -> np.ndarray:
    numbers = _as_numbers(values)
    if numbers is None:
        odd = next(value for value in values if _as_numbers([value]) is None)
        raise UserError(f"data={name}: column {column} has {odd!r:.40}, allowed: a number in every row")
    return numbers


def _as_numbers(values: Sequence[Any]) -> np.ndarray | None:
    """As float64, or None where a value is missing or no finite number."""
    try:
        numbers = np.array(values, np.float64)
    except (TypeError, ValueError):
        return None
    return numbers if numbers.ndim == 1 and np.isfinite(numbers).all() else None

"""Results as one tidy table, a row a run: CSV, and Parquet where pyarrow is installed."""

import csv
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tailorfl.data.atomic import whole_file
from tailorfl.data.extras import import_extra
from tailorfl.errors import UserError

RESULTS, PARQUET = "results.csv", "results.parquet"  # a row a run
OPTIONS = "options.yaml"  # of a study of a paper: what was chosen of it
ASKED = "asked.yaml"  # of a comparison or a sweep: its methods or values, and settings; written when it begins
STATISTICS = "statistics.csv"  # a row for what is told from others, or compared with them
COMPARISON, CURVES, SWEPT = "comparison.csv", "comparison.png", "sweep.png"  # beside them, of what they are named after

Row = Mapping[str, Any]


def write_results(rows: Sequence[Row], folder: Path, names: Sequence[str] = ()) -> None:
    """Both files, whole or not at all; without pyarrow no Parquet file stays behind that says something else.

    ``names`` are the first columns, which are there without a row too.
    """
    write_csv(rows, folder / RESULTS, names)
    try:
        _write_parquet(rows, folder / PARQUET, names)
    except UserError:
        (folder / PARQUET).unlink(missing_ok=True)


def write_csv(rows: Sequence[Row], path: Path, names: Sequence[str] = ()) -> None:
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns_of(rows, names))
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)


def read_csv(path: Path, needed: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a table; what is no table, has not these columns, or has rows of another length is refused."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, head = list(reader), reader.fieldnames or ()
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no table: {error}; was it changed?") from error
    missing = [name for name in needed if name not in head]
    if missing:
        raise UserError(f"{path} has no column {missing[0]}; allowed: a first line with {','.join(needed)}")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise UserError(f"{path}, line {number}: not as many values as columns")
    return rows


def told_by(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What the runs of a command differ in, by its table: their method, and the keys of a sweep."""
    return list(takewhile(lambda key: key != "seed", rows[0])) if rows else []


def _write_parquet(rows: Sequence[Row], path: Path, names: Sequence[str]) -> None:
    purpose = "writing Parquet"
    arrow = import_extra("pyarrow", "parquet", purpose)
    parquet = import_extra("pyarrow.parquet", "parquet", purpose)
    columns = {name: _of_one_type([row.get(name) for row in rows]) for name in columns_of(rows, names)}
    with whole_file(path) as temporary:
        parquet.write_table(arrow.table(columns), temporary)


def columns_of(rows: Sequence[Row], names: Sequence[str] = ()) -> list[str]:
    """The names of all rows, in the order in which they first appear."""
    return list(dict.fromkeys([*names, *(key for row in rows for key in row)]))


def flat(summary: Row) -> dict[str, Any]:
    """The single figures of a summary, those of groups under the names that a measure gives them."""
    named = {key: value.items() for key, value in summary.items() if isinstance(value, dict)}
    parts = {f"{key}.{name}": value for key, values in named.items() for name, value in values}
    return {key: value for key, value in {**summary, **parts}.items() if not isinstance(value, list | dict)}


def _cell(value: Any) -> Any:
    """What is no single value, such as a list that is an option, as JSON."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def as_text(value: Any) -> str:
    """As a CSV file has it."""
    return "" if value is None else str(_cell(value))


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    cells = [_cell(value) for value in values]
    kinds = {type(cell) for cell in cells if cell is not None}
    if len(kinds) <= 1:
        return cells
    kind = float if kinds == {int, float} else str
    return [None if cell is None else kind(cell) for cell in cells]

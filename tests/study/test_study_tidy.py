"""Results as files: CSV and Parquet say the same."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.study.tidy import flat, write_csv, write_results

parquet = pytest.importorskip("pyarrow.parquet")

ROWS: list[dict[str, Any]] = [
    {"method": "fedper", "lr": 0.1, "hidden": [8, 4], "flag": True, "rounds": 3, "accuracy": 0.25, "note": "a,b"},
    {"method": "local", "lr": 1, "hidden": None, "flag": None, "rounds": 2, "accuracy": None, "more": {"a": 1}},
]


def read(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file)), parquet.read_table(folder / "results.parquet").to_pylist()


def test_csv_and_parquet_have_the_same_rows_columns_and_values(tmp_path: Path) -> None:
    write_results(ROWS, tmp_path)
    text, typed = read(tmp_path)
    assert list(text[0]) == list(typed[0]) == [*ROWS[0], "more"]
    for line, row, written in zip(text, typed, ROWS, strict=True):
        assert row.pop("lr") == float(line.pop("lr")) == written["lr"], "a column of numbers has one type"
        assert line == {key: "" if value is None else str(value) for key, value in row.items()}
    assert (typed[0]["hidden"], typed[1]["more"]) == ("[8, 4]", '{"a": 1}')
    assert (typed[0]["flag"], typed[1]["flag"]) == (True, None)


CELLS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text('xyz,"\n', max_size=4)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), CELLS, min_size=1), min_size=1, max_size=5))
def test_rows_of_any_values_can_be_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write_results(rows, folder)
    text, typed = read(folder)
    assert len(typed) == len(rows)
    assert all(list(row) == list(typed[0]) for row in typed)
    wanted = [["" if row.get(name) is None else str(row[name]) for name in text[0]] for row in rows]
    assert [list(row.values()) for row in text] == wanted


def test_without_rows_there_are_still_the_columns_that_are_named(tmp_path: Path) -> None:
    write_results([], tmp_path, ("study", "row"))
    assert (tmp_path / "results.csv").read_text().strip() == "study,row"
    assert parquet.read_table(tmp_path / "results.parquet").column_names == ["study", "row"]


def test_without_pyarrow_no_old_parquet_file_is_left_beside_new_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_results(ROWS, tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_results(ROWS[:1], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv"]
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 2


def test_a_file_that_cannot_be_written_to_its_end_stays_as_it_was(tmp_path: Path) -> None:
    write_csv(ROWS[:1], tmp_path / "table.csv")
    before = (tmp_path / "table.csv").read_text()

    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_csv([*ROWS, {"method": Unprintable()}], tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_a_summary_is_flat_with_the_figures_of_groups_by_name() -> None:
    summary = {"method": "fedper", "group_accuracies": {"a": 0.5, "b": None}, "stages": [{"stage": 1}], "loss": None}
    assert flat(summary) == {"method": "fedper", "loss": None, "group_accuracies.a": 0.5, "group_accuracies.b": None}

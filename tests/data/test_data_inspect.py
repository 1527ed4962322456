"""The table and the pictures of a federation."""

import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from tailorfl.data import (
    FederatedData,
    PartitionOptions,
    SourceOptions,
    describe,
    draw_counts,
    federate,
    load_source,
    shade_counts,
)
from tailorfl.errors import UserError


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return federate(load_source("digits"), PartitionOptions(clients=10, new_clients=1, samples_per_client=100), 0)


def test_the_table_tells_sizes(data: FederatedData) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(describe(data))
    text = capture.get()
    for fact in ("digits: 10 clients", "train samples", "750", "75", "classes a client", "1x8x8", "1 clients held out"):
        assert fact in text


def test_the_text_picture_shows_who_has_what(data: FederatedData) -> None:
    *lines, note = shade_counts(data).splitlines()
    counts = data.label_counts()
    assert len(lines) == 10
    for client, line in enumerate(lines):
        cells = line.split("│")[1]
        shown = [label for label in range(10) if cells[2 * label] != " "]
        assert shown == counts[client].nonzero()[:, 0].tolist()
        assert line.endswith("75")
    assert note.startswith("10 of 10 clients, 10 classes")


def test_the_text_picture_of_many_clients_fits_the_screen() -> None:
    many = federate(load_source("digits"), PartitionOptions(clients=300), 0)
    lines = shade_counts(many, lines=20, columns=5).splitlines()
    assert len(lines) == 21
    assert lines[-1].startswith("20 of 300 clients")
    assert max(map(len, lines[:-1])) < 20


@pytest.mark.parametrize("clients", [10, 300])
def test_the_picture_is_a_png(tmp_path: Path, clients: int) -> None:
    data = federate(load_source("digits"), PartitionOptions(clients=clients), 0)
    draw_counts(data, tmp_path / "counts.png")
    with Image.open(tmp_path / "counts.png") as image:
        assert image.format == "PNG"
        assert image.width >= max(600, 2 * clients)
    assert [path.name for path in tmp_path.iterdir()] == ["counts.png"]


def test_a_regression_has_its_pictures_too(tmp_path: Path) -> None:
    source = load_source("synthetic-regression", None, SourceOptions(clients=3))
    data = federate(source, PartitionOptions(partition="natural"), 0)
    draw_counts(data, tmp_path / "counts.png")
    assert "3 of 3 clients;" in shade_counts(data)
    assert describe(data).row_count == 3


def test_without_matplotlib_the_line_says_what_to_install(
    data: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"install tailorfl\[plot\]"):
        draw_counts(data, tmp_path / "counts.png")
    assert not list(tmp_path.iterdir())

"""The page as a file: small, whole, on its own, and safe whatever things are called."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the extra report")
from hand_runs import client, line, make_run

from tailorfl.report.page import LARGEST, page_data, render, write_page
from tailorfl.report.results import Entry, Results, read_results
from tailorfl.report.runs import read_run

NAMES = [
    "</script><script>alert(1)</script>",
    "\"quotes' <b>",
    "%{x} %{text}",
    "NaN",
    "<!--title-->",
    "a\u2028b\\n",
    "\ud83d",
]


class Page(HTMLParser):
    """What a browser would find in it: tags with what they load, and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.scripts[self.open] = self.scripts.get(self.open, "") + data

    def unpacked(self, name: str) -> str:
        return gzip.decompress(base64.b64decode(self.scripts[name])).decode()

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.unpacked("data"), parse_constant=lambda name: pytest.fail(name))
        return found


def written(results: Results, folder: Path) -> Page:
    write_page(results, folder / "report.html")
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_loads_nothing_from_a_network_and_holds_all_it_needs(tmp_path: Path) -> None:
    page = written(read_results([make_run(tmp_path / "a", lines=[line(1, 0.5)])]), tmp_path)
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset", "background"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    style, script = page.scripts["style"], page.scripts["script"]
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"https?:|//[a-z]+\.", style + script.replace("// ", ""))
    assert "Plotly" in page.unpacked("plotly")[:5000] or "plotly" in page.unpacked("plotly")[:5000]


def test_names_do_no_harm_and_come_out_as_they_went_in(tmp_path: Path) -> None:
    served = [client(name, "nan" if name == "NaN" else 0.5, 0.25) for name in NAMES[:-1]]
    classes = [(name, name, 1) for name in NAMES[:-1]]
    figures = {"group_accuracies": dict.fromkeys(NAMES, 0.5), "personalized_accuracy": float("nan")}
    run = make_run(
        tmp_path / "a", lines=[line(1, 0.5, **figures)], served=served, classes=classes, summary=figures, data=NAMES[0]
    )
    page = written(read_results([run], NAMES[0]), tmp_path)
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not {"b", "img"} & {tag for tag, _ in page.tags}
    [panel] = page.data["panels"]
    [table] = [one for one in panel["tables"] if one["key"] == "clients"]
    assert [row[0]["text"] for row in table["rows"]] == NAMES[:-1]
    assert page.data["title"] == NAMES[0]
    [title] = re.findall("<title>(.*?)</title>", (tmp_path / "report.html").read_text())
    assert "<" not in title


def test_a_title_is_not_taken_for_a_place_to_fill(tmp_path: Path) -> None:
    results = read_results([make_run(tmp_path / "a", lines=[line(1, 0.5)])], "<!--blocks--> /*script*/")
    page = written(results, tmp_path)
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert page.data["title"] == "<!--blocks--> /*script*/"


def test_numbers_have_few_digits_and_what_is_no_number_is_nothing(tmp_path: Path) -> None:
    lines = [line(1, 1 / 3, loss=float("inf")), line(2, 2 / 3, bytes_up=float("nan"))]
    data = page_data(read_results([make_run(tmp_path / "a", lines=lines)]))
    [curve] = [plot for plot in data["panels"][0]["plots"] if plot["key"] == "accuracy"]
    assert curve["marks"][0]["y"] == [33.3333, 66.6667]
    assert curve["marks"][0]["x"] == [1, 2]
    json.dumps(data, allow_nan=False)


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = read_results([make_run(tmp_path / "a", lines=[line(1, 0.5)])])
    written(results, tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_page(results, tmp_path / "report.html")
    monkeypatch.undo()
    assert (tmp_path / "report.html").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "report.html"}


def test_the_same_results_are_the_same_page(tmp_path: Path) -> None:
    results = read_results([make_run(tmp_path / "a", lines=[line(1, 0.5)], served=[client("x", 0.5)])])
    assert render(page_data(results)) == render(page_data(results))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Eight methods, 400 clients, 1000 rounds, and figures that no packing makes small."""
    folder = tmp_path_factory.mktemp("large")
    lines = []
    for number in range(1, 1001):
        accuracy = (number * 0.618033988749) % 1
        more = {"accuracy_p10": accuracy / 3, "accuracy_p90": accuracy**0.5, "global_accuracy": accuracy**2}
        lines.append(line(number, accuracy, **more, loss=accuracy**3))
    served = [client(f"hospital-{number}", (number * 0.4142135) % 1, (number * 0.7320508) % 1) for number in range(400)]
    classes = [(f"hospital-{number}", str(label), number * label % 97) for number in range(400) for label in range(10)]
    run = read_run(make_run(folder, lines=lines, served=served, classes=classes, summary={"personalized_accuracy": 1}))
    return Results("large", "comparison", tuple(Entry(f"method {number}", (run,)) for number in range(8)))


def test_a_page_of_many_clients_rounds_and_methods_stays_small_and_has_all_plots(
    large: Results, tmp_path: Path
) -> None:
    page = written(large, tmp_path)
    assert (tmp_path / "report.html").stat().st_size < LARGEST == 6_000_000
    [panel] = page.data["panels"]
    plots = {plot["key"]: plot for plot in panel["plots"]}
    assert {"accuracy", "global", "clients", "personalization", "classes", "traffic", "training-loss"} <= set(plots)
    for key in ("accuracy", "clients", "traffic"):
        marks = plots[key]["marks"]
        assert [len(mark["x"]) for mark in marks] == [400] * 8
    assert (plots["accuracy"]["marks"][0]["x"][0], plots["accuracy"]["marks"][0]["x"][-1]) == (1, 1000)


def test_lines_have_fewer_points_where_a_page_would_be_too_large(
    large: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailorfl.report.page.LARGEST", len(render(page_data(large, 100))))
    [panel] = written(large, tmp_path).data["panels"]
    [plot] = [plot for plot in panel["plots"] if plot["key"] == "accuracy"]
    assert [len(mark["x"]) for mark in plot["marks"]] == [100] * 8

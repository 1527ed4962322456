"""Pictures for papers: every plot as PNG and SVG, the same bytes each time, names as they are."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="needs the extra plot")
from hand_runs import client, line, make_run, together

from tailorfl.report.figures import write_figure, write_figures
from tailorfl.report.marks import Axis, Bars, HeatMap, Line, Mark, Plot, Points
from tailorfl.report.plots import plots_of
from tailorfl.report.results import Results
from tailorfl.study.palette import style_of

ODD = "_$x^2$ \\frac </svg>&\"' %{x} ü"


def words(svg: Path) -> str:
    """The text of a picture, which stays text."""
    return " ".join("".join(ElementTree.parse(svg).getroot().itertext()).split())


@pytest.fixture
def everything(tmp_path: Path) -> Results:
    """Two seeds of one method and one of another, with every plot there can be."""
    groups = {"group_accuracies": {"north": 0.5, ODD: 0.25}}
    networks = [{"group": "north", "clients": 2, "layers": {"a": 1.0, "b": 0.5}, "parameters": 9}]
    summary = {
        "personalized_accuracy": 0.5,
        "seconds_training": 2.0,
        **groups,
        "stages": [{"stage": 1, "stage_accuracy": 0.5, "ensemble_accuracy": None, "shared_parameters": 5}],
        "group_networks": [{**networks[0], "shared_parameters": 4}],
    }
    tested = {"accuracy_p10": 0.1, "accuracy_p90": 0.9, "global_accuracy": 0.25, "stage": 1, **groups}
    away = {"round": 2, "client": "c0", "beta": 0.5, "rounds_away": 1, "received_accuracy": 0.1, "kept_accuracy": 0.2}
    runs = [
        make_run(
            tmp_path / "runs" / str(seed),
            lines=[line(1), line(2, 0.5, **tested), line(3, 0.75, **tested)],
            served=[client("c0", 0.5, 0.25), client(ODD, 0.75, 0.5)],
            classes=[("c0", ODD, 3), (ODD, "1", 2)],
            measures=[away],
            notes=[(1, "c0", "down_1", 0.5), (1, "c0", "up_1", 0.5), (1, "c0", "mu_down", 0.5)],
            summary=summary,
            seed=seed,
        )
        for seed in (0, 1)
    ]
    local = make_run(tmp_path / "runs/local", "local", served=[client("c0", 0.1), client(ODD, 0.2)], lines=[line(1)])
    return together((ODD, runs), ("local", [local]))


def test_every_plot_is_a_png_and_an_svg_and_the_same_bytes_when_written_again(
    everything: Results, tmp_path: Path
) -> None:
    plots = plots_of(everything)
    assert len(plots) >= 15
    written = write_figures(everything, tmp_path / "one")
    assert {path.name for path in written} == {f"{plot.name}.{kind}" for plot in plots for kind in ("png", "svg")}
    assert sorted((tmp_path / "one").iterdir()) == sorted(written)
    write_figures(everything, tmp_path / "two")
    for path in written:
        content = path.read_bytes()
        assert len(content) > 2000
        assert content.startswith(b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<?xml")
        assert content == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_names_are_written_as_they_are_in_legends_and_on_axes(everything: Results, tmp_path: Path) -> None:
    for plot in plots_of(everything):
        if plot.key in ("accuracy", "groups", "personalization"):
            [svg] = write_figure(plot, tmp_path, ("svg",))
            assert ODD in words(svg), plot.key


def picture(tmp_path: Path, *marks: Mark, **options: bool) -> str:
    along = Axis("round", whole=isinstance(marks[0], Line))
    plot = Plot("x", "title", "", along, Axis("figure", 0, 1), marks, **options)
    [svg] = write_figure(plot, tmp_path, ("svg",))
    return words(svg)


def test_one_mark_is_named_only_where_it_is_one_of_several_entries(tmp_path: Path) -> None:
    curve = Line("fedavg", 0, [1, 2], [0.5, None])
    assert "fedavg" not in picture(tmp_path, curve)
    assert "fedavg" in picture(tmp_path, curve, legend=True)


def test_long_names_and_many_of_them_are_all_in_the_legend(tmp_path: Path) -> None:
    names = [f"fedavg, network_options={{hidden: [{number}, {'64, ' * 30}64]}}" for number in range(12)]
    found = picture(tmp_path, *(Line(name, place, [1, 2], [0, 1]) for place, name in enumerate(names)))
    assert all(" ".join(name.split()) in found for name in names)


def test_twenty_entries_are_told_apart_as_dots_as_lines_and_as_bars() -> None:
    styles = [style_of(place) for place in range(20)]
    assert len({(one.colour, one.sign) for one in styles}) == 20
    assert len({(one.colour, one.stroke) for one in styles}) == 20
    assert len({(one.colour, one.hatch) for one in styles}) == 20


def test_a_dot_of_many_clients_is_larger_than_that_of_one(tmp_path: Path) -> None:
    def extent(many: tuple[int, ...]) -> float:
        """Of the largest sign."""
        plot = Plot("dots", "", "", Axis("x", 0, 1), Axis("y", 0, 1), (Points("a", 0, [0.5], [0.5], ("c",), many),))
        [svg] = write_figure(plot, tmp_path, ("svg",))
        [sign] = re.findall(r'<path id="[^"]+" d="(M[^"]*C[^"]*)"', svg.read_text())
        return max(map(float, re.findall(r"-?[0-9.]+", sign)))

    assert extent((9,)) == pytest.approx(3 * extent((1,)), rel=0.01)


def test_gaps_and_missing_values_are_left_out(tmp_path: Path) -> None:
    curve = picture(tmp_path, Line("a", 0, [1, 2, 3], [None, 0.5, None]), Line("b", 1, [], []))
    stacked = picture(
        tmp_path, Bars("a", 0, ("x", "y"), [None, 1.0]), Bars("b", 1, ("x", "y"), [1.0, 1.0]), stacked=True
    )
    heat = picture(tmp_path, HeatMap("share", ("1", "2"), ("a",), [[None, None]]))
    assert all("nan" not in found.lower() for found in (curve, stacked, heat))

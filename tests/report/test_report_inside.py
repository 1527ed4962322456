"""What single methods have of their own: stages, mixed layers, forgetting, slices of a network."""

from pathlib import Path

import pytest
from hand_runs import line, make_run, together

from tailorfl.report.marks import Bars, HeatMap, Line, Plot
from tailorfl.report.plots import plots_of


def inside(folder: Path) -> dict[str, Plot]:
    """The plots of one run, called x, without its name."""
    return {plot.name.removesuffix("-x"): plot for plot in plots_of(together(("x", [folder])))}


def bars(plot: Plot) -> dict[str, list[float | None]]:
    return {mark.name: mark.y for mark in plot.marks if isinstance(mark, Bars)}


def heat(plot: Plot) -> HeatMap:
    [mark] = plot.marks
    assert isinstance(mark, HeatMap)
    return mark


def curves(plot: Plot) -> dict[str, tuple[list[float], list[float | None]]]:
    return {mark.name: (mark.x, mark.y) for mark in plot.marks if isinstance(mark, Line)}


def test_stages_show_their_model_alone_the_ensemble_and_what_travels(tmp_path: Path) -> None:
    stages = [
        {"stage": 1, "stage_accuracy": 0.5, "ensemble_accuracy": 0.5, "shared_parameters": 9, "personal_parameters": 0},
        {"stage": 2, "stage_accuracy": None, "ensemble_accuracy": 0.75, "shared_parameters": 4},
    ]
    found = inside(make_run(tmp_path / "a", "ppfe", summary={"personalized_accuracy": 0.75, "stages": stages}))
    assert bars(found["stages"]) == {"alone": [50, None], "ensemble up to it": [50, 75]}
    assert bars(found["stage-sizes"]) == {"shared": [9, 4], "personal": [0, None]}
    assert found["stage-sizes"].stacked


def test_betas_have_a_line_a_stage_with_a_band_of_four_fifths_of_the_clients(tmp_path: Path) -> None:
    lines = [line(1, 0.5, stage=1), line(2, 0.5, stage=1), line(3, 0.5, stage=2)]
    measures = [{"round": 1, "client": str(number), "beta": number / 10} for number in range(11)]
    measures += [{"round": 2, "client": "0", "beta": ""}, {"round": 3, "client": "0", "beta": 2.0}]
    plot = inside(make_run(tmp_path / "a", "ppfe", lines=lines, measures=measures))["betas"]
    assert curves(plot) == {"stage 1": ([1], [pytest.approx(0.5)]), "stage 2": ([3], [2])}
    first = plot.marks[0]
    assert isinstance(first, Line)
    [band] = first.bands
    assert (band.low, band.high, first.text) == ([pytest.approx(0.1)], [pytest.approx(0.9)], ("11 clients",))


def test_mixed_layers_are_means_over_the_clients_of_a_round(tmp_path: Path) -> None:
    notes = [
        *((1, name, "down_1", value) for name, value in (("a", 1.0), ("b", 0.5))),
        *((1, name, "down_2", value) for name, value in (("a", 0.0), ("b", 0.5))),
        *((1, name, "mu_down", value) for name, value in (("a", 0.2), ("b", 0.4))),
        (3, "a", "down_1", 0.0),
        (3, "a", "down_2", 0.0),
        (3, "a", "up_1", 0.75),
        (3, "a", "mu_up", 0.9),
    ]
    found = inside(make_run(tmp_path / "a", "pmixfed", lines=[line(1)], notes=notes))
    down, up = heat(found["mix-down"]), heat(found["mix-up"])
    assert (down.columns, down.rows, down.values) == (("1", "3"), ("1", "2"), [[0.75, 0], [0.25, 0]])
    assert (up.rows, up.values) == (("1",), [[None, 0.75]])
    factors = curves(found["mix-factors"])
    assert factors == {"broadcast": ([1], [pytest.approx(0.3)]), "aggregation": ([3], [0.9])}
    assert curves(found["mix-frozen"]) == {"layers": ([1, 3], [0.5, 2])}


def test_notes_of_another_kind_are_no_mixed_layers(tmp_path: Path) -> None:
    notes = [(1, "a", "site_seconds", 3.0)]
    assert inside(make_run(tmp_path / "a", lines=[line(1), line(2)], notes=notes)).keys() == {"training-loss"}


def test_forgetting_is_shown_by_rounds_away_and_by_round(tmp_path: Path) -> None:
    columns = ("round", "client", "rounds_away", "received_accuracy", "recalled_accuracy", "kept_accuracy")
    rows = [(2, "a", 0, 0.4, 0.5, 0.6), (2, "b", 3, 0.2, 0.3, ""), (4, "a", 3, 0.6, 0.7, 0.8)]
    measures = [dict(zip(columns, row, strict=True)) for row in rows]
    found = inside(make_run(tmp_path / "a", "pfps-lwc", lines=[line(2, 0.5)], measures=measures))
    away, rounds = (
        {name: (x, pytest.approx(y)) for name, (x, y) in curves(found[key]).items()}
        for key in ("forgetting", "forgetting-rounds")
    )
    assert away["body just received"] == ([0, 3], [40, 40])
    assert away["after recall"] == ([0, 3], [50, 50])
    assert away["client's own last body"] == ([0, 3], [60, 80])
    assert rounds["body just received"] == ([2, 4], [30, 60])
    assert rounds["client's own last body"] == ([2, 4], [60, 80])


def test_slices_show_which_group_has_how_much_of_each_layer(tmp_path: Path) -> None:
    networks = [
        {"group": "big", "clients": 4, "layers": {"conv": 1.0, "head": 1.0}, "parameters": 90, "shared_parameters": 80},
        {"group": "small", "clients": 2, "layers": {"conv": 0.25}, "parameters": 9, "shared_parameters": 8},
    ]
    lines = [line(1, 0.5, group_accuracies={"big": 0.5}), line(2, 0.5, group_accuracies={"big": 0.75, "small": 0.25})]
    found = inside(make_run(tmp_path / "a", "scalablefl", lines=lines, summary={"group_networks": networks}))
    slices = heat(found["slices"])
    assert (slices.columns, slices.rows) == (("conv", "head"), ("big (4)", "small (2)"))
    assert slices.values == [[100, 100], [25, None]]
    assert bars(found["group-sizes"]) == {"shared": [80, 8], "all": [90, 9]}
    assert curves(found["groups-rounds"]) == {"big": ([1, 2], [50, 75]), "small": ([2], [25])}
    alone = [{**one, "shared_parameters": 0} for one in networks]  # nobody has a part of anything
    assert "slices" not in inside(make_run(tmp_path / "b", "local", summary={"group_networks": alone}))


def test_the_inside_is_that_of_the_first_seed_and_of_the_best_settings_of_one_method(tmp_path: Path) -> None:
    def run(number: int, seed: int) -> Path:
        notes = [(1, "a", "down_1", number / 10)]
        summary = {"validation_accuracy": abs(number - 3) / 10, "personalized_accuracy": 0.5}
        return make_run(tmp_path / f"{number}-{seed}", "pmixfed", notes=notes, seed=seed, lr=number, summary=summary)

    results = together(*((f"lr={number}", [run(number, 3), run(number, 4)]) for number in range(6)))
    shown = [plot for plot in plots_of(results) if plot.key.startswith("mix-down")]
    best = [0, 1, 2, 5]
    assert [plot.title for plot in shown] == [f"lr={number}, seed 3: mixed layers, broadcast" for number in best]
    assert [heat(plot).values for plot in shown] == [[[number / 10]] for number in best]
    assert all(plot.about.endswith(" Shown are the 4 best of 6.") for plot in shown)

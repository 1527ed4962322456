"""Plots against numbers that were calculated by hand: curves, bands, clients, traffic, time."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hand_runs import client, line, make_run, together
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.report.marks import LONGEST_NAME, Bars, HeatMap, Line, Plot, Points, thinned, ticks
from tailorfl.report.plots import plots_of
from tailorfl.report.results import Results


def plots(results: Results, **options: Any) -> dict[str, Plot]:
    return {plot.name: plot for plot in plots_of(results, **options)}


def lines(plot: Plot) -> dict[str, Line]:
    return {mark.name: mark for mark in plot.marks if isinstance(mark, Line)}


def points(plot: Plot) -> dict[str, list[tuple[str, float, float]]]:
    clouds = [mark for mark in plot.marks if isinstance(mark, Points)]
    return {one.name: list(zip(one.text, one.x, one.y, strict=True)) for one in clouds}


def bars(plot: Plot) -> dict[str, dict[str, float | None]]:
    found = [mark for mark in plot.marks if isinstance(mark, Bars)]
    return {one.name: dict(zip(one.labels, one.y, strict=True)) for one in found}


# Over rounds.


def test_a_curve_is_the_mean_over_seeds_with_bands_over_clients_and_seeds(tmp_path: Path) -> None:
    folders = []
    for seed, accuracy in enumerate((0.4, 0.6)):
        ends = {"accuracy_p10": accuracy - 0.2, "accuracy_p90": accuracy + 0.3 + 0.1 * seed}
        tested = [line(1), line(2, accuracy, **ends), *([line(4, 0.8)] if seed else [])]
        folders.append(make_run(tmp_path / str(seed), lines=tested, seed=seed))
    curve = lines(plots(together(("fedavg", folders), ("other", folders[:1])))["accuracy"])["fedavg"]
    assert curve.x == [2, 4]  # round 1 was not evaluated, and round 4 with one seed only
    assert curve.y == pytest.approx([50, 80])
    clients, seeds = curve.bands
    assert (clients.low[0], clients.high[0]) == pytest.approx((30, 85))
    assert (clients.low[1], clients.high[1]) == (None, None)
    deviation = 100 * (0.02) ** 0.5  # of 0.4 and 0.6, with one degree of freedom
    assert seeds.low == pytest.approx([50 - deviation, 80])
    assert seeds.high == pytest.approx([50 + deviation, 80])


def test_one_entry_alone_shows_all_its_models_and_several_show_their_own_models(tmp_path: Path) -> None:
    figures = {"global_accuracy": 0.3, "adapted_accuracy": 0.7, "worst_decile_accuracy": 0.1, "beta_accuracy": 0.2}
    run = make_run(
        tmp_path / "a",
        lines=[line(1, 0.4, **figures), line(2, 0.5, **figures)],
        measures=[{"round": 1, "client": "a", "beta_accuracy": 0.2}],
    )
    alone = plots(together(("a", [run])))
    assert {name: one.y for name, one in lines(alone["accuracy"]).items()} == {
        "personalized": [40, 50],
        "global model": [30, 30],
        "worst tenth of clients": [10, 10],
        "adapted model": [70, 70],  # and not what a method measures of each client
    }
    assert "global" not in alone
    both = plots(together(("a", [run]), ("b", [run])))
    assert list(lines(both["accuracy"])) == ["a", "b"]
    assert list(lines(both["global"])) == ["a", "b"]


def test_there_is_no_course_over_rounds_of_one_evaluation(tmp_path: Path) -> None:
    once, twice = (
        make_run(tmp_path / name, lines=[line(1), *(line(at, 0.5, global_accuracy=0.5) for at in rounds)])
        for name, rounds in (("once", [3]), ("twice", [2, 3]))
    )
    assert not {"accuracy", "global"} & set(plots(together(("a", [once]), ("b", [once]))))
    both = plots(together(("a", [once]), ("b", [twice])))
    assert [len(one.x) for one in lines(both["accuracy"]).values()] == [1, 2]


def test_training_loss_has_every_round_and_a_gap_where_nobody_answered(tmp_path: Path) -> None:
    found = [line(1, 0.5), line(2, loss=None), line(3, loss=float("nan")), line(4)]
    [loss] = plots(together(("a", [make_run(tmp_path / "a", lines=found)])))["training-loss"].marks
    assert isinstance(loss, Line)
    assert (loss.x, loss.y) == ([1, 4], [1, 0.25])


def test_a_regression_shows_losses_as_they_are(tmp_path: Path) -> None:
    tested = [line(k, personalized_accuracy=None, personalized_loss=7.0, global_loss=9.0) for k in (1, 2)]
    served = [client("a", "", loss=3.0), client("b", "", loss=1.0)]
    runs = [make_run(tmp_path / name, lines=tested, served=served) for name in "xy"]
    found = plots(together(("x", runs[:1]), ("y", runs[1:])))
    assert lines(found["accuracy"])["x"].y == [7, 7]
    assert lines(found["global"])["y"].y == [9, 9]
    assert lines(found["clients"])["x"].y == [1, 3]
    assert found["accuracy"].y.label == found["clients"].y.label == "loss"
    assert "from the best served" in found["clients"].about
    assert not {"personalization", "baseline"} & set(found)


# Clients.


def test_clients_are_sorted_over_all_seeds_without_new_and_diverged_ones(tmp_path: Path) -> None:
    served = [
        [client("a", 0.9), client("b", 0.1), client("new", 0.0, new=1)],
        [client("a", 0.5), client("b", "nan"), client("c", "")],
    ]
    folders = [make_run(tmp_path / str(seed), served=own, seed=seed) for seed, own in enumerate(served)]
    [curve] = plots(together(("x", folders)))["clients"].marks
    assert isinstance(curve, Line)
    assert curve.y == pytest.approx([10, 50, 90])
    assert curve.x == pytest.approx([100 / 6, 50, 500 / 6])
    assert curve.text == ("b", "a", "a")


def test_before_and_after_are_of_the_same_client_and_only_where_something_is_personalized(tmp_path: Path) -> None:
    tuned = [client("a", 0.9, 0.5), client("b", 0.5, 0.5), client("c", 0.7), client("n", 1.0, 0.0, new=1)]
    same = [client("a", 0.5, 0.5), client("b", 0.6, 0.6)]
    runs = [make_run(tmp_path / name, served=own) for name, own in (("tuned", tuned), ("same", same))]
    plot = plots(together(("same", runs[1:]), ("tuned", runs[:1])))["personalization"]
    assert points(plot) == {"tuned": [("a", 50, 90), ("b", 50, 50)]}
    assert plot.diagonal
    assert plot.legend  # else nobody knew which of the two it is


def test_clients_at_the_same_place_are_one_point_that_tells_how_many_small_ones_on_top(tmp_path: Path) -> None:
    served = [client("a", 0.9, 0.5), *(client(name, 0.7, 0.6) for name in ("b", "c", "d")), client("e", 0.8, 0.5)]
    [cloud] = plots(together(("x", [make_run(tmp_path / "x", served=served)])))["personalization"].marks
    assert isinstance(cloud, Points)
    assert list(zip(cloud.text, cloud.x, cloud.y, cloud.many, strict=True)) == [
        ("3 clients", 60, 70, 3),
        ("a", 50, 90, 1),
        ("e", 50, 80, 1),
    ]


def test_a_method_without_a_global_model_is_set_against_fedavg_on_the_same_clients_and_seed(tmp_path: Path) -> None:
    def run(name: str, method: str, seed: int, served: list[dict[str, Any]]) -> Path:
        return make_run(tmp_path / name, method, served=served, seed=seed)

    base = [run("f0", "fedavg", 0, [client("a", 0.2, 0.2), client("b", 0.3, 0.3)])]
    base += [run("f1", "fedavg", 1, [client("a", 0.4, 0.4), client("b", 0.5, 0.5)])]
    mine = [run("p1", "fedper", 1, [client("a", 0.8), client("b", 0.9)])]
    mine += [run("p2", "fedper", 2, [client("a", 0.8), client("b", 0.9)])]  # no such seed
    mine += [run("p0", "fedper", 0, [client("a", 0.8, train=29), client("b", 0.9)])]  # other data
    ditto = [run("d1", "ditto", 1, [client("a", 0.1, 0.4), client("b", 0.1, 0.5)])]
    local = [run("l1", "local", 1, [client("a", 0.6), client("b", "")])]
    plot = plots(together(("local", local), ("fedper", mine), ("ditto", ditto), ("fedavg", base)))["baseline"]
    assert plot.title == "Each client against fedavg"
    assert points(plot) == {"fedper": [("a", 40, 80), ("b", 50, 90)], "local": [("a", 40, 60)]}
    without = plots(together(("local", local), ("fedper", mine), ("ditto", ditto)))["baseline"]
    assert points(without) == {"fedper": [("a", 60, 80)]}


def test_the_map_of_classes_has_every_count_and_says_if_others_differ(tmp_path: Path) -> None:
    rows = [("x", "10", 1), ("x", "9", 2), ("y", "9", 3)]
    same = [make_run(tmp_path / name, classes=rows) for name in "ab"]
    other = make_run(tmp_path / "c", classes=[("x", "9", 5)])
    plot = plots(together(("a", same[:1]), ("b", same[1:])))["classes"]
    [heat] = plot.marks
    assert isinstance(heat, HeatMap)
    assert (heat.columns, heat.rows, heat.values) == (("x", "y"), ("9", "10"), [[2, 3], [1, 0]])
    assert "differ" not in plot.about
    assert "Shown is a, seed 0; others differ." in plots(together(("a", same[:1]), ("c", [other])))["classes"].about


def test_clients_of_one_long_name_each_have_a_column(tmp_path: Path) -> None:
    names = ["a hospital with a very long name, " + end for end in ("north", "south")]
    run = make_run(tmp_path / "a", classes=[(name, "0", 1) for name in names])
    [heat] = plots(together(("a", [run])))["classes"].marks
    assert isinstance(heat, HeatMap)
    assert len(set(heat.columns)) == 2


@given(st.lists(st.text(st.sampled_from("ab, ="), max_size=3 * LONGEST_NAME), unique=True))
def test_names_of_an_axis_are_told_apart_by_what_they_say(names: list[str]) -> None:
    found = ticks(names)
    assert len(set(found)) == len(names)
    assert not any("'" in name for name in found)
    assert list(found) == names or max(map(len, names)) > LONGEST_NAME


def test_long_names_of_an_axis_lose_their_middle_and_equal_ones_are_marked() -> None:
    assert ticks(["a hospital with a very long name, north"]) == ("a hospital w…name, north",)
    assert ticks(["a", "a"]) == ("a", "a'")


# Costs.


def test_traffic_adds_up_over_all_rounds_and_is_the_mean_over_seeds(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        sent = {"bytes_up": 1000 * (1 + seed), "bytes_down": 3000}
        found = [line(1, **sent), line(2, 0.4, **sent), line(3, **{**sent, "bytes_down": None}), line(4, 0.6, **sent)]
        folders.append(make_run(tmp_path / str(seed), lines=found, seed=seed))
    plot = plots(together(("a", folders)))["traffic"]
    [curve] = plot.marks
    assert isinstance(curve, Line)
    # After round 2: 8 and 10 kB; after round 4: 13 and 17 kB.
    assert (plot.x.label, curve.x, curve.y) == ("traffic, kB", [9, 15], [40, 60])
    assert curve.text == ("round 2", "round 4")


def test_time_is_the_mean_over_seeds_also_of_runs_that_train(tmp_path: Path) -> None:
    done = make_run(tmp_path / "0", summary={"seconds_training": 10.0, "seconds_evaluation": 1.0})
    going = make_run(tmp_path / "1", lines=[line(1, seconds=2.0), line(2, seconds=4.0, seconds_evaluation=1.0)])
    assert bars(plots(together(("a", [done, going])))["time"]) == {"training": {"a": 8}, "evaluation": {"a": 1}}


def test_bars_of_a_sweep_are_named_by_their_settings_a_line_each(tmp_path: Path) -> None:
    layers = [make_run(tmp_path / str(k), summary={"seconds_training": 1.0}) for k in (1, 2)]
    entries = [(f"fedavg, lr=0.01, personal_layers={k}", [run]) for k, run in enumerate(layers, start=1)]
    found = bars(plots(together(*entries))["time"])["training"]
    assert list(found) == ["lr=0.01,\npersonal_layers=1", "lr=0.01,\npersonal_layers=2"]


def test_groups_are_the_mean_over_seeds_and_a_group_that_one_has_not_is_empty(tmp_path: Path) -> None:
    found = [{"group_accuracies": {"x": 0.2, "y": 0.5}}, {"group_accuracies": {"x": 0.4, "y": "?"}}]
    runs = [make_run(tmp_path / str(seed), summary=one, seed=seed) for seed, one in enumerate(found)]
    other = make_run(tmp_path / "z", summary={"group_accuracies": {"z": 1.0}})
    assert bars(plots(together(("a", runs), ("b", [other])))["groups"]) == {
        "a": {"x": pytest.approx(30), "y": 50, "z": None},
        "b": {"x": None, "y": None, "z": 100},
    }


# How much, and what they are called.


@given(st.integers(0, 3000), st.integers(2, 500))
def test_thinning_keeps_both_ends_and_the_order_and_is_even(count: int, most: int) -> None:
    kept = thinned(range(count), most)
    assert len(kept) == min(count, most)
    assert kept[:1] + kept[-1:] == list(range(count))[:1] + list(range(count))[-1:]
    steps = [after - before for before, after in pairwise(kept)]
    assert not steps or (min(steps) >= 1 and max(steps) - min(steps) <= 1)


def test_long_runs_of_many_clients_are_thinned_in_every_plot(tmp_path: Path) -> None:
    found = [line(number, number / 1000) for number in range(1, 101)]
    served = [client(f"c{number}", number / 1000, 0.01) for number in range(100)]
    rows = [(f"c{number}", "0", 1) for number in range(100)]
    run = make_run(tmp_path / "a", lines=found, served=served, classes=rows)
    drawn = plots(together(("a", [run])), most=11)
    for name in ("accuracy", "clients", "traffic", "training-loss"):
        first = next(iter(lines(drawn[name]).values()))
        assert len(first.x) == len(first.y) == 11
    curve = lines(drawn["accuracy"])["personalized"]
    assert (curve.x[0], curve.x[-1], curve.y[0], curve.y[-1]) == (1, 100, pytest.approx(0.1), pytest.approx(10))
    [heat] = drawn["classes"].marks
    assert isinstance(heat, HeatMap)
    assert (len(heat.columns), heat.columns[0], heat.columns[-1]) == (11, "c0", "c99")
    assert "11 of 100 clients" in drawn["classes"].about


def test_an_entry_looks_alike_in_all_plots_whatever_others_are_missing(tmp_path: Path) -> None:
    served = [client("a", 0.5, 0.2)]
    runs = [
        make_run(tmp_path / name, lines=[line(1), line(2, 0.4), line(3, 0.5)], served=own)
        for name, own in (("x", []), ("y", served))
    ]
    drawn = plots(together(("x", runs[:1]), ("y", runs[1:])))
    styles = {
        mark.style
        for plot in drawn.values()
        for mark in plot.marks
        if isinstance(mark, Line | Points) and mark.name == "y"
    }
    assert {"clients", "personalization", "accuracy"} <= set(drawn)
    assert styles == {1}


def test_plots_of_labels_that_differ_in_signs_only_have_files_of_their_own(tmp_path: Path) -> None:
    notes = [(1, "a", "down_1", 0.5)]
    run = make_run(tmp_path / "a", "pmixfed", notes=notes, lines=[line(1, 0.5)])
    names = [plot.name for plot in plots_of(together(("lr=0.1", [run]), ("lr 0.1", [run]), ("../É/x", [run])))]
    assert len(set(names)) == len(names)
    assert {"mix-down-lr-0.1", "mix-down-lr-0.1-2"} <= set(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in names)
    assert not any(name.startswith(".") for name in names)

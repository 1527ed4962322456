"""A sweep on the page, against numbers that were calculated by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hand_runs import line, make_run, together

from tailorfl.report.marks import Line, Plot
from tailorfl.report.page import page_data
from tailorfl.report.plots import plots_of
from tailorfl.report.results import Results, read_results
from tailorfl.report.swept import choice_of


def run(folder: Path, test: float, validation: float | None = None, **config: Any) -> Path:
    found = {"personalized_accuracy": test, "personalized_loss": 1 - test, "validation_accuracy": validation}
    summary = {**found, "validation_loss": None if validation is None else 1 - validation}
    return make_run(folder, "fedper", lines=[line(1, test)], summary=summary, **config)


def over_settings(results: Results) -> Plot | None:
    return next((plot for plot in plots_of(results) if plot.key == "settings"), None)


def test_one_key_has_test_and_validation_data_over_its_values(tmp_path: Path) -> None:
    found = {0.1: ((0.8, 0.9), (0.6, 0.7)), 0.001: ((0.5, 0.6), (0.5, 0.6))}
    entries = [
        (f"lr={lr}", [run(tmp_path / f"{lr}-{seed}", *both, lr=lr, seed=seed) for seed, both in enumerate(seeds)])
        for lr, seeds in found.items()
    ]
    results = together(*entries)
    plot = over_settings(results)
    assert plot is not None
    test, validation = plot.marks
    assert isinstance(test, Line)
    assert isinstance(validation, Line)
    assert (test.name, test.x, test.y) == ("test", [0.001, 0.1], pytest.approx([50, 70]))
    assert (validation.name, validation.y) == ("validation", pytest.approx([60, 80]))
    deviation = 100 * 0.02**0.5
    assert test.bands[0].low == pytest.approx([50, 70 - deviation])
    assert (plot.x.label, plot.x.log, plot.x.ticks) == ("lr", True, (0.001, 0.1))
    assert choice_of(results.entries, False) == "best by validation accuracy: lr=0.1 (80.00 %, mean over 2 seeds)"
    assert choice_of(results.entries, True) == "best by validation loss: lr=0.1 (0.2, mean over 2 seeds)"


def test_a_setting_that_came_to_nothing_is_neither_drawn_nor_chosen(tmp_path: Path) -> None:
    entries = [(f"lr={lr}", [run(tmp_path / f"{lr}", lr, lr, lr=lr)]) for lr in (0.1, 0.2, 0.3)]
    failed = tmp_path / "0.3/summary.json"
    failed.write_text(json.dumps({**json.loads(failed.read_text()), "personalized_loss": None}))
    results = together(*entries)
    plot = over_settings(results)
    assert plot is not None
    assert [mark.x for mark in plot.marks if isinstance(mark, Line)] == [[0.1, 0.2], [0.1, 0.2]]
    assert choice_of(results.entries, False) == "best by validation accuracy: lr=0.2 (20.00 %)"


def test_a_setting_that_is_there_twice_is_drawn_as_the_mean(tmp_path: Path) -> None:
    entries = [
        (name, [run(tmp_path / name, test, lr=lr)]) for name, test, lr in (("a", 0.2, 1), ("b", 0.6, 1), ("c", 0.5, 2))
    ]
    plot = over_settings(together(*entries))
    assert plot is not None
    [line] = [mark for mark in plot.marks if isinstance(mark, Line)]
    assert (line.x, line.y) == ([1, 2], pytest.approx([40, 50]))


def test_only_what_a_sweep_has_written_is_chosen_from(tmp_path: Path) -> None:
    for clients, validation in ((5, 0.5), (8, 0.75)):
        run(tmp_path / "both" / str(clients), 0.5, validation, clients=clients)
    assert page_data(read_results([tmp_path / "both"]))["choice"] == ""
    (tmp_path / "both/results.csv").write_text("method,clients,seed\nfedper,5,0\nfedper,8,0\n")
    assert "clients=8" in page_data(read_results([tmp_path / "both"]))["choice"]


def test_what_a_sweep_names_is_what_was_tried_whatever_else_differs(tmp_path: Path) -> None:
    for rounds in (4, 8):
        run(tmp_path / "both" / str(rounds), 0.5, rounds / 10, rounds=rounds, stage_rounds=[rounds - 1, 1])
    results = read_results([tmp_path / "both"])
    assert over_settings(results) is None, "any of the keys may have been meant"
    (tmp_path / "both/results.csv").write_text("method,rounds,seed,clients\nfedper,4,0,5\nfedper,8,0,5\n")
    results = read_results([tmp_path / "both"])
    plot = over_settings(results)
    assert plot is not None
    assert (plot.x.label, [mark.x for mark in plot.marks if isinstance(mark, Line)]) == ("rounds", [[4, 8], [4, 8]])
    assert page_data(results)["choice"].startswith("best by validation accuracy: ")


def test_runs_that_differ_in_everything_are_no_sweep(tmp_path: Path) -> None:
    entries = [(name, [run(tmp_path / name, 0.5, 0.5, lr=x, rounds=x, clients=x)]) for name, x in (("a", 1), ("b", 2))]
    assert over_settings(together(*entries)) is None
    assert choice_of(together(*entries).entries, False) == ""


def test_of_several_keys_one_is_along_the_axis_and_the_others_are_lines(tmp_path: Path) -> None:
    entries = [
        (f"{lr}-{layers}", [run(tmp_path / f"{lr}-{layers}", lr * layers, lr=lr, personal_layers=layers, norm="all")])
        for lr in (0.1, 0.2, 0.3)
        for layers in (1, 2)
    ]
    plot = over_settings(together(*entries))
    assert plot is not None
    lines = {mark.name: mark for mark in plot.marks if isinstance(mark, Line)}
    assert lines["personal_layers=1"].y == pytest.approx([10, 20, 30])
    assert lines["personal_layers=2"].y == pytest.approx([20, 40, 60])
    assert not plot.x.log
    assert choice_of(together(*entries).entries, False) == "", "there is no validation data"


def test_methods_words_and_runs_that_have_not_ended_are_no_sweep(tmp_path: Path) -> None:
    words = [(name, [run(tmp_path / name, 0.5, 0.5, network=name)]) for name in ("mlp", "cnn")]
    assert over_settings(together(*words)) is None
    assert choice_of(together(*words).entries, False).startswith("best by validation accuracy: mlp (50.00 %; 1 other")
    methods = [("a", [run(tmp_path / "a", 0.5, 0.5)]), ("b", [make_run(tmp_path / "b", "local")])]
    assert over_settings(together(*methods)) is None
    assert choice_of(together(*methods).entries, False) == ""
    going = [("1", [run(tmp_path / "one", 0.5, 0.4, lr=0.1)]), ("2", [make_run(tmp_path / "two", "fedper", lr=0.2)])]
    assert choice_of(together(*going).entries, False) == "best by validation accuracy: 1 (40.00 %)"
    assert over_settings(together(*going)) is not None

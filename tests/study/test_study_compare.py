"""Comparisons: the same federation for all methods."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from study_runs import SMALL, identical, rounds, small

from tailorfl.data import load_partition
from tailorfl.errors import UserError
from tailorfl.study.build import build
from tailorfl.study.compare import configure_all, draw_curves, evaluated_rounds, run_all, write_table
from tailorfl.study.config import Config
from tailorfl.study.run import Run

METHODS = ("fedavg", "fedper", "local")


def run_one(config: Config, folder: Path) -> dict[str, Any] | None:
    return Run(config, folder).execute(resume=True)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    summaries = run_all(configure_all(METHODS, {**SMALL, "evaluate_every": 1}), folder, run_one)
    assert summaries is not None
    write_table(summaries, folder)
    return folder


def test_all_methods_have_the_same_partition(compared: Path) -> None:
    first, *others = (load_partition(compared / method / "partition.safetensors") for method in METHODS)
    for other in others:
        assert (other.names, other.new_clients) == (first.names, first.new_clients)
        for split in ("train", "validation", "test"):
            assert torch.equal(getattr(other, split).index, getattr(first, split).index)
            assert torch.equal(getattr(other, split).offsets, getattr(first, split).offsets)


def test_all_methods_select_the_same_clients_and_start_from_the_same_weights() -> None:
    built = [build(config) for config in configure_all(METHODS, SMALL)]
    for number in range(1, 4):
        assert len({tuple(one.loop.select(number)) for one in built}) == 1
    initial = [one.network.initial() for one in built]
    for name, tensor in initial[0].items():
        assert all(torch.equal(tensor, other[name]) for other in initial)


def test_a_method_does_in_a_comparison_what_it_does_alone(compared: Path, tmp_path: Path) -> None:
    assert Run(small("fedper", evaluate_every=1), tmp_path / "alone").execute() is not None
    assert identical(compared / "fedper", tmp_path / "alone")


def test_the_table_has_a_row_a_method(compared: Path) -> None:
    with (compared / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        summary = json.loads((compared / row["method"] / "summary.json").read_text())
        assert float(row["personalized_accuracy"]) == summary["personalized_accuracy"]
        assert row["global_accuracy"] == ("" if summary["global_accuracy"] is None else str(summary["global_accuracy"]))


def test_the_curves_are_drawn_as_a_picture(compared: Path, tmp_path: Path) -> None:
    draw_curves({method: compared / method for method in METHODS}, tmp_path / "curves.png")
    content = (tmp_path / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_the_curves_of_a_regression_are_its_losses(tmp_path: Path) -> None:
    own = {"data": "synthetic-regression", "partition": "natural", "samples": 12, "samples_per_client": None}
    run_all(configure_all(["fedavg", "local"], {**SMALL, **own}), tmp_path, run_one)
    draw_curves({method: tmp_path / method for method in ("fedavg", "local")}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_only_evaluated_rounds_are_on_the_curve(tmp_path: Path) -> None:
    assert Run(small(evaluate_every=2), tmp_path / "run").execute() is not None
    assert len(rounds(tmp_path / "run")) == 3
    assert [line["round"] for line in evaluated_rounds(tmp_path / "run")] == [2, 3]


def test_a_method_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match="method fedavg is named twice"):
        configure_all(["fedavg", "fedper", "fedavg"], {})


def test_an_option_reaches_only_the_methods_that_have_it() -> None:
    fedavg, fedper = configure_all(["fedavg", "fedper"], {"personal_layers": 2, "lr": 0.5})
    assert fedper.method.personal_layers == 2
    assert (fedavg.method.lr, fedper.method.lr) == (0.5, 0.5)
    assert "personal_layers" not in fedavg.flat()


def test_an_option_that_no_method_has_is_refused() -> None:
    with pytest.raises(UserError, match="unknown key 'personal_layers'"):
        configure_all(["fedavg", "local"], {"personal_layers": 2})


def test_a_comparison_that_was_stopped_goes_on_where_it_was(tmp_path: Path, compared: Path) -> None:
    configs = configure_all(METHODS, {**SMALL, "evaluate_every": 1})

    def stopping(config: Config, folder: Path) -> dict[str, Any] | None:
        stop = config.method_name == "fedper"
        return Run(config, folder, stop=lambda: stop).execute(resume=True)

    assert run_all(configs, tmp_path, stopping) is None
    assert not (tmp_path / "local").exists()
    finished = (tmp_path / "fedavg/summary.json").stat().st_mtime_ns
    assert run_all(configs, tmp_path, run_one) is not None
    assert (tmp_path / "fedavg/summary.json").stat().st_mtime_ns == finished
    assert all(identical(compared / method, tmp_path / method) for method in METHODS)


def test_a_wish_to_stop_in_the_last_round_of_a_method_ends_the_comparison(tmp_path: Path) -> None:
    begun: list[str] = []

    def run_one(config: Config, folder: Path) -> dict:
        begun.append(config.method_name)
        return {"method": config.method_name}

    configs = configure_all(["fedavg", "local"], {})
    assert run_all(configs, tmp_path, run_one, stop=lambda: True) is None
    assert begun == ["fedavg"]

"""Sweeps: what is typed, what runs, and what is chosen by which data."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from study_runs import SMALL, Tailor, identical, pairs

from tailorfl.errors import UserError
from tailorfl.report.page import page_data
from tailorfl.report.results import read_results
from tailorfl.study.config import shown
from tailorfl.study.grid import Grid
from tailorfl.study.panels import draw_line
from tailorfl.study.sweep import choice, draw_sweep, plan_sweep, read_values
from tailorfl.study.tables import percent

# What is typed.


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UserError, match="lr is named twice"):
        read_values(["lr=0.1,0.2", "rounds=3", "lr=0.3"])


@pytest.mark.parametrize(
    ("pair", "values"),
    [
        ("lr=0.1,0.01", [0.1, 0.01]),
        ("lr=0.1", [0.1]),
        ("network=mlp, linear", ["mlp", "linear"]),
        ("data=csv:a.csv,csv:b.csv", ["csv:a.csv", "csv:b.csv"]),
        ("data='csv:a,b.csv'", ["csv:a,b.csv"]),
        ("flag=true,false", [True, False]),
        ("alpha=null,0.5", [None, 0.5]),
        ("everyone_in=[1,-1],[2]", [[1, -1], [2]]),
        ("everyone_in=[1,-1]", [[1, -1]]),
        ("network_options={hidden: [8]},{hidden: [4, 4]}", [{"hidden": [8]}, {"hidden": [4, 4]}]),
        ("lr=0.1,", [0.1]),
        ("glove=", [None]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_part_values(pair: str, values: list[Any]) -> None:
    assert read_values([pair]) == {pair.partition("=")[0]: values}


SCALARS = st.booleans() | st.integers(-999, 999) | st.floats(0.001, 99).map(lambda one: round(one, 3)) | st.none()
WORDS = st.from_regex(r"[a-z]{2,5}-[a-z0-9]{1,4}", fullmatch=True)
VALUES = st.lists(SCALARS | WORDS | st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4)


@given(st.dictionaries(st.sampled_from(["lr", "alpha", "network"]), VALUES, min_size=1))
def test_values_are_read_as_they_are_shown(values: dict[str, list[Any]]) -> None:
    assert read_values([f"{key}={','.join(map(shown, some))}" for key, some in values.items()]) == values


@given(st.text(st.sampled_from("ab=,:[]{}'\"#&*!|> -\\%@`~?"), max_size=12))
def test_whatever_is_typed_gives_values_or_one_line(text: str) -> None:
    refused = ""
    try:
        found = read_values([text])
    except UserError as error:
        found, refused = {}, str(error)
    assert bool(found) != bool(refused)
    assert len(refused.splitlines()) <= 1
    assert all(isinstance(values, list) and values for values in found.values())


# What runs.


def planned(*typed: str, method: str = "fedper", **base: Any) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    lines, seeds = plan_sweep(method, read_values(typed), {**SMALL, **base})
    return [{key: line.config.flat()[key] for key in line.settings} for line in lines], seeds


def test_every_combination_is_run_the_last_key_fastest() -> None:
    points, seeds = planned("lr=0.1,0.2", "rounds=3", "local_epochs=1,2,3", seed=7)
    assert [(point["lr"], point["local_epochs"]) for point in points] == [
        (lr, epochs) for lr in (0.1, 0.2) for epochs in (1, 2, 3)
    ]
    assert seeds == (7,)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4, unique=True),
    st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
)
def test_there_are_as_many_folders_as_combinations(epochs: list[int], batches: list[int]) -> None:
    typed = [f"local_epochs={','.join(map(str, epochs))}", f"batch_size={','.join(map(str, batches))}"]
    lines, _ = plan_sweep("fedper", read_values(typed), SMALL)
    assert len({line.name for line in lines}) == len({line.title for line in lines}) == len(epochs) * len(batches)
    assert all(Path(line.name).name == line.name for line in lines), "no name leads out of the folder"


@pytest.mark.parametrize("typed", ["seeds=0,2", "seeds=[0,2]"])
def test_seeds_are_not_swept_over(typed: str) -> None:
    points, seeds = planned("lr=0.1,0.2", typed)
    assert (len(points), seeds) == (2, (0, 2))


def test_folders_are_told_apart_where_values_are_no_names_and_stay_when_others_come() -> None:
    long = [f"network_options={{hidden: [{','.join(['8'] * k)}]}}" for k in (60, 61)]
    options = [read_values([one])["network_options"][0] for one in long]

    def names(key: str, values: list[Any]) -> list[str]:
        return [line.name for line in plan_sweep("fedper", {key: values}, {})[0]]

    for key, values in (("network_options", options), ("network", ["a/b:C", "a-b:C"])):
        found = names(key, values)
        assert len(set(found)) == 2
        assert all(Path(name).name == name and len(name) < 140 for name in found)
        assert names(key, values[::-1]) == found[::-1]
    assert names("network_options", [{"hidden": [8]}, *options])[1:] == names("network_options", options)
    assert names("lr", [0.1, 0.2]) == ["lr=0.1", "lr=0.2"]


def test_settings_that_ask_for_validation_data_and_others_train_on_the_same_rows() -> None:
    lines, _ = plan_sweep("pmixfed", read_values(["accuracy_on=test,validation"]), {})
    assert [line.config.experiment.validation_fraction for line in lines] == [0.1, 0.1]
    swept, _ = plan_sweep("pmixfed", read_values(["validation_fraction=0.2,0.3"]), {})
    assert [line.config.experiment.validation_fraction for line in swept] == [0.2, 0.3]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "no method is named"),
        ("lr=0.1,0.2", "no method is named"),
        ("nope lr=0.1,0.2", "unknown method 'nope'"),
        ("fedper", "no key has several values"),
        ("fedper lr=0.1 seeds=3", "no key has several values"),
        ("fedper lr=0.1,0.2,0.1", "lr=[0.1,0.2,0.1]: 0.1 is named twice"),
        ("fedper seed=0,1", "allowed: seeds="),
        ("fedper method=fedper,local", "allowed: tailor compare"),
        ("fedper lr=0.1,-1", "lr=-1"),
        ("fedper lrr=0.1,0.2", "unknown key 'lrr' for fedper; did you mean lr?"),
        ("fedper lr=0.1,0.2 fedavg", "'fedavg' is not a setting"),
        ("fedper lr=0.1,0.2 clients=5000 --out out", "clients=5000"),
        ("fedper lr=0.1,0.2 --jobs 0", "--jobs"),
        ("fedper lr=0.1,0.2 --resume", "--resume needs --out, the folder of the sweep"),
        ("fedper lr=0.1,0.2 --config none.yaml", "none.yaml"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: str, named: str, study: Tailor, tmp_path: Path
) -> None:
    status, _, err = study("sweep", *arguments.split())
    assert (status, err.count("\n")) == (2, 1), err
    assert named in err
    assert list(tmp_path.iterdir()) == []


# What comes out.

QUICK = (*pairs(), "-q", "--out", "out")


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_sweep_of_one_key_chooses_by_validation_data(study: Tailor, tmp_path: Path) -> None:
    arguments = ("fedper", "lr=0.001,0.1,0.3", "seeds=2", "validation_fraction=0.3", *QUICK)
    status, out, err = study("sweep", *arguments)
    assert (status, err) == (0, "")
    rows = read(tmp_path / "out/results.csv")
    assert [(row["lr"], row["seed"]) for row in rows] == [(lr, seed) for lr in ("0.001", "0.1", "0.3") for seed in "01"]
    means: dict[str, float] = {}
    for row in rows:
        found = summary(tmp_path / "out" / f"lr={row['lr']}" / f"seed-{row['seed']}")
        assert float(row["validation_accuracy"]) == found["validation_accuracy"]
        assert float(row["personalized_accuracy"]) == found["personalized_accuracy"]
        means[row["lr"]] = means.get(row["lr"], 0.0) + found["validation_accuracy"] / 2
    chosen = max(means, key=means.__getitem__)
    assert f"best by validation accuracy: lr={chosen} ({percent(means[chosen])} %, mean over 2 seeds" in out
    assert "results: out/results.csv\npicture: out/sweep.png\n" in out
    assert (tmp_path / "out/sweep.png").read_bytes().startswith(b"\x89PNG")
    statistics = read(tmp_path / "out/statistics.csv")
    assert [row["lr"] for row in statistics] == ["0.001", "0.1", "0.3"]
    assert float(statistics[1]["validation_accuracy"]) == pytest.approx(means["0.1"])
    alone = yaml.safe_load((tmp_path / "out/lr=0.1/seed-1/config.yaml").read_text())
    assert (alone["lr"], alone["seed"]) == (0.1, 1)
    # One that was killed goes on with what is missing.
    (tmp_path / "out/lr=0.3/seed-1/summary.json").unlink()
    status, again, _ = study("sweep", *arguments, "--resume")
    assert (status, again) == (0, out)


def test_without_validation_data_nothing_is_chosen(study: Tailor, tmp_path: Path) -> None:
    status, out, _ = study("sweep", "fedper", *QUICK, "lr=0.01,0.1", "personal_layers=1,2")
    assert status == 0
    assert "no setting is chosen: there is no validation data, and test data is not to choose by" in out
    assert "best" not in out
    assert (tmp_path / "out/sweep.png").is_file()
    assert sorted(path.name for path in (tmp_path / "out").glob("*=*")) == [
        f"lr={lr},personal_layers={layers}" for lr in ("0.01", "0.1") for layers in (1, 2)
    ]


def test_a_regression_is_swept_by_its_losses(study: Tailor, tmp_path: Path) -> None:
    own = pairs(data="synthetic-regression", partition="natural", samples=12, samples_per_client=None)
    arguments = ("sweep", "local", "lr=0.001,0.01,0.1", *own, "-q", "--out")
    status, out, _ = study(*arguments, "out", "validation_fraction=0.2")
    assert status == 0
    losses = {row["lr"]: float(row["validation_loss"]) for row in read(tmp_path / "out/results.csv")}
    chosen = min(losses, key=losses.__getitem__)
    assert f"best by validation loss: lr={chosen} ({losses[chosen]:.4g})" in out
    assert float(read(tmp_path / "out/statistics.csv")[0]["validation_loss"]) == losses["0.001"]
    assert (tmp_path / "out/sweep.png").is_file()
    status, out, _ = study(*arguments, "blind")
    assert status == 0
    assert "no setting is chosen: there is no validation data" in out


def test_a_number_is_known_by_its_value_however_it_is_spelled() -> None:
    lines, _ = plan_sweep("fedper", {"lr": ["1e-1", 0.01, "1E-3"], "network": ["mlp"]}, SMALL)
    assert [line.name for line in lines] == ["lr=0.1", "lr=0.01", "lr=0.001"]
    assert [line.settings["lr"] for line in lines] == [0.1, 0.01, 0.001]
    with pytest.raises(UserError, match=r"lr=0.01 is named twice"):
        plan_sweep("fedper", {"lr": ["1e-2", 0.01]}, SMALL)


def grid(figures: dict[tuple[float, int], tuple[float | None, float]], seeds: tuple[int, ...] = (0, 1)) -> Grid:
    """A sweep of lr whose runs came to these validation and test accuracies."""
    lines, _ = plan_sweep("fedper", {"lr": [0.1, 0.2, 0.3]}, SMALL)
    made = Grid(Path("nowhere"), lines, seeds)
    by_value = {line.settings["lr"]: line for line in lines}
    for (lr, seed), (validation, test) in figures.items():
        made.summaries[by_value[lr], seed] = {"validation_accuracy": validation, "personalized_accuracy": test}
    return made


def test_the_choice_is_by_the_mean_over_seeds_of_validation_data_alone() -> None:
    figures = {(0.1, 0): (0.9, 0.1), (0.1, 1): (0.5, 0.1), (0.2, 0): (0.8, 0.0), (0.2, 1): (0.8, 0.0)}
    made = grid({**figures, (0.3, 0): (0.1, 1.0), (0.3, 1): (0.1, 1.0)})
    assert choice(made) == "best by validation accuracy: lr=0.2 (80.00 %, mean over 2 seeds)"


def test_a_setting_of_which_a_run_is_missing_does_not_compete() -> None:
    made = grid({(0.1, 0): (1.0, 0.1), (0.2, 0): (0.5, 0.1), (0.2, 1): (0.5, 0.1)})
    assert choice(made) == "best by validation accuracy: lr=0.2 (50.00 %, mean over 2 seeds)"
    assert choice(grid({(0.1, 0): (1.0, 0.1)})) == "no setting is chosen: of each a run is missing"
    assert "there is no validation data" in choice(grid({(0.1, 0): (None, 0.1), (0.1, 1): (None, 0.2)}))


def test_settings_that_cannot_run_are_named_and_the_others_are_measured(
    study: Tailor, tmp_path: Path, quick_workers: None
) -> None:
    others = [pair for pair in pairs() if not pair.startswith("clients_per_round")]
    arguments = ("sweep", "local", *others, "clients_per_round=2,9,3", "-q", "--out")
    status, out, err = study(*arguments, "out", "--jobs", "2")
    assert status == 1
    assert err == (
        "not measured: clients_per_round=9 (seed 0): clients_per_round=9: allowed are 1 to 5, the clients that train\n"
    )
    assert [row["clients_per_round"] for row in read(tmp_path / "out/results.csv")] == ["2", "3"]
    assert "results: out/results.csv" in out
    assert study(*arguments, "alone")[0] == 1
    for name in ("clients_per_round=2/seed-0", "clients_per_round=3/seed-0"):
        assert identical(tmp_path / "out" / name, tmp_path / "alone" / name)


def test_a_sweep_over_a_key_that_sets_another_has_names_and_a_command_as_they_were_typed(
    study: Tailor, tmp_path: Path
) -> None:
    typed = ("stages=1,2", "lr=0.01,0.1", *pairs(rounds=2))
    assert study("sweep", "ppfe", *typed, "-q", "--no-page", "--out", "out")[0] == 0
    page = page_data(read_results([tmp_path / "out"]))
    labels = ["stages=1, lr=0.01", "stages=1, lr=0.1", "stages=2, lr=0.01", "stages=2, lr=0.1"]
    assert [one["label"] for one in page["repeats"]] == labels
    [command] = {one["command"] for one in page["repeats"]}
    assert command.startswith("tailor sweep ppfe stages=1,2 lr=0.01,0.1 ")


def test_shown_values_are_those_that_yaml_reads() -> None:
    for value in (True, None, 3, 0.5, "word", [1, [2, "a"]], {"hidden": [8, 4], "flag": False}):
        assert yaml.safe_load(shown(value)) == value
    assert math.isclose(yaml.safe_load(shown(0.1 + 0.2)), 0.3)


def test_settings_that_tie_are_counted() -> None:
    tied = grid({(lr, seed): (0.8, 0.5) for lr in (0.1, 0.2) for seed in (0, 1)})
    assert choice(tied) == (
        "best by validation accuracy: lr=0.1 (80.00 %, mean over 2 seeds; 1 other has the same, the first is named)"
    )


def test_the_picture_has_a_line_for_each_combination_of_the_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, dict[float, list[float]]] = {}

    def noted(axes: Any, name: str, number: int, line: dict[float, list[float]]) -> None:
        drawn[name] = line
        draw_line(axes, name, number, line)

    monkeypatch.setattr("tailorfl.study.sweep.draw_line", noted)
    values = {"network": ["mlp", "linear"], "lr": [0.1, 0.2, 0.3], "local_epochs": [1, 2]}
    lines, seeds = plan_sweep("fedper", values, {**SMALL, "personal_layers": 1})
    made = Grid(tmp_path, lines, seeds)
    for number, line in enumerate(made.lines):
        made.summaries[line, 0] = {"validation_accuracy": 0.5, "personalized_accuracy": number / 16}
    draw_sweep(made, tmp_path / "sweep.png")
    assert drawn == {  # in per cent
        "network=mlp, local_epochs=1": {0.1: [0.0], 0.2: [12.5], 0.3: [25.0]},
        "network=mlp, local_epochs=2": {0.1: [6.25], 0.2: [18.75], 0.3: [31.25]},
        "network=linear, local_epochs=1": {0.1: [37.5], 0.2: [50.0], 0.3: [62.5]},
        "network=linear, local_epochs=2": {0.1: [43.75], 0.2: [56.25], 0.3: [68.75]},
    }
    drawn.clear()
    draw_sweep(grid({(0.1, 0): (0.9, 0.2), (0.1, 1): (0.7, 0.4), (0.2, 0): (0.8, 0.6)}), tmp_path / "one.png")
    assert drawn == {"test": {0.1: [20.0, 40.0], 0.2: [60.0]}, "validation": {0.1: [90.0, 70.0], 0.2: [80.0]}}

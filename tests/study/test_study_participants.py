"""What is reported of new participants: cold starts, clients that joined late, and the gaps; and what is refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from study_runs import clients, execute, identical, rounds, small

from tailorfl.errors import UserError
from tailorfl.federation.checkpoint import newest_checkpoint
from tailorfl.study.build import Built, build
from tailorfl.study.compare import write_table
from tailorfl.study.config import configure, read_config
from tailorfl.study.run import Run, restore

LATE: dict[str, Any] = {"clients": 8, "rounds": 5, "joining_clients": 2, "joining_round": 4, "evaluate_every": 1}
FIGURES = ("joining_accuracy", "cold_start_accuracy", "training_accuracy", "participation_gap", "out_of_sample_gap")


def as_it_ended(folder: Path) -> Built:
    """The run of a folder, with the server and the clients of its last checkpoint."""
    built = build(read_config(folder / "config.yaml"), partition=folder / "partition.safetensors")
    checkpoint = newest_checkpoint(folder / "checkpoints", torch.device("cpu"))
    assert checkpoint is not None
    restore(built, checkpoint)
    return built


def accuracy(built: Built, who: list[int], split: Any) -> float:
    """Of the global model on the rows of these clients, sample by sample."""
    data, hits, samples = built.data, 0, 0
    for client in who:
        rows = data.rows(split).of(client)
        outputs = built.network.forward(built.server.values, data.decode(data.inputs[rows]), None, train=False)
        hits += int((outputs.argmax(1) == data.targets[rows]).sum())
        samples += len(rows)
    return hits / samples


def loss(built: Built, who: list[int], split: Any) -> float:
    """The cross-entropy of the same, mean over all their rows together."""
    data = built.data
    rows = torch.cat([data.rows(split).of(client) for client in who])
    outputs = built.network.forward(built.server.values, data.decode(data.inputs[rows]), None, train=False)
    return float(torch.nn.functional.cross_entropy(outputs, data.targets[rows]))


def test_the_gaps_of_a_run_are_those_counted_by_hand(tmp_path: Path) -> None:
    own = {**LATE, "partition": "dirichlet", "samples_per_client": None, "new_clients": 2, "lr": 0.05}
    summary = execute(tmp_path / "run", "fedavg", **own, evaluate_training=True)
    built = as_it_ended(tmp_path / "run")
    late, new = list(built.data.joining_clients), list(built.data.new_clients)
    trained = [client for client in range(8) if client not in new]
    served, training = accuracy(built, trained, "test"), accuracy(built, trained, "train")
    assert summary["personalized_accuracy"] == pytest.approx(served)
    assert summary["training_accuracy"] == pytest.approx(training)
    assert summary["own_training_loss"] == pytest.approx(loss(built, trained, "train"))
    assert summary["out_of_sample_gap"] == pytest.approx(training - served)
    assert summary["participation_gap"] == pytest.approx(served - accuracy(built, new, "test"))
    assert summary["joining_accuracy"] == pytest.approx(accuracy(built, late, "test"))
    assert 0 not in (summary["out_of_sample_gap"], summary["participation_gap"])


def test_the_cold_start_is_the_last_accuracy_before_they_join(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", "fedper", **{**LATE, "evaluate_every": 0})
    lines = {line["round"]: line for line in rounds(tmp_path / "run") if "joining_accuracy" in line}
    assert list(lines) == [3, 5]
    assert summary["cold_start_accuracy"] == lines[3]["joining_accuracy"]
    assert summary["cold_start_loss"] == lines[3]["joining_loss"]
    assert summary["joining_accuracy"] == lines[5]["joining_accuracy"]
    assert summary["cold_start_loss"] > summary["joining_loss"]
    assert not any(key.startswith("cold_start") for line in lines.values() for key in line)


def test_without_new_participants_nothing_is_said_of_them(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", "fedavg")
    assert {summary[key] for key in (*FIGURES, "joining_loss", "cold_start_loss")} == {None}


@pytest.mark.parametrize("method", ["fedper", "ppfe", "pfedhn"])
@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_resumed_run_lets_the_same_clients_join_in_the_same_round(tmp_path: Path, method: str, after: int) -> None:
    own = {**LATE, "new_clients": 1, "evaluate_training": True}
    execute(tmp_path / "whole", method, **own)
    seen: list[int] = []
    folder = tmp_path / "run"
    config = small(method, **own)
    run = Run(config, folder, watch=lambda line: seen.append(line["round"]), stop=lambda: seen[-1] == after)
    assert run.execute() is None
    assert Run(read_config(folder / "config.yaml"), folder).execute(resume=True) is not None
    assert identical(tmp_path / "whole", folder)


def test_a_run_killed_before_its_summary_still_knows_its_cold_start(tmp_path: Path) -> None:
    summary = execute(tmp_path / "run", **LATE)
    for name in ("summary.json", "clients.csv"):
        (tmp_path / "run" / name).unlink()
    again = Run(small(**LATE), tmp_path / "run").execute(resume=True)
    assert again is not None
    assert {key: again[key] for key in FIGURES} == {key: summary[key] for key in FIGURES}


def test_the_table_of_clients_shows_when_each_joined(tmp_path: Path) -> None:
    execute(tmp_path / "run", **LATE, new_clients=1)
    built = build(small(**LATE, new_clients=1))
    expected = {str(client): ("0", "1") for client in range(8)}
    expected |= {str(client): ("0", "4") for client in built.data.joining_clients}
    expected |= {str(client): ("1", "") for client in built.data.new_clients}
    assert {row["client"]: (row["new"], row["joined"]) for row in clients(tmp_path / "run")} == expected


def test_clients_who_could_not_join_before_the_target_was_reached_are_new(tmp_path: Path) -> None:
    own = {**LATE, "target_accuracy": 0.05, "validation_fraction": 0.2, "lr": 0.1, "local_epochs": 5}
    summary = execute(tmp_path / "run", **own)
    assert summary["rounds"] < 4
    assert summary["cold_start_accuracy"] == summary["joining_accuracy"] is not None
    rows = clients(tmp_path / "run")
    assert sorted((row["new"], row["joined"]) for row in rows) == [("0", "1")] * 6 + [("1", "4")] * 2
    tests = sum(int(row["test"]) for row in rows if row["new"] == "0")
    right = sum(float(row["accuracy"]) * int(row["test"]) for row in rows if row["new"] == "0")
    assert summary["personalized_accuracy"] == pytest.approx(right / tests)


def test_a_regression_has_losses_of_new_participants_and_no_gaps(tmp_path: Path) -> None:
    own = {"data": "synthetic-regression", "partition": "natural", "samples": 12, "samples_per_client": None}
    summary = execute(tmp_path / "run", "fedper", **LATE, **own, new_clients=1, evaluate_training=True)
    assert {summary[key] for key in FIGURES} == {None}
    assert summary["joining_loss"] > 0
    assert summary["cold_start_loss"] == rounds(tmp_path / "run")[2]["joining_loss"] > 0


def test_detectors_have_cold_starts_and_gaps(tmp_path: Path) -> None:
    shapes = {
        "data": "synthetic-detection", "classes": 2, "clients": 4, "samples": 12, "image_size": 32, "device": "cpu",
        "network_options": {"stages": 3}, "rounds": 2, "local_epochs": 3, "batch_size": 6, "lr": 0.03,
        "joining_clients": 1, "joining_round": 2, "new_clients": 1, "evaluate_training": True,
    }  # fmt: skip
    summary = Run(configure("fedper", shapes), tmp_path / "run").execute()
    assert summary is not None
    assert all(summary[key] is not None for key in FIGURES)
    assert 0 < summary["training_accuracy"] <= 1
    gap = summary["training_accuracy"] - summary["personalized_accuracy"]
    assert summary["out_of_sample_gap"] == pytest.approx(gap)


def test_in_groups_clients_of_each_join_late(tmp_path: Path) -> None:
    groups = [{"clients": 3, "image_size": 16, "classes": 10}, {"clients": 4, "image_size": 8, "classes": 5}]
    settings = {
        "data": "digits", "groups": groups, "network": "stride-cnn", "base_size": 4, "partition": "iid", "rounds": 3,
        "samples_per_client": 30, "clients_per_round": 0.5, "selection": "per-group", "local_epochs": 1,
        "joining_clients": 2, "joining_round": 3, "evaluate_every": 1, "device": "cpu",
    }  # fmt: skip
    config = configure("scalablefl", settings)
    built = build(config)
    late = set(built.data.joining_clients)
    assert sorted(built.data.group_of[client] for client in late) == [0, 0, 1, 1]
    records = list(built.loop.run())
    assert [len(record.selected) for record in records] == [2, 2, 4]  # of 1 and 2, then of 3 and 4 clients
    assert not any(late & set(record.selected) for record in records[:2])
    assert Run(config, tmp_path / "run").execute() is not None
    assert [len(line["group_accuracies"]) for line in rounds(tmp_path / "run")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"joining_clients": 2}, "joining_clients=2: when they join is missing; allowed: a joining_round from 2 to 3"),
        ({"joining_clients": 2, "joining_round": 1}, "joining_round=1: allowed are rounds 2 to 3"),
        ({"joining_clients": 2, "joining_round": 4}, "joining_round=4: allowed are rounds 2 to 3"),
        ({"joining_round": 2}, "joining_round=2: nobody joins then; allowed: it and joining_clients of 1 or more"),
        ({"joining_clients": 2, "joining_round": 1, "rounds": 1}, "rounds=1: clients cannot join later; allowed: 2"),
        ({"joining_clients": 5, "joining_round": 2}, "joining_clients=5 of 5 clients; allowed: 0 to 4, so that"),
        ({"joining_clients": -1, "joining_round": 2}, "joining_clients=-1 of 5 clients; allowed: 0 to 4"),
        (
            {"joining_clients": 3, "joining_round": 2, "new_clients": 2},
            "joining_clients=3 of 5 clients, 2 of them new clients; allowed: 0 to 2",
        ),
        ({"joining_clients": 1, "joining_round": "soon"}, "joining_round=soon: input should be a valid integer"),
        ({"evaluate_training": "much"}, "evaluate_training=much: input should be a valid boolean"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        build(small(**settings))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_comparison_has_the_figures_of_new_participants(tmp_path: Path) -> None:
    execute(tmp_path / "run", **LATE)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    with write_table([summary], tmp_path).open() as file:
        [row] = csv.DictReader(file)
    assert float(row["cold_start_accuracy"]) == summary["cold_start_accuracy"]

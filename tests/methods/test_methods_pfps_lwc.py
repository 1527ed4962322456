"""PFPS-LWC: recall, the light classifier, and what a client keeps."""

import csv
import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from method_runs import IMAGES, SMALL, differences, federation, run, state
from torch.nn import functional as F

from tailorfl.cohort import Batch, Client
from tailorfl.cohort.objective import cross_entropy
from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message
from tailorfl.methods.pfps_lwc import BODY, Light, Recall
from tailorfl.models import Network, build_module
from tailorfl.models.network import Values
from tailorfl.study.build import Built
from tailorfl.study.config import configure
from tailorfl.study.run import Run

TWO = {"network_options": {"hidden": [12, 8]}}


def batch_of(network: Network, samples: int, classes: int) -> Batch:
    inputs = torch.randn(samples, *(1, 8, 8), dtype=torch.float64)
    ones = torch.ones(samples, dtype=torch.float64)
    return Batch(inputs, torch.arange(samples) % classes, ones, ones, torch.tensor(float(samples)))


def network() -> Network:
    torch.manual_seed(0)
    return Network(build_module("mlp", (1, 8, 8), 4, hidden=[6, 5]).double())


# Limits.


@pytest.mark.parametrize("extra", [TWO, IMAGES, {**TWO, "personal_layers": 2}], ids=["mlp", "norms", "two layers"])
def test_without_recall_and_penalty_it_is_fedper_to_the_bit(extra: dict) -> None:
    ours, theirs = federation("pfps-lwc", recall_epochs=0, lam=0, **extra), federation("fedper", **extra)
    one, other = run(ours), run(theirs)
    assert not differences(state(ours), state(theirs))
    assert [r.loss for r in one] == [r.loss for r in other]
    assert one[-1].evaluation is not None
    assert other[-1].evaluation is not None
    assert one[-1].evaluation.personalized.loss.tolist() == other[-1].evaluation.personalized.loss.tolist()


def test_recall_before_evaluation_alone_leaves_training_to_fedper() -> None:
    ours, theirs = federation("pfps-lwc", recall_when="evaluation", lam=0, **TWO), federation("fedper", **TWO)
    one, other = run(ours)[-1].evaluation, run(theirs)[-1].evaluation
    assert not differences(ours.server.values, theirs.server.values)
    assert one is not None
    assert other is not None
    assert one.personalized.loss.tolist() != other.personalized.loss.tolist()


@pytest.mark.parametrize("when", ["training", "evaluation", "both"])
def test_a_client_is_served_by_what_it_receives_or_by_what_it_recalls(when: str) -> None:
    built = federation("pfps-lwc", recall_when=when, **TWO)
    run(built)
    message = Message(built.server.values)
    (cohort,) = built.federation.served(4, range(6), message)
    (raw,) = built.federation.served(4, range(6), message)
    raw.load(message.tensors)
    if when != "training":
        built.federation.method.recall(raw)
    assert not differences(cohort.values, raw.values)


def test_a_preset_gives_defaults_and_what_is_given_wins() -> None:
    paper = configure("pfps-lwc", {"preset": "paper", "data": "digits"}).method
    assert (paper.recall_when, paper.recall_epochs, paper.lam) == ("training", 1, 0.02)
    assert configure("pfps-lwc", {"preset": "paper", "lam": 0.5, "data": "digits"}).method.lam == 0.5
    assert configure("pfps-lwc", {"data": "digits"}).method.recall_when == "both"


def test_the_first_time_nobody_recalls() -> None:
    ours, theirs = federation("pfps-lwc", lam=0, rounds=1, **TWO), federation("fedper", rounds=1, **TWO)
    run(ours)
    run(theirs)
    assert not differences(ours.server.values, theirs.server.values)


# Recall.


def test_the_recall_loss_is_one_minus_the_cosine_of_the_features() -> None:
    net = network()
    values, batch = net.initial(), batch_of(net, 3, 4)
    before = {name: torch.randn_like(tensor) for name, tensor in values.items() if not name.startswith("head")}
    found = Recall()(Client(net, values, before, {}), batch)
    flat = batch.inputs.flatten(1)

    def features(weights: Values) -> torch.Tensor:
        hidden = F.relu(flat @ weights["fc1.linear.weight"].T + weights["fc1.linear.bias"])
        return F.relu(hidden @ weights["fc2.linear.weight"].T + weights["fc2.linear.bias"])

    new, old = features(values), features(before)
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(new, old, strict=True)]
    assert float(found) == pytest.approx(1 - sum(cosines) / 3)
    earlier = Recall(2)(Client(net, values, before, {}), batch)
    hidden = [F.relu(flat @ w["fc1.linear.weight"].T + w["fc1.linear.bias"]) for w in (values, before)]
    assert float(earlier) == pytest.approx(float(1 - F.cosine_similarity(*hidden).mean()))


def test_a_body_that_is_already_known_is_left_alone() -> None:
    net = network()
    values = net.initial()
    body = {name: tensor for name, tensor in values.items() if not name.startswith("head")}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in body.items()}
    loss = Recall()(Client(net, {**values, **leaves}, body, {}), batch_of(net, 5, 4))
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert all(grad.abs().max() < 1e-9 for grad in torch.autograd.grad(loss, list(leaves.values())))


def cohort_that_comes_back(**settings: Any) -> tuple[Built, Any]:
    """Everybody took part twice; now they receive a body that they do not know."""
    built = federation("pfps-lwc", **{**TWO, "clients_per_round": 6, "rounds": 2, "local_epochs": 3, **settings})
    run(built)
    torch.manual_seed(1)
    strange = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in built.server.values.items()}
    cohort = built.federation.cohort(3, tuple(range(6)), Message())
    cohort.load(strange)
    return built, cohort


def similarity_loss(built: Built, cohort: Any) -> float:
    before = {name: cohort.memory[BODY + name] for name in built.server.values}
    now = cohort.features()
    cohort.values, kept = {**cohort.values, **before}, cohort.values
    then = cohort.features()
    cohort.values = kept
    return float((1 - F.cosine_similarity(now, then, dim=-1)).mean())


@pytest.mark.parametrize("layers", [1, 2])
def test_recall_brings_the_features_closer_and_leaves_the_head(layers: int) -> None:
    built, cohort = cohort_that_comes_back(recall_epochs=5, recall_lr=0.1, recall_layers=layers)
    head = cohort.values["head.weight"].clone()
    before = similarity_loss(built, cohort)
    built.config.method.recall(cohort)
    assert similarity_loss(built, cohort) < 0.8 * before
    assert torch.equal(cohort.values["head.weight"], head)


def test_a_recall_strong_enough_undoes_forgetting() -> None:
    built, cohort = cohort_that_comes_back(recall_epochs=60, recall_lr=0.2, local_epochs=20)
    forgotten = cohort.evaluate("train").correct.sum()
    built.config.method.recall(cohort)
    known = {name: cohort.memory[BODY + name] for name in built.server.values}
    recalled = cohort.evaluate("train").correct.sum()
    cohort.load(known)
    assert cohort.evaluate("train").correct.sum() >= recalled >= forgotten


def test_only_those_who_took_part_before_recall() -> None:
    built, cohort = cohort_that_comes_back()
    cohort.memory["last_round"][2] = 0
    received = {name: cohort.values[name].clone() for name in built.server.values}
    built.config.method.recall(cohort)
    moved = [
        row for row in range(6) if any(not torch.equal(cohort.values[n][row], t[row]) for n, t in received.items())
    ]
    assert moved == [0, 1, 3, 4, 5]


def test_a_client_that_was_away_recalls_the_body_of_its_last_round() -> None:
    built = federation("pfps-lwc", **{**TWO, "clients_per_round": 1, "rounds": 12, "seed": 2, "evaluate_every": 0})
    took_part: dict[int, int] = {}
    for record in built.loop.run():
        [client] = record.selected
        for other, number in took_part.items():
            if other != client:
                assert int(built.federation.store.entries[other]["memory/last_round"]) == number
        took_part[client] = record.number
        kept = built.federation.store.entries[client]
        # One client a round: the body that it sent is the new global one, and what it keeps.
        for name, tensor in built.server.values.items():
            torch.testing.assert_close(kept[f"memory/{BODY}{name}"], tensor)
    assert len(took_part) > 2


# The light classifier.


def test_the_penalty_is_the_norm_of_the_head_and_its_gradient_a_unit_vector() -> None:
    net = network()
    values, batch = net.initial(), batch_of(net, 6, 4)
    head = net.layers[-1].parameters
    leaves = {name: values[name].clone().requires_grad_() for name in net.parameters}
    plain = torch.autograd.grad(cross_entropy(Client(net, leaves, {}, {}), batch), list(leaves.values()))
    loss = Light(cross_entropy, 0.3, head)(Client(net, leaves, {}, {}), batch)
    found = torch.autograd.grad(loss, list(leaves.values()))
    norm = math.sqrt(sum(float((values[name] ** 2).sum()) for name in head))
    assert loss.item() == pytest.approx(float(cross_entropy(Client(net, values, {}, {}), batch)) + 0.3 * norm)
    for name, one, other in zip(leaves, found, plain, strict=True):
        expected = 0.3 * values[name] / norm if name in head else torch.zeros_like(values[name])
        torch.testing.assert_close(one - other, expected)


@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_a_head_of_zeros_has_no_penalty_and_trains_on(engine: str) -> None:
    settings = {**TWO, "lam": 5.0, "rounds": 1, "lr": 1e-9, "momentum": 0.0, "engine": engine}
    built = federation("pfps-lwc", **settings)
    zeros = {
        name: torch.zeros_like(t) if name.startswith("head") else t for name, t in built.federation.initial[0].items()
    }
    built.federation.initial[0] = zeros
    run(built)
    for kept in built.federation.store.entries.values():
        assert kept["head.weight"].isfinite().all()
        assert float(kept["head.weight"].abs().max()) < 1e-6


def test_a_large_penalty_makes_the_head_small() -> None:
    norms = []
    for lam in (0.0, 0.5):
        built = federation("pfps-lwc", lam=lam, **{**TWO, "local_epochs": 10, "clients_per_round": 6})
        run(built)
        norms.append(sum(float(kept["head.weight"].norm()) for kept in built.federation.store.entries.values()))
    assert norms[1] < 0.8 * norms[0]


# Runs.


def test_forgetting_is_measured_client_by_client(tmp_path: Path) -> None:
    settings = {**SMALL, **TWO, "rounds": 5, "clients_per_round": 2, "forgetting": True, "seed": 4, "evaluate_every": 1}
    assert Run(configure("pfps-lwc", settings), tmp_path / "run").execute() is not None
    with (tmp_path / "run" / "measures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 6
    assert {row["rounds_away"] for row in rows if row["round"] == "1"} == {"0.0", ""}
    last = [row for row in rows if row["round"] == "5"]
    assert max(float(row["rounds_away"] or 0) for row in last) > 0
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        served = {row["client"]: float(row["accuracy"]) for row in csv.DictReader(file)}
    for row in last:
        assert float(row["recalled_accuracy"]) == pytest.approx(served[row["client"]])
        assert (row["rounds_away"] == "") == (row["kept_accuracy"] == "")
        if not row["rounds_away"]:
            assert row["recalled_accuracy"] == row["received_accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    kept = [float(row["kept_accuracy"]) for row in rows if row["round"] == "1" and row["kept_accuracy"]]
    assert len(kept) == 2
    assert lines[0]["kept_accuracy"] == pytest.approx(mean(kept))
    assert lines[0]["rounds_away"] == 0


def test_where_there_are_no_classes_forgetting_is_a_loss() -> None:
    data = {"data": "synthetic-regression", "partition": "natural", "samples": 60, "samples_per_client": None}
    built = federation("pfps-lwc", **{**TWO, **data, "dimension": 5, "network": "mlp", "lr": 0.01}, forgetting=True)
    found = run(built)[-1].evaluation
    assert found is not None
    assert set(found.measures) == {"rounds_away", "received_loss", "recalled_loss", "kept_loss"}
    assert all(value > 0 for value in found.measures["received_loss"].values())


def test_measuring_forgetting_changes_nothing_else() -> None:
    plain, measured = federation("pfps-lwc", **TWO), federation("pfps-lwc", forgetting=True, **TWO)
    run(plain)
    run(measured)
    assert not differences(state(plain), state(measured))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recall_layers": 3}, "mlp has 3 layers; allowed: 1 to 2"),
        ({"network": "linear", "network_options": {}}, "allowed: recall_epochs=0, or a network of more layers"),
        ({"recall_epochs": -1}, "greater than or equal to 0"),
        ({"lam": -0.1}, "greater than or equal to 0"),
        ({"recall_lr": 0}, "greater than 0"),
        ({"recall_when": "never"}, "'training', 'evaluation' or 'both'"),
        ({"preset": "other"}, "'best' or 'paper'"),
        ({"forgetting": True, "evaluate": "trained"}, "allowed: evaluate=paper"),
        ({"forgetting": True, "finetune_epochs": 1}, "allowed: evaluate=paper"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        federation("pfps-lwc", **{**TWO, **settings})

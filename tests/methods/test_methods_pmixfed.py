"""pMixFed: mix factors and degrees by hand, what travels, its limits, and mixing inside FedAlt and FedSim."""

import csv
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_runs import SMALL, differences, federation, run, state, whole_and_resumed
from torch import Tensor

from tailorfl.errors import UserError
from tailorfl.exchange.messages import Message, Server
from tailorfl.methods.mixing import DOWN, OWN, UP, degrees_down, degrees_up, mix_factor, relative
from tailorfl.methods.pmixfed import PMixFed
from tailorfl.models.network import Values
from tailorfl.study.build import Built
from tailorfl.study.compare import configure_all
from tailorfl.study.config import configure
from tailorfl.study.run import Run

EVERYBODY = {"clients_per_round": 6, "network_options": {"hidden": [8, 8]}}  # three layers
FIXED = {**EVERYBODY, "mix": "fixed"}


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def own_model(built: Built, client: int) -> Values:
    store, initial = built.federation.store, built.network.initial()
    return {
        name: store.stack((client,), f"memory/{OWN}{name}", initial[name], torch.device("cpu"))[0]
        for name in built.network.names
    }


# Factors and degrees.


@pytest.mark.parametrize(
    ("accuracy", "progress", "expected"),
    [
        (1.0, 0.3, 0.5),
        (2.0, 0.5, 1 - 1 / (1 + math.exp(-1.5))),
        (0.0, 1.0, 1 - 1 / (1 + math.exp(1.0))),
        (0.5, 0.0, 0.5),
        (math.inf, 0.1, 0.0),
        (math.nan, 0.7, 0.5),
    ],
)
def test_the_mix_factor_by_hand(accuracy: float, progress: float, expected: float) -> None:
    assert mix_factor(numbers(accuracy), progress).item() == pytest.approx(expected)


def test_relative_accuracy_of_nobody_and_of_zero() -> None:
    assert relative(numbers(0.6, 0.3), 0.4).tolist() == pytest.approx([1.5, 0.75])
    assert relative(numbers(0.6, 0.0), 0.0).tolist() == [math.inf, 1.0]
    assert relative(numbers(0.6, math.nan), math.nan).isnan().all()
    assert relative(numbers(math.nan), 0.5).isnan().all()
    assert mix_factor(relative(numbers(math.nan), 0.0), 0.5).item() == 0.5


def test_degrees_by_hand_and_at_the_clamps() -> None:
    mu = numbers(0.3, 0.0, 1.0)
    assert degrees_down(mu, 5)[0].tolist() == pytest.approx([1, 0.9, 0.6, 0.3, 0])
    assert degrees_up(mu, 5)[0].tolist() == pytest.approx([0.7, 0.4, 0.1, 0, 0])
    assert degrees_down(mu, 5)[1].tolist() == [0, 0, 0, 0, 0]
    assert degrees_up(mu, 5)[1].tolist() == [1, 1, 1, 1, 1]
    assert degrees_down(mu, 5)[2].tolist() == [1, 1, 1, 1, 0]
    assert degrees_up(mu, 5)[2].tolist() == [0, 0, 0, 0, 0]
    assert degrees_down(numbers(0.4), 1).tolist() == [[0]]  # one layer is a head
    assert degrees_up(numbers(0.4), 1)[0].tolist() == pytest.approx([0.6])


@given(st.floats(0, 1), st.integers(1, 20))
def test_degrees_are_shares_and_fall_from_base_to_head(mu: float, layers: int) -> None:
    for degrees in (degrees_down(numbers(mu), layers)[0], degrees_up(numbers(mu), layers)[0]):
        assert ((degrees >= 0) & (degrees <= 1)).all()
        assert (degrees.diff() <= 1e-12).all()


def test_a_client_that_does_better_than_others_listens_less() -> None:
    factors = mix_factor(numbers(0.5, 0.9, 1.0, 1.1, 2.0), 0.8)
    assert (factors.diff() < 0).all()


# Rounds by hand.


def test_two_rounds_by_hand() -> None:
    built = federation("pmixfed", **FIXED, mu=0.4, rounds=2)
    before, mixed_in = built.network.initial(), {}
    layers = {name: place for place, layer in enumerate(built.network.layers) for name in layer.names}
    up = degrees_up(numbers(0.4), 3)[0].float()
    counts = built.data.train.counts.float()

    def aggregated(common: Values) -> Values:
        trained = [own_model(built, client) for client in range(6)]
        found = {}
        for name, place in layers.items():
            mixed = [up[place] * common[name] + (1 - up[place]) * own[name] for own in trained]
            found[name] = sum(w * m for w, m in zip(counts, mixed, strict=True)) / counts.sum()
        return found

    built.loop.round(1)
    after_one = aggregated(before)
    close(built.server.values, after_one)

    down = degrees_down(numbers(0.4), 3)[0].float()
    kept = {client: own_model(built, client) for client in range(6)}
    method = built.federation.method
    original = PMixFed.train_alone

    def watched(self: PMixFed, clients: Any, received: Message) -> Values:
        for row, client in enumerate(clients.clients):
            mixed_in[client] = {name: tensor[row].clone() for name, tensor in received.tensors.items()}
        return original(self, clients, received)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(method), "train_alone", watched)
        built.loop.round(2)
    for client, own in kept.items():
        expected = {n: down[p] * after_one[n] + (1 - down[p]) * own[n] for n, p in layers.items()}
        close(mixed_in[client], expected)
        head = built.network.layers[-1].names
        assert all(torch.equal(mixed_in[client][name], own[name]) for name in head)
    close(built.server.values, aggregated(after_one))


def test_accuracies_make_the_factors() -> None:
    """Of round 2: a client's accuracy on validation data over the mean of round 1's, and the global model's mean."""
    built = federation("pmixfed", **EVERYBODY, rounds=4, validation_fraction=0.25, local_epochs=5)
    first = built.loop.round(1).notes
    own = {client: note["accuracy"] for client, note in first.items()}
    assert len(set(own.values())) > 1
    everyone = sum(own.values()) / 6
    common = sum(note["global_accuracy"] for note in first.values()) / 6
    second = built.loop.round(2).notes
    for client, note in second.items():
        assert note["mu_down"] == pytest.approx(mix_factor(numbers(own[client] / everyone), 2 / 4).item())
        assert note["mu_up"] == pytest.approx(mix_factor(numbers(common), 2 / 4).item())
        assert note["down_3"] == 0
        assert first[client]["down_3"] == 1  # who never trained takes all


def test_the_overall_accuracy_may_be_that_of_the_global_model() -> None:
    built = federation("pmixfed", **EVERYBODY, rounds=4, validation_fraction=0.25, overall="global", local_epochs=5)
    first = built.loop.round(1).notes
    common = sum(note["global_accuracy"] for note in first.values()) / 6
    for client, note in built.loop.round(2).notes.items():
        ratio = relative(numbers(first[client]["accuracy"]), common)
        assert note["mu_down"] == pytest.approx(mix_factor(ratio, 2 / 4).item())


def test_reported_accuracies_are_those_of_the_data_that_is_named() -> None:
    for where in ("validation", "test"):
        built = federation("pmixfed", **EVERYBODY, validation_fraction=0.25, accuracy_on=where, rounds=2)
        notes = built.loop.round(1).notes
        for client in range(6):
            rows = built.data.rows(where).of(client)
            inputs, targets = built.data.decode(built.data.inputs[rows]), built.data.targets[rows]
            for key, values in (("accuracy", own_model(built, client)), ("global_accuracy", built.network.initial())):
                outputs = built.network.forward(values, inputs, None, train=False)
                assert notes[client][key] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())


def test_gradual_factors_fall_with_the_rounds() -> None:
    built = federation("pmixfed", **EVERYBODY, mix="gradual", rounds=4)
    factors = [record.notes[0]["mu_down"] for record in run(built)]
    assert factors == pytest.approx([1, 0.75, 0.5, 0.25])


def degrees_of(method: PMixFed, round: int, clients: tuple[int, ...], seed: int = 0) -> Tensor:
    network = federation("pmixfed", **EVERYBODY).network
    known = {f"accuracy/{client}": 0.5 for client in range(200)}
    server = Server(network.initial(), numbers=known, round=round, seed=seed, rounds=30)
    return method.mixed_for(server, clients, network).up


def test_random_degrees_belong_to_seed_round_and_client() -> None:
    method = PMixFed(mix="random")
    together = degrees_of(method, 3, (0, 1, 2))
    assert torch.equal(degrees_of(method, 3, (1,))[0], together[1])
    for other in (degrees_of(method, 4, (0, 1, 2)), degrees_of(method, 3, (0, 1, 2), seed=1)):
        assert not torch.equal(other, together)
    assert len({tuple(row) for row in together.tolist()}) == 3


def test_degrees_of_three_phases_are_extreme_then_even_then_in_between() -> None:
    method, clients = PMixFed(mix="phases"), tuple(range(200))
    spread = [degrees_of(method, round, clients).std().item() for round in (1, 10, 11, 20, 21, 30)]
    beta = [math.sqrt(1 / (4 * (2 * a + 1))) for a in (0.1, 0.1, 100, 100, 10, 10)]  # deviation of Beta(a, a)
    assert spread == pytest.approx(beta, rel=0.15)


# Limits.


def test_with_all_of_the_global_model_it_is_fedavg() -> None:
    settings = {**FIXED, "mu": 1.0, "mix_head": True}
    mixed, plain = federation("pmixfed", **settings), federation("fedavg", **EVERYBODY)
    records = [run(mixed), run(plain)]
    close(mixed.server.values, plain.server.values)
    assert [r.loss for r in records[0]] == pytest.approx([r.loss for r in records[1]], rel=1e-4)


def test_with_all_but_the_head_the_body_is_that_of_fedper() -> None:
    mixed, plain = federation("pmixfed", **FIXED, mu=1.0), federation("fedper", **EVERYBODY)
    run(mixed), run(plain)
    close({name: mixed.server.values[name] for name in plain.server.values}, plain.server.values)


def test_with_none_of_it_it_is_local_training() -> None:
    mixed, alone = federation("pmixfed", **FIXED, mu=0.0), federation("local", **EVERYBODY)
    run(mixed), run(alone)
    close(mixed.server.values, mixed.network.initial())
    store, initial = alone.federation.store, alone.network.initial()
    for client in range(6):
        expected = {n: store.stack((client,), n, initial[n], torch.device("cpu"))[0] for n in initial}
        close(own_model(mixed, client), expected)


def test_a_network_of_one_layer_keeps_it() -> None:
    built = federation("pmixfed", clients_per_round=6, network="linear", network_options={}, mix="fixed", mu=0.5)
    built.loop.round(1)
    before = {name: tensor.clone() for name, tensor in built.server.values.items()}
    notes = built.loop.round(2).notes
    assert (notes[2]["down_1"], notes[2]["up_1"]) == (0, 0.5)
    assert differences(before, built.server.values)  # it teaches, though it does not listen


# What travels.


def test_layers_that_take_no_part_do_not_travel() -> None:
    built = federation("pmixfed", **FIXED, mu=0.0)
    first, second = built.loop.round(1), built.loop.round(2)
    whole, reports, degrees = 4 * built.network.size(), 2 * 8, 2 * 3 * 8
    assert first.bytes_down == 6 * (whole + degrees)  # who never trained receives it all
    assert second.bytes_down == 6 * degrees
    assert first.bytes_up == second.bytes_up == 6 * reports


def test_only_the_head_stays_away_with_a_fixed_factor() -> None:
    built = federation("pmixfed", **FIXED, mu=0.5)
    built.loop.round(1)
    body = 4 * built.network.size(built.network.names_of(built.network.below(1)))
    assert built.loop.round(2).bytes_down == 6 * (body + 2 * 3 * 8)


@pytest.mark.parametrize(
    "settings",
    [
        {"mix": "random", "negligible": 0.3},
        {"mix": "phases", "rounds": 5},
        {"overall": "global", "lr": 0.2, "local_epochs": 3, "rounds": 5},
        {"negligible": 0.45, "lr": 0.2},
    ],
)
def test_what_is_sent_and_learned_does_not_depend_on_who_is_computed_together(settings: dict[str, Any]) -> None:
    found = []
    for size in (1, 6):
        built = federation("pmixfed", **{**EVERYBODY, **settings}, stack_size=size, precision="float64")
        records = run(built)
        found.append((built.server.values, [(r.bytes_down, r.bytes_up) for r in records], [r.notes for r in records]))
    close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert {client: pytest.approx(note, nan_ok=True) for client, note in one.items()} == other


def test_who_keeps_all_of_a_layer_votes_for_what_it_was() -> None:
    """With degrees of 1 for one of two clients, the layer moves half of the way that the other goes."""
    built = federation("pmixfed", clients=2, clients_per_round=2, network_options={"hidden": [8]}, mix="fixed", mu=0.5)
    before = built.network.initial()
    original = PMixFed.mixed_for

    def one_sided(self: PMixFed, server: Server, clients: Any, network: Any) -> Any:
        mix = original(self, server, clients, network)
        up = torch.stack(
            [torch.full_like(row, float(client == 0)) for client, row in zip(clients, mix.up, strict=True)]
        )
        return replace(mix, up=up)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PMixFed, "mixed_for", one_sided)
        record = built.loop.round(1)
    weight = built.data.train.counts[1] / built.data.train.counts.sum()
    trained = own_model(built, 1)
    close(built.server.values, {n: before[n] + weight * (trained[n] - before[n]) for n in before})
    assert record.bytes_up == 4 * built.network.size() + 2 * 2 * 8  # one model, and the reports of both


def test_the_configuration_of_a_run_says_nothing_of_its_length() -> None:
    assert configure("pmixfed", SMALL).flat()["horizon"] is None
    built = federation("pmixfed", **EVERYBODY, mix="gradual", rounds=4, horizon=8)
    assert [record.notes[0]["mu_down"] for record in run(built)] == pytest.approx([1, 0.875, 0.75, 0.625])


def test_negligible_degrees_are_none() -> None:
    built = federation("pmixfed", **FIXED, mu=0.04, negligible=0.05)
    built.loop.round(1)
    note = built.loop.round(2).notes[0]
    assert [note[f"down_{place}"] for place in (1, 2, 3)] == pytest.approx([0.08, 0, 0])
    assert [note[f"up_{place}"] for place in (1, 2, 3)] == pytest.approx([1, 0.92, 0.88])


def test_a_client_without_validation_data_has_the_factor_of_an_average_one() -> None:
    built = federation("pmixfed", **EVERYBODY, validation_fraction=0.0)
    records = run(built)
    assert all(note["mu_down"] == 0.5 for record in records for note in record.notes.values())
    assert all(math.isnan(note["accuracy"]) for record in records for note in record.notes.values())


def test_a_comparison_holds_out_the_same_rows_for_all() -> None:
    configs = configure_all(["fedavg", "pmixfed"], {"data": "digits", "clients": 4})
    assert [config.experiment.validation_fraction for config in configs] == [0.1, 0.1]
    given = configure_all(["fedavg", "pmixfed"], {"data": "digits", "validation_fraction": 0})
    assert [config.experiment.validation_fraction for config in given] == [0, 0]


def test_no_validation_data_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        federation("pmixfed", validation_fraction=0.0)
    assert "every client counts as an average one" in caplog.text


def test_accuracies_come_from_held_out_data_unless_it_is_told_otherwise() -> None:
    assert configure("pmixfed", SMALL).experiment.validation_fraction == 0.1
    assert configure("pmixfed", {**SMALL, "validation_fraction": 0.3}).experiment.validation_fraction == 0.3
    for settings in ({"mix": "fixed"}, {"accuracy_on": "test"}):
        assert configure("pmixfed", {**SMALL, **settings}).experiment.validation_fraction == 0
    assert configure("fedsim", SMALL).experiment.validation_fraction == 0
    assert configure("fedsim", {**SMALL, "mix": "sigmoid"}).experiment.validation_fraction == 0.1


def test_training_by_test_accuracy_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        federation("pmixfed", accuracy_on="test")
    assert "which is then no test" in caplog.text


def test_a_new_client_is_served_the_global_model() -> None:
    built = federation("pmixfed", **EVERYBODY, new_clients=2, clients=8)
    evaluation = run(built)[-1].evaluation
    assert evaluation is not None
    assert evaluation.new is not None
    everyone = built.federation.evaluate_global(built.server.values, built.data.new_clients, "test")
    assert evaluation.new.accuracies.tolist() == everyone.accuracies.tolist()


# Results on disk.


def test_a_resumed_run_is_the_same_to_the_last_note(tmp_path: Path) -> None:
    config = configure("pmixfed", {**SMALL, "rounds": 4, "checkpoint_every": 1, "mix": "random", "seed": 3})
    summary, resumed = whole_and_resumed(config, tmp_path)
    drop = ("seconds_training", "seconds_evaluation")
    assert {k: v for k, v in summary.items() if k not in drop} == {k: v for k, v in resumed.items() if k not in drop}
    assert (tmp_path / "whole/notes.csv").read_text() == (tmp_path / "parted/notes.csv").read_text()


def test_every_rounds_factors_and_degrees_are_kept(tmp_path: Path) -> None:
    Run(configure("pmixfed", {**SMALL, "rounds": 3}), tmp_path / "run").execute()
    with (tmp_path / "run" / "notes.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = {"mu_down", "mu_up", "down_1", "down_2", "up_1", "up_2", "accuracy", "global_accuracy"}
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    for line in lines:
        of_round = [row for row in rows if int(row["round"]) == line["round"]]
        assert {row["name"] for row in of_round} == names
        assert len({row["client"] for row in of_round}) == line["selected"] == 4


# Networks of different depth.

GROUPS: dict[str, Any] = {
    "data": "digits",
    "network": "stride-cnn",
    "network_options": {},
    "base_size": 4,
    "partition": "iid",
    "clients": None,
    "samples_per_client": 20,
    "clients_per_round": 1.0,
    "personal_layers": 1,
    "groups": [{"name": "deep", "clients": 2, "image_size": 16}, {"name": "shallow", "clients": 2, "image_size": 8}],
}


def test_layers_that_a_client_lacks_take_no_part() -> None:
    built = federation("pmixfed", **GROUPS, mix="fixed", mu=0.3, rounds=2)
    depths = [len(network.layers) for network in built.federation.networks]
    assert depths == [3, 2]
    before = {name: tensor.clone() for name, tensor in built.server.values.items()}
    record = built.loop.round(1)
    assert {key for key in record.notes[0] if key.startswith("down")} == {"down_1", "down_2", "down_3"}
    assert {key for key in record.notes[2] if key.startswith("down")} == {"down_1", "down_2"}
    head = [f"down_{depth}" for depth in depths]
    assert [record.notes[client][key] for client, key in zip((0, 2), head, strict=True)] == [0, 0]
    assert set(differences(before, built.server.values)) >= set(built.network.layers[1].parameters)
    assert run(built, 1)[-1].evaluation is not None


def test_clients_with_the_same_images_may_differ_in_depth() -> None:
    groups = [{"name": "deep", "clients": 2, "stages": 3}, {"name": "shallow", "clients": 2, "stages": 1}]
    built = federation("pmixfed", **{**GROUPS, "groups": groups, "image_size": 16}, mix="fixed", mu=0.3)
    assert [len(network.layers) for network in built.federation.networks] == [4, 2]
    assert run(built)[-1].evaluation is not None


def test_groups_do_not_share_a_head() -> None:
    with pytest.raises(UserError, match="groups cannot share a head"):
        federation("pmixfed", **{**GROUPS, "personal_layers": 0})


# FedAlt and FedSim.


@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
def test_mixing_all_of_the_shared_layers_changes_nothing(method: str) -> None:
    plain = federation(method, **EVERYBODY)
    mixed = federation(method, **FIXED, mu=1.0)
    run(plain), run(mixed)
    close(mixed.server.values, plain.server.values)


@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
def test_the_personal_layers_of_mixed_methods_are_not_mixed(method: str) -> None:
    built = federation(method, **EVERYBODY, mix="sigmoid", rounds=3)
    records = run(built)
    assert all(note["down_3"] == 0 and note["up_3"] == 1 for record in records for note in record.notes.values())
    assert 0 < records[-1].notes[0]["down_2"] < 1
    assert not set(built.network.layers[-1].names) & set(built.server.values)


def test_without_mixing_nothing_is_kept_or_noted() -> None:
    built = federation("fedsim", **EVERYBODY)
    assert not run(built)[-1].notes
    assert not any(OWN in name for name in state(built))


def test_messages_carry_both_kinds_of_degrees() -> None:
    built = federation("pmixfed", **FIXED)
    message = replace(built.loop.message_for_evaluation()).to((0, 1), built.network)
    assert message.own[DOWN].shape == message.own[UP].shape == (2, 3)
    assert not message.tensors

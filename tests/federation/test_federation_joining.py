"""Clients that join in a later round."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tailorfl.data import save_partition
from tailorfl.errors import UserError
from tailorfl.federation.evaluation import ClientScores
from tailorfl.federation.rounds import Round
from tailorfl.federation.selection import Latecomers
from tailorfl.methods import methods
from tailorfl.study.build import Built, Selector, build
from tailorfl.study.config import Experiment, configure

CLIENTS = tuple(range(100, 130))
LATE = Latecomers(frozenset(range(120, 130)), 4)
SMALL = {
    "clients": 8, "samples_per_client": 20, "network_options": {"hidden": [4]}, "local_epochs": 1, "rounds": 6,
    "joining_clients": 3, "joining_round": 4, "evaluate_every": 1, "device": "cpu",
}  # fmt: skip


def digits(method: str = "fedper", **settings: object) -> Built:
    return build(configure(method, {**SMALL, **settings}))


def late_of(built: Built) -> set[int]:
    return set(built.data.joining_clients)


def kept(built: Built) -> set[int]:
    """The clients who keep something."""
    return {int(key.partition("/")[0]) for key in built.federation.store.flat()}


def selector(groups: tuple[int, ...] = (), full: frozenset[int] = frozenset(), **settings: object) -> Selector:
    return Selector(Experiment(rounds=6, **settings), CLIENTS, groups, full, LATE)


# Who is selected.


@pytest.mark.parametrize("selection", ["uniform", "binomial", "per-group"])
def test_a_late_client_is_never_selected_before_its_round_and_may_be_after(selection: str) -> None:
    for seed in range(20):
        chosen = selector(selection=selection, clients_per_round=0.5, seed=seed)
        assert not any(LATE.clients & set(chosen(number)) for number in (1, 2, 3))
        assert any(LATE.clients & set(chosen(number)) for number in (4, 5, 6))


def test_fractions_are_of_those_who_are_there() -> None:
    chosen = selector(clients_per_round=0.5)
    assert [len(chosen(number)) for number in range(1, 7)] == [10, 10, 10, 15, 15, 15]
    assert [chosen.share(number) for number in (3, 4)] == [0.5, 0.5]


def test_a_number_is_reached_when_enough_have_joined() -> None:
    chosen = selector(clients_per_round=25)
    assert [len(chosen(number)) for number in (3, 4)] == [20, 25]
    assert [chosen.share(number) for number in (3, 4)] == [1.0, pytest.approx(25 / 30)]
    with pytest.raises(UserError, match=r"clients_per_round=31.*1 to 30"):
        selector(clients_per_round=31)


def test_the_share_of_a_round_is_of_those_who_are_there() -> None:
    chosen = selector(clients_per_round=5)
    assert [chosen.share(number) for number in (3, 4)] == [pytest.approx(5 / 20), pytest.approx(5 / 30)]


def test_the_share_of_a_group_is_of_its_members_who_are_there() -> None:
    groups = tuple(2 if client % 2 else 5 for client in range(115)) + (9,) * 15
    chosen = selector(groups[100:], selection="per-group", clients_per_round=0.4)
    of = [[groups[client] for client in chosen(number)] for number in (3, 4)]
    # 8, 7 and 5 of the groups at first; then 10 more of the last.
    assert [[found.count(group) for group in (5, 2, 9)] for found in of] == [[4, 3, 2], [4, 3, 6]]
    assert [chosen.share(number) for number in (3, 4)] == [pytest.approx(9 / 20), pytest.approx(13 / 30)]


def test_a_group_that_has_not_joined_sends_nobody() -> None:
    groups = (2,) * 20 + (5,) * 10
    chosen = selector(groups, selection="per-group", clients_per_round=0.1)
    assert [len(chosen(number)) for number in (3, 4)] == [2, 3]


def test_everyone_is_everyone_who_has_joined() -> None:
    chosen = selector(full=frozenset({2, 5}), clients_per_round=1, everyone_in=(1, -1))
    assert [len(chosen(number)) for number in range(1, 7)] == [20, 20, 1, 1, 30, 30]
    assert chosen(2) == list(range(100, 120))


def test_somebody_must_be_there_at_first() -> None:
    with pytest.raises(UserError, match="no client is left to train on; allowed: fewer new_clients or joining_clients"):
        Selector(Experiment(rounds=6), CLIENTS, late=Latecomers(frozenset(CLIENTS), 4))


# Rounds.


def test_what_a_late_client_keeps_is_untouched_before_its_round() -> None:
    built = digits(clients_per_round=1.0)
    late = late_of(built)
    assert len(late) == 3
    for record in built.loop.run():
        assert set(record.selected) == (set(range(8)) if record.number >= 4 else set(range(8)) - late)
        assert kept(built) == set(record.selected)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pflego", "ppfe"])
def test_till_they_join_late_clients_are_as_if_they_were_never_to_train(method: str, tmp_path: Path) -> None:
    late = digits(method, clients_per_round=0.4)
    held_out = replace(late.data.partition(), new_clients=late.data.joining_clients, joining_clients=())
    save_partition(held_out, tmp_path / "partition")
    plain = configure(method, {**SMALL, "clients_per_round": 0.4, "joining_clients": 0, "joining_round": None})
    never = build(plain, partition=tmp_path / "partition")
    for number in (1, 2, 3, 4):
        one, other = late.loop.round(number), never.loop.round(number)
        if number < 4:
            assert one.selected == other.selected
            assert one.bytes_down == other.bytes_down
            assert same(one.evaluation.personalized, other.evaluation.personalized)
            assert same(one.evaluation.joining, other.evaluation.new)
            assert all(torch.equal(tensor, never.server.values[name]) for name, tensor in late.server.values.items())
    assert one.selected != other.selected


def test_the_server_counts_the_samples_of_those_who_are_there() -> None:
    built = digits("pflego", partition="dirichlet", samples_per_client=None, clients_per_round=2)
    counts, late = built.data.train.counts, late_of(built)
    first = int(sum(counts[client] for client in range(8) if client not in late))
    assert first < int(counts.sum())
    found = []
    for _ in built.loop.run():
        found.append((built.server.samples, built.server.share))
    assert found == [(first, 2 / 5)] * 3 + [(int(counts.sum()), 2 / 8)] * 3


def test_an_exact_step_of_pflego_is_over_those_who_are_there() -> None:
    """With all of them in the round, alpha_i sum to one: the body's step is the gradient of their mean loss."""
    settings = {"partition": "dirichlet", "samples_per_client": None, "clients_per_round": 1.0, "precision": "float64"}
    built = digits("pflego", **settings, tau=1, server_optimizer="sgd", server_lr=0.1, server_momentum=0.0)
    late = late_of(built)
    before = {name: tensor.clone() for name, tensor in built.server.values.items()}
    there = tuple(client for client in range(8) if client not in late)
    message = built.loop._message(Round(1, list(there)), built.config.method.individual)
    cohort = built.federation.cohort(1, there, message)
    cohort.load(message.tensors)
    gradients, _ = cohort.gradient()
    weights = cohort.counts.double() / cohort.counts.sum()
    built.loop.round(1)
    for name, tensor in before.items():
        step = torch.tensordot(weights, gradients[name], dims=1)
        assert torch.allclose(built.server.values[name], tensor - 0.1 * step, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_takes_late_clients_in(method: str) -> None:
    settings = {"clients_per_round": 0.5, "everyone_in": (6,), "validation_fraction": 0.2}
    built = digits(method, **settings)
    late = late_of(built)
    for record in built.loop.run():
        joined = set(range(8)) - (late if record.number < 4 else set())
        assert set(record.selected) <= joined
        assert record.diverged == []
        assert set(record.evaluation.personalized.clients) == joined
        assert set(record.evaluation.joining.clients) == late
        assert all(set(scores.clients) == joined for scores in record.evaluation.others.values())
    assert set(record.selected) == set(range(8))


# What is evaluated.


def test_the_round_before_the_joining_is_evaluated() -> None:
    def evaluated(**settings: object) -> list[int]:
        return [record.number for record in digits(**settings).loop.run() if record.evaluation]

    assert evaluated(evaluate_every=0) == [3, 6]
    assert evaluated(evaluate_every=0, joining_round=2) == [1, 6]
    assert evaluated(evaluate_every=0, joining_clients=0, joining_round=None) == [6]


def test_late_clients_count_from_their_first_round_on() -> None:
    built = digits("fedavg", new_clients=1, validation_fraction=0.2, evaluate_training=True)
    late, new = late_of(built), set(built.data.new_clients)
    assert not late & new
    for record in built.loop.run():
        found = record.evaluation
        joined = set(range(8)) - new - (late if record.number < 4 else set())
        counted = (found.personalized, found.common, found.validation, found.training)
        assert [set(scores.clients) for scores in counted] == [joined] * 4
        assert set(found.joining.clients) == late
        assert set(found.new.clients) == new


def same(one: ClientScores, other: ClientScores) -> bool:
    return one.clients == other.clients and one.correct.tolist() == other.correct.tolist()


def test_the_cold_start_of_fedavg_is_the_global_model() -> None:
    built = digits("fedavg")
    for record in built.loop.run():
        if record.number == 3:
            late = sorted(late_of(built))
            common = built.federation.evaluate_global(built.server.values, late, "test")
            assert same(record.evaluation.joining, common)
            assert common.correct.sum() > 0


def test_the_cold_start_of_fedper_is_the_shared_body_with_the_initial_head() -> None:
    built = digits("fedper", lr=0.1)
    for number in (1, 2, 3):
        record = built.loop.round(number)
    model = {**built.network.initial(), **built.server.values}
    assert set(built.server.values) < set(model)
    late = sorted(late_of(built))
    assert same(record.evaluation.joining, built.federation.evaluate_global(model, late, "test"))


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_models_are_tested_on_training_rows_where_it_is_asked_for(method: str) -> None:
    """Whether one evaluation serves for all clients, or each has its own."""
    built = digits(method, evaluate_training=True)
    found = built.loop.round(1).evaluation
    assert found.training.samples.tolist() == built.data.train.counts[list(found.training.clients)].tolist()
    assert digits(method).loop.round(1).evaluation.training is None

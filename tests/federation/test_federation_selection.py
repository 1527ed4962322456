"""Who takes part in a round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.errors import UserError
from tailorfl.federation.selection import expected, how_many, select
from tailorfl.study.build import Selector
from tailorfl.study.config import Experiment

CLIENTS = tuple(range(100, 130))


@pytest.mark.parametrize(
    ("wanted", "clients", "number"),
    [(7, 30, 7), (0.1, 30, 3), (0.1, 31, 4), (0.001, 30, 1), (1.0, 30, 30), (1, 30, 1), (0.7, 10, 7), (50, 30, 30)],
)
def test_a_number_stays_and_a_fraction_is_rounded_up(wanted: int | float, clients: int, number: int) -> None:
    assert how_many(wanted, clients) == number


@given(wanted=st.integers(1, 30), round=st.integers(1, 10_000), seed=st.integers(0, 2**63))
def test_a_round_has_as_many_different_clients_as_asked_for(wanted: int, round: int, seed: int) -> None:
    chosen = select("uniform", wanted, CLIENTS, round, seed)
    assert len(chosen) == wanted
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(CLIENTS)


@pytest.mark.parametrize("selection", ["uniform", "binomial"])
def test_selection_depends_on_seed_and_round_only(selection) -> None:
    def rounds(seed: int) -> list[list[int]]:
        return [select(selection, 5, CLIENTS, round, seed) for round in range(1, 20)]

    assert rounds(1) == rounds(1)
    assert rounds(1) != rounds(2)
    assert len({tuple(chosen) for chosen in rounds(1)}) > 10


def test_everybody_is_selected_about_equally_often() -> None:
    counts = dict.fromkeys(CLIENTS, 0)
    for round in range(1, 1001):
        for client in select("uniform", 3, CLIENTS, round, 0):
            counts[client] += 1
    assert all(60 <= count <= 140 for count in counts.values())  # 100 each, deviation about 9.5


@pytest.mark.parametrize(("wanted", "mean"), [(3, 3.0), (0.1, 3.0), (0.01, 0.3)])
def test_binomial_rounds_have_the_right_mean_and_may_be_empty(wanted: int | float, mean: float) -> None:
    sizes = [len(select("binomial", wanted, CLIENTS, round, 0)) for round in range(1, 3001)]
    assert sum(sizes) / len(sizes) == pytest.approx(mean, rel=0.08)
    assert min(sizes) == 0
    assert len(set(sizes)) > 2


def test_every_group_sends_the_same_fraction_and_at_least_one() -> None:
    groups = ["large"] * 20 + ["small"] * 8 + ["single"] * 2
    for round in range(1, 20):
        chosen = select("per-group", 0.25, CLIENTS, round, 0, groups)
        of = [groups[CLIENTS.index(client)] for client in chosen]
        assert (of.count("large"), of.count("small"), of.count("single")) == (5, 2, 1)


def test_everyone_takes_part_in_the_rounds_that_say_so() -> None:
    selector = Selector(Experiment(rounds=6, clients_per_round=2, everyone_in=(1, -1)), CLIENTS)
    assert [len(selector(number)) for number in range(1, 7)] == [30, 2, 2, 2, 2, 30]


def test_everyone_takes_part_in_the_rounds_that_the_method_wants() -> None:
    experiment = Experiment(rounds=6, clients_per_round=2, everyone_in=(1, -1))
    selector = Selector(experiment, CLIENTS, full=frozenset({3, 6}))
    assert [len(selector(number)) for number in range(1, 7)] == [30, 2, 30, 2, 2, 30]
    assert selector(3) == list(CLIENTS)
    # Who takes part in the other rounds does not depend on it.
    without = Selector(experiment, CLIENTS)
    assert [selector(number) for number in (2, 4, 5)] == [without(number) for number in (2, 4, 5)]


@pytest.mark.parametrize("selection", ["binomial", "per-group"])
def test_the_rounds_of_everyone_are_full_whatever_the_selection(selection: str) -> None:
    groups = tuple(2 if client < 110 else 5 for client in CLIENTS)
    experiment = Experiment(rounds=4, clients_per_round=0.1, selection=selection)
    selector = Selector(experiment, CLIENTS, groups, frozenset({2, 4}))
    assert [selector(number) == list(CLIENTS) for number in range(1, 5)] == [False, True, False, True]


def test_ten_clients_take_part_unless_it_is_said_otherwise() -> None:
    assert len(Selector(Experiment(), CLIENTS)(1)) == 10
    assert Selector(Experiment(), CLIENTS[:4])(1) == list(CLIENTS[:4])


def test_more_clients_a_round_than_there_are_is_refused() -> None:
    with pytest.raises(UserError, match=r"clients_per_round=31.*1 to 30"):
        Selector(Experiment(clients_per_round=31), CLIENTS)


def test_a_federation_without_clients_that_train_is_refused() -> None:
    with pytest.raises(UserError, match="no client is left to train"):
        Selector(Experiment(), ())


def test_clients_with_the_same_number_of_classes_are_a_group() -> None:
    groups = tuple(2 if client < 110 else 5 for client in CLIENTS)
    selector = Selector(Experiment(selection="per-group", clients_per_round=0.2), CLIENTS, groups)
    for number in range(1, 20):
        chosen = selector(number)
        assert [sum(client < 110 for client in chosen), len(chosen)] == [2, 6]


@pytest.mark.parametrize("wanted", [1, 3, 0.1, 0.34, 1.0])
@pytest.mark.parametrize("groups", [(), (2, 2, 2, 5, 5, 9, 2, 5)])
def test_the_expected_number_of_clients_is_that_which_is_drawn(wanted, groups):
    for selection in ("uniform", "per-group"):
        drawn = {len(select(selection, wanted, range(8), number, 0, groups)) for number in range(1, 6)}
        assert drawn == {expected(selection, wanted, 8, groups)}
    rounds = [len(select("binomial", wanted, range(8), number, 0)) for number in range(1, 2001)]
    assert sum(rounds) / len(rounds) == pytest.approx(expected("binomial", wanted, 8), abs=0.15)

"""Partitions: what holds for every one of them, and what each promises."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.data.partition import PARTITIONS, Lists, PartitionOptions, Rows, divide, settle
from tailorfl.errors import UserError
from tailorfl.seeding import generator

LABEL_PARTITIONS = [name for name in PARTITIONS if name != "natural"]
quick = settings(max_examples=60, deadline=None)


def divided(labels: np.ndarray, seed: int = 0, owner: np.ndarray | None = None, **options: object) -> Lists:
    rows = Rows(len(labels), labels, owner)
    return divide(rows, settle(rows, PartitionOptions(**options)), generator(seed, "partition"))


def balanced(classes: int, each: int, seed: int = 0) -> np.ndarray:
    return generator(seed, "labels").permutation(np.repeat(np.arange(classes), each))


@st.composite
def labelled(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Labels of unequal classes, a number of clients, a number of classes a client."""
    supply = draw(st.lists(st.integers(20, 120), min_size=2, max_size=8))
    labels = generator(len(supply), "shuffle").permutation(np.repeat(np.arange(len(supply)), supply))
    return labels, draw(st.integers(1, 12)), draw(st.integers(1, len(supply)))


@quick
@given(labelled(), st.sampled_from(LABEL_PARTITIONS), st.integers(0, 3))
def test_no_row_has_two_clients_and_every_client_has_rows(
    case: tuple[np.ndarray, int, int], partition: str, seed: int
) -> None:
    labels, clients, each = case
    options = {"partition": partition, "clients": clients, "classes_per_client": each, "min_samples": 2}
    lists = divided(labels, seed, **options)
    rows = np.concatenate(lists)
    assert len(lists) == clients
    assert len(np.unique(rows)) == len(rows)
    assert min(map(len, lists)) > 0
    assert rows.min() >= 0
    assert rows.max() < len(labels)
    again = divided(labels, seed, **options)
    assert all(np.array_equal(a, b) for a, b in zip(lists, again, strict=True))


@pytest.mark.parametrize("partition", LABEL_PARTITIONS)
def test_another_seed_gives_another_partition(partition: str) -> None:
    labels = balanced(5, 40)
    one, other = (np.concatenate(divided(labels, seed, partition=partition, clients=5)) for seed in (0, 1))
    assert not np.array_equal(one, other)


@quick
@given(labelled(), st.integers(0, 3))
def test_classes_are_dealt_evenly_and_in_equal_numbers(case: tuple[np.ndarray, int, int], seed: int) -> None:
    labels, clients, each = case
    lists = divided(labels, seed, clients=clients, classes_per_client=each)
    counts = np.stack([np.bincount(labels[own], minlength=labels.max() + 1) for own in lists])
    assert ((counts > 0).sum(axis=1) == each).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    assert len(np.unique(counts[counts > 0])) == 1
    # No larger equal number of samples a class would have been possible.
    quota = counts.max()
    assert any((quota + 1) * held > supply for held, supply in zip(holders, np.bincount(labels), strict=True))


@quick
@given(labelled(), st.integers(0, 3))
def test_the_largest_samples_per_client_that_is_named_works_and_one_more_does_not(
    case: tuple[np.ndarray, int, int], seed: int
) -> None:
    labels, clients, each = case
    options = {"clients": clients, "classes_per_client": each}
    with pytest.raises(UserError) as caught:
        divided(labels, seed, samples_per_client=len(labels) + 1, **options)
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])  # type: ignore[index]
    lists = divided(labels, seed, samples_per_client=most, **options)
    assert {len(own) for own in lists} == {most}
    for own in lists:
        held = np.bincount(labels[own])
        assert held.max() - held[held > 0].min() <= 1
        assert (held > 0).sum() == each
    with pytest.raises(UserError, match=f"at most {most}"):
        divided(labels, seed, samples_per_client=most + 1, **options)


def test_a_remainder_is_spread_where_dealing_greedily_would_get_stuck() -> None:
    """Ten clients, three of ten classes each: 100 samples a client use up every one of the 1,000."""
    for seed in range(10):
        lists = divided(balanced(10, 100), seed, clients=10, classes_per_client=3, samples_per_client=100)
        assert [len(own) for own in lists] == [100] * 10


def test_class_pairs_differ_between_clients() -> None:
    labels = balanced(10, 100)
    pairs = {tuple(np.unique(labels[own])) for own in divided(labels, clients=50)}
    assert len(pairs) > 25


def test_a_class_without_rows_is_not_dealt() -> None:
    labels = np.repeat([0, 2], 50)
    assert all(len(np.unique(labels[own])) == 2 for own in divided(labels, clients=4))


def test_shards_are_of_equal_size_and_of_few_classes() -> None:
    labels = balanced(10, 100)
    lists = divided(labels, partition="shards", clients=20)
    assert {len(own) for own in lists} == {50}
    assert max(len(np.unique(labels[own])) for own in lists) <= 2  # shards of 25 do not cross classes of 100


@quick
@given(labelled(), st.sampled_from([0.01, 0.1, 1.0, 100.0]), st.integers(0, 3))
def test_every_dirichlet_client_has_its_minimum_and_every_row_a_client(
    case: tuple[np.ndarray, int, int], alpha: float, seed: int
) -> None:
    labels, clients, _ = case
    least = len(labels) // clients  # as much as there can be: the hardest case
    lists = divided(labels, seed, partition="dirichlet", clients=clients, alpha=alpha, min_samples=least)
    assert min(map(len, lists)) >= least
    assert sum(map(len, lists)) == len(labels)


def test_a_smaller_alpha_is_less_even() -> None:
    labels = balanced(10, 200)

    def largest_share(alpha: float) -> float:
        lists = divided(labels, partition="dirichlet", clients=10, alpha=alpha)
        return float(np.mean([np.bincount(labels[own]).max() / len(own) for own in lists]))

    assert largest_share(0.05) > largest_share(1.0) > largest_share(100.0)
    assert largest_share(100.0) < 0.2


def test_round_robin_deals_a_class_one_by_one_to_those_that_have_it() -> None:
    """Seven samples of one class and three clients: 3, 2 and 2 (PFLEGO, figure 11)."""
    lists = divided(np.zeros(7, np.int64), partition="round-robin", clients=3, classes_per_client=1)
    assert [len(own) for own in lists] == [3, 2, 2]


@quick
@given(labelled(), st.integers(0, 3))
def test_round_robin_uses_every_class_if_there_are_places_enough(case: tuple[np.ndarray, int, int], seed: int) -> None:
    labels, clients, each = case
    lists = divided(labels, seed, partition="round-robin", clients=clients, classes_per_client=each)
    classes = labels.max() + 1
    counts = np.stack([np.bincount(labels[own], minlength=classes) for own in lists])
    assert ((counts > 0).sum(axis=1) == each).all()
    if clients * each >= classes:
        assert counts.sum() == len(labels)
    for label in range(classes):
        shares = counts[:, label][counts[:, label] > 0]
        assert len(shares) == 0 or shares.max() - shares.min() <= 1


def test_iid_sizes_differ_by_one_at_most() -> None:
    assert sorted(map(len, divided(balanced(2, 11), partition="iid", clients=5))) == [4, 4, 4, 5, 5]


def test_natural_clients_keep_their_rows_and_small_ones_are_left_out() -> None:
    owner = np.array([2, 0, 2, 1, 0, 2])
    lists = divided(np.zeros(6, np.int64), owner=owner, partition="natural", min_samples=2)
    assert [own.tolist() for own in lists] == [[1, 4], [0, 2, 5]]


def test_more_natural_clients_than_wanted_are_chosen_by_the_seed() -> None:
    owner = np.repeat(np.arange(30), 10)
    labels = np.zeros(300, np.int64)
    chosen = [
        [int(owner[own[0]]) for own in divided(labels, seed, owner, partition="natural", clients=5)]
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0]) == 5
    assert chosen[0] == sorted(chosen[0])


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet", "round-robin"])
def test_samples_per_client_is_a_limit_elsewhere(partition: str) -> None:
    lists = divided(balanced(5, 100), partition=partition, clients=5, samples_per_client=30)
    assert max(map(len, lists)) == 30


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"partition": "random"}, "partition=random is not known; allowed: auto, classes, shards, dirichlet"),
        ({"clients": 0}, "clients=0, allowed: at least 1"),
        ({"clients": 1000}, "clients=1000: there are 100 training rows"),
        ({"classes_per_client": 6}, "classes_per_client=6: the source has 5 classes"),
        ({"classes_per_client": 0}, "classes_per_client=0, allowed: at least 1"),
        ({"clients": 90}, "need 36 samples of a class, the rarest has 20; allowed: fewer clients"),
        ({"clients": 4, "samples_per_client": 1}, "samples_per_client=1 is less than classes_per_client=2"),
        ({"clients": 4, "samples_per_client": 0}, "samples_per_client=0, allowed: at least 1"),
        ({"partition": "dirichlet", "clients": 4, "alpha": 0}, "alpha=0, allowed: a number above 0"),
        ({"partition": "dirichlet", "clients": 4, "alpha": -1}, "alpha=-1, allowed"),
        ({"partition": "dirichlet", "clients": 4, "alpha": float("nan")}, "alpha=nan, allowed"),
        ({"partition": "dirichlet", "clients": 11}, "needs 110 samples, there are 100; allowed: min_samples up to 9"),
        ({"partition": "shards", "clients": 60}, "shards_per_client=2: 100 rows allow at most 1"),
        ({"partition": "round-robin", "clients": 100, "classes_per_client": 1}, "is not enough for the"),
        ({"partition": "round-robin", "classes_per_client": 6}, "the source has 5 classes"),
        ({"partition": "natural"}, "the source names no clients .*allowed: classes, shards"),
    ],
)
def test_impossible_partitions_are_refused_in_a_line(options: dict, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        divided(balanced(5, 20), **options)
    assert "\n" not in str(caught.value)


def test_natural_clients_that_are_all_too_small_are_refused() -> None:
    with pytest.raises(UserError, match="the largest natural client has 3 samples; allowed: min_samples up to 3"):
        divided(np.zeros(5, np.int64), owner=np.array([0, 0, 0, 1, 1]), partition="natural")


@pytest.mark.parametrize("partition", ["classes", "shards", "dirichlet", "round-robin"])
def test_a_regression_has_no_classes_to_divide_by(partition: str) -> None:
    rows = Rows(100, None)
    division = settle(rows, PartitionOptions(partition=partition))
    with pytest.raises(UserError, match="needs class labels and the source is a regression; allowed: iid, natural"):
        divide(rows, division, generator(0))


def test_auto_follows_the_source_and_natural_takes_every_client_there_is():
    owner = np.repeat(np.arange(30), 12)
    named = settle(Rows(360, None, owner), PartitionOptions())
    assert (named.partition, named.clients) == ("natural", 30)
    nameless = settle(Rows(360, np.zeros(360, np.int64)), PartitionOptions())
    assert (nameless.partition, nameless.clients) == ("classes", 20)
    assert settle(Rows(360, None), PartitionOptions()).partition == "iid"


def test_natural_clients_that_are_left_out_are_said_in_the_log(caplog):
    owner = np.repeat(np.arange(4), [20, 20, 3, 20])
    with caplog.at_level("INFO", logger="tailorfl"):
        lists = divided(np.zeros(63, np.int64), owner=owner, partition="natural", clients=2)
    assert len(lists) == 2
    assert "2 of 4 natural clients take part: 1 have fewer than min_samples=10 samples, clients=2" in caplog.text

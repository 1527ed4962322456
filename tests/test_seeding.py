"""Randomness belongs to (seed, purpose)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.seeding import derive, generator

PURPOSES = st.lists(st.integers(0, 1000) | st.sampled_from(["batches", "selection", "network"]), max_size=4)


def test_a_derived_seed_never_changes_between_versions() -> None:
    assert derive(0, "selection", 1) == 6309146628455259094
    assert derive(7, "batches", 3, 12) == 8655882108453480406


@given(seed=st.integers(0, 2**64), purpose=PURPOSES)
def test_equal_keys_draw_equal_numbers(seed: int, purpose: list) -> None:
    one, other = generator(seed, *purpose), generator(seed, *purpose)
    assert one.random(5).tolist() == other.random(5).tolist()
    assert 0 <= derive(seed, *purpose) < 2**63


@given(seed=st.integers(0, 1000), one=PURPOSES, other=PURPOSES)
def test_different_keys_draw_different_numbers(seed: int, one: list, other: list) -> None:
    if one != other:
        assert derive(seed, *one) != derive(seed, *other)


def test_the_streams_of_clients_are_not_correlated() -> None:
    draws = np.stack([generator(0, "batches", 1, client).random(500) for client in range(20)])
    correlation = np.corrcoef(draws) - np.eye(20)
    assert np.abs(correlation).max() < 0.25

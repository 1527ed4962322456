"""Statistics: against scipy, against enumeration, and against numbers that were computed by hand."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from study_runs import clients, execute

from tailorfl.study.statistics import client_figures, holm, interval, over_seeds, paired, signed_rank


def test_the_interval_of_three_seeds_is_as_by_hand() -> None:
    # Mean 3, deviation 1; Student's t with two degrees of freedom is 4.302653.
    found = interval([2.0, 3.0, 4.0])
    assert (found.count, found.mean, found.std) == (3, 3.0, 1.0)
    assert found.half == pytest.approx(4.302653 / 3**0.5, abs=1e-5)
    assert (found.low, found.high) == (pytest.approx(0.515862, abs=1e-5), pytest.approx(5.484138, abs=1e-5))


def test_one_seed_has_no_interval_and_equal_ones_have_one_of_no_width() -> None:
    alone = interval([0.5])
    assert (alone.mean, alone.std, alone.low, alone.high, alone.half) == (0.5, None, None, None, None)
    assert interval([0.5, 0.5]).half == 0


def test_an_interval_ends_where_a_figure_cannot_be() -> None:
    found = interval([0.2, 1.0], (0.0, 1.0))
    assert (found.low, found.high) == (0.0, 1.0)
    assert found.half == pytest.approx(12.7062 * 0.4, abs=1e-4)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_intervals_are_those_of_scipy(values: list[float]) -> None:
    found = interval(values)
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), max(stats.sem(values), 1e-300))
    assert found.low == pytest.approx(low, abs=1e-6)
    assert found.high == pytest.approx(high, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1).filter(lambda one: abs(one) > 1e-6), min_size=1, max_size=50, unique_by=abs))
def test_without_ties_the_test_is_the_exact_one_of_scipy(differences: list[float]) -> None:
    rounded = [round(one, 12) for one in differences]
    if len({abs(one) for one in rounded}) == len(rounded):
        assert signed_rank(differences) == pytest.approx(stats.wilcoxon(rounded, method="exact").pvalue)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_with_ties_it_is_the_share_of_signs_that_come_as_far(differences: list[int]) -> None:
    there = [one for one in differences if one]
    if not there:
        assert signed_rank(differences) == 1.0
        return
    ranks = stats.rankdata(np.abs(there))
    sums = np.array([ranks[np.array(signs)].sum() for signs in product([False, True], repeat=len(there))])
    found = ranks[np.array(there) > 0].sum()
    assert signed_rank(differences) == pytest.approx(min(1.0, 2 * min((sums <= found).mean(), (sums >= found).mean())))


def test_five_clients_of_five_are_no_proof() -> None:
    assert signed_rank([-0.1] * 5) == 2 / 2**5
    assert signed_rank([0.1, -0.1]) == 1.0
    assert signed_rank([]) == signed_rank([0.0, 0.0]) == 1.0


def test_of_many_clients_the_test_is_that_of_the_normal_distribution() -> None:
    differences = np.random.default_rng(0).integers(-3, 6, 200) / 10
    wanted = stats.wilcoxon(differences[differences != 0], method="approx").pvalue
    assert signed_rank(differences.tolist()) == pytest.approx(wanted)


def test_clients_are_compared_with_themselves() -> None:
    mine = {"a": 0.9, "b": 0.7, "c": 0.5, "only mine": 0.1}
    found = paired(mine, {"c": 0.6, "b": 0.5, "a": 0.5, "only theirs": 1.0})
    assert found is not None
    assert (found.clients, found.higher, found.lower) == (3, 2, 1)
    assert (found.difference, found.median) == (pytest.approx(0.5 / 3), pytest.approx(0.2))
    assert found.p == 0.5  # of eight ways in which signs may fall, two come as far on one side
    assert paired({"a": 1.0}, {"b": 1.0}) is None


def test_what_rounding_leaves_is_no_difference() -> None:
    found = paired({"a": 0.1 + 0.2, "b": 0.5}, {"a": 0.3, "b": 0.5})
    assert found is not None
    assert (found.higher, found.lower, found.difference, found.p) == (0, 0, 0.0, 1.0)


def test_holms_correction_is_as_by_hand_and_keeps_the_order() -> None:
    # Sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2, 0.5 * 1; none below the one before.
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_a_correction_never_makes_a_comparison_surer(values: list[float]) -> None:
    corrected = holm(values)
    assert all(before <= after <= 1 for before, after in zip(values, corrected, strict=True))
    assert sorted(range(len(values)), key=lambda k: (values[k], corrected[k])) == sorted(
        range(len(values)), key=lambda k: (corrected[k], values[k])
    )


def test_the_figures_of_clients_are_those_on_disk_without_the_new_ones(tmp_path: Path) -> None:
    execute(tmp_path / "run", "fedavg", new_clients=1)
    rows = clients(tmp_path / "run")
    assert [row["new"] for row in rows].count("1") == 1
    old = [row for row in rows if row["new"] == "0"]
    assert client_figures(tmp_path / "run") == {row["client"]: float(row["accuracy"]) for row in old}
    assert client_figures(tmp_path / "run", "global_accuracy") == client_figures(tmp_path / "run")
    assert client_figures(tmp_path / "run", "loss") == {row["client"]: float(row["loss"]) for row in old}


def test_clients_without_a_figure_and_diverged_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "clients.csv").write_text("client,new,loss\na,0,1.5\nb,0,\nc,0,nan\nd,0,inf\n")
    assert client_figures(tmp_path, "loss") == {"a": 1.5}


def test_a_client_counts_with_its_mean_over_the_seeds_in_which_all_have_it() -> None:
    assert over_seeds([{"a": 1.0, "b": 0.5}, {"a": 0.0}]) == {"a": 0.5}

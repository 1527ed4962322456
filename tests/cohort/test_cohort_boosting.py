"""Boosting: betas and weights by hand, and what holds for any losses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailorfl.cohort.boosting import coefficient, relative, reweighted

Client = list[tuple[float, float]]
"""The loss and the weight of each sample."""

LOSS = st.one_of(st.just(0.0), st.floats(1e-6, 1e3))
WEIGHT = st.floats(1e-3, 50.0)
CLIENT = st.lists(st.tuples(LOSS, WEIGHT), max_size=6)
SOME = st.lists(st.tuples(LOSS, WEIGHT), min_size=1, max_size=12)
CLIENTS = st.lists(CLIENT, min_size=1, max_size=4)
CAP = st.one_of(st.none(), st.floats(1.0, 8.0))

SMALLEST, LARGEST = 0.5 * math.log(0.51 / 0.49), 0.5 * math.log(0.99 / 0.01)


def table(clients: list[Client], padding: float = math.nan, more: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, weights and which are real, [clients, samples]; padded by what must not matter, with ``more`` of it."""
    length = max(1, *map(len, clients), 0) + more
    losses, weights = torch.full((2, len(clients), length), padding, dtype=torch.float64)
    real = torch.zeros(len(clients), length, dtype=torch.bool)
    for row, client in enumerate(clients):
        real[row, : len(client)] = True
        for place, (loss, weight) in enumerate(client):
            losses[row, place], weights[row, place] = loss, weight
    return losses, weights, real


def after(clients: list[Client], cap: float | None = None, padding: float = math.nan) -> Tensor:
    """The weights of the next model."""
    losses, weights, real = table(clients, padding)
    return reweighted(weights, losses, coefficient(losses, weights, real), real, cap)


def beta_of(*client: tuple[float, float]) -> float:
    return coefficient(*table([list(client)])).item()


def test_a_client_of_three_samples_by_hand() -> None:
    losses, weights, real = table([[(0.0, 2.1), (2.0, 0.6), (4.0, 0.3)]])
    assert relative(losses, real).tolist() == [[0.0, 0.5, 1.0]]
    beta = coefficient(losses, weights, real)  # epsilon = (0.6 * 0.5 + 0.3 * 1) / 3 = 0.2; beta = ln(0.8 / 0.2) / 2
    assert beta.tolist() == [pytest.approx(math.log(2), abs=1e-14)]
    grown = [2.1, 0.6 * math.sqrt(2), 0.3 * 2]
    assert reweighted(weights, losses, beta, real).tolist() == [pytest.approx([3 * g / sum(grown) for g in grown])]


def test_three_equal_samples_by_hand() -> None:
    losses, weights, real = table([[(0.0, 1.0), (1.0, 1.0), (4.0, 1.0)]])
    beta = coefficient(losses, weights, real)  # epsilon = (0.25 + 1) / 3 = 5 / 12; the odds are 7 : 5
    assert beta.tolist() == [pytest.approx(0.5 * math.log(1.4), abs=1e-14)]
    grown = [1.0, 1.4**0.125, 1.4**0.5]
    assert reweighted(weights, losses, beta, real).tolist() == [pytest.approx([3 * g / sum(grown) for g in grown])]


def test_what_one_model_gets_wrong_weighs_as_it_says_by_hand() -> None:
    """A fifth of the weight is wrong: beta is ln 2, and the wrong sample counts twice."""
    assert after([[(7.0, 0.6), (0.0, 1.2), (0.0, 1.2)]]).tolist() == [pytest.approx([1.0, 1.0, 1.0])]


def test_what_is_above_the_cap_goes_to_the_others_until_none_is_above_it() -> None:
    client = [(0.0, weight) for weight in (3.0, 1.5, 0.25, 0.125, 0.125)]
    # The first is cut to 2; times 3/2 the second is 2.25: cut too; the others share what is left.
    assert after([client], cap=2.0).tolist() == [pytest.approx([2.0, 2.0, 0.5, 0.25, 0.25])]


def test_a_cap_that_only_some_clients_need_changes_theirs_alone() -> None:
    even, uneven = [(0.0, 1.0)] * 4, [(0.0, 3.7), *[(0.0, 0.1)] * 3]
    assert after([even, uneven], cap=2.0).tolist() == [[1.0] * 4, pytest.approx([2.0, 2 / 3, 2 / 3, 2 / 3])]


@settings(deadline=None)
@given(SOME)
def test_a_cap_of_the_mean_makes_all_weights_alike(client: Client) -> None:
    assert after([client], cap=1.0).tolist() == [pytest.approx([1.0] * len(client))]


@settings(deadline=None)
@given(st.lists(st.tuples(LOSS, WEIGHT), min_size=1, max_size=9))
def test_a_client_with_fewer_samples_than_the_cap_never_meets_it(client: Client) -> None:
    assert torch.equal(after([client], cap=10.0), after([client]))


@settings(deadline=None)
@given(CLIENTS, CAP)
def test_the_weights_of_a_client_sum_to_its_samples(clients: list[Client], cap: float | None) -> None:
    weights = after(clients, cap)
    assert weights.sum(1).tolist() == pytest.approx([float(len(client)) for client in clients], abs=1e-9)
    assert bool((weights >= 0).all())


@settings(deadline=None)
@given(CLIENTS, st.floats(1.0, 8.0))
def test_no_weight_is_above_the_cap(clients: list[Client], cap: float) -> None:
    assert after(clients, cap).max() <= cap * (1 + 1e-12)


@settings(deadline=None)
@given(SOME, st.floats(1.0, 8.0))
def test_below_the_cap_weights_keep_their_proportions(client: Client, cap: float) -> None:
    [weights], [free] = after([client], cap), after([client])
    below = weights < cap * (1 - 1e-9)
    scale = weights[below] / free[below]
    assert torch.allclose(scale, scale[:1], rtol=1e-9)
    assert bool((weights[below] >= free[below] * (1 - 1e-9)).all())  # what was cut off the others is given to them


@settings(deadline=None)
@given(st.lists(LOSS, min_size=1, max_size=12), st.floats(0.1, 5.0), CAP)
def test_more_loss_is_more_weight(losses: list[float], weight: float, cap: float | None) -> None:
    [weights] = after([[(loss, weight) for loss in sorted(losses)]], cap)
    assert bool((weights.diff() >= -1e-12).all())
    if cap is None and max(losses) > 2 * min(losses):
        assert weights[-1] > weights[0]


@settings(deadline=None)
@given(CLIENTS, CAP, st.sampled_from([0.0, 1e9, -5.0, math.inf, math.nan]))
def test_padding_has_no_weight_and_never_matters(clients: list[Client], cap: float | None, padding: float) -> None:
    losses, weights, real = table(clients, padding, more=2)
    beta = coefficient(losses, weights, real)
    found = reweighted(weights, losses, beta, real, cap)
    assert bool((found[~real] == 0).all())
    assert bool((relative(losses, real)[~real] == 0).all())
    assert torch.allclose(beta, coefficient(*table(clients)), rtol=0, atol=1e-12)
    assert torch.allclose(found[:, :-2], after(clients, cap), rtol=1e-12, atol=0)


@settings(deadline=None)
@given(CLIENTS, CAP)
def test_many_clients_at_once_are_each_as_if_alone(clients: list[Client], cap: float | None) -> None:
    together, betas = after(clients, cap), coefficient(*table(clients))
    for row, client in enumerate(clients):
        assert betas[row].item() == pytest.approx(coefficient(*table([client])).item(), abs=1e-12)
        alone = after([client], cap)[0, : len(client)]
        assert torch.allclose(together[row, : len(client)], alone, rtol=1e-12, atol=0)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_beta_falls_when_epsilon_grows(one: float, other: float) -> None:
    """One of two samples is wrong: its weight is epsilon."""
    low, high = (beta_of((0.0, 1 - epsilon), (3.0, epsilon)) for epsilon in sorted((one, other)))
    assert low >= high - 1e-12
    if min(one, other) >= 0.01 and max(one, other) <= 0.49 and abs(one - other) > 1e-6:
        assert low > high


@settings(deadline=None)
@given(st.floats(0, 1))
def test_epsilon_is_kept_between_a_hundredth_and_just_under_a_half(epsilon: float) -> None:
    inside = min(max(epsilon, 0.01), 0.49)
    wanted = 0.5 * math.log((1 - inside) / inside)
    assert beta_of((0.0, 1 - epsilon), (3.0, epsilon)) == pytest.approx(wanted, abs=1e-12)


@settings(deadline=None)
@given(CLIENTS, st.floats(1e-3, 1e3))
def test_beta_is_positive_bounded_and_does_not_depend_on_the_unit_of_the_loss(
    clients: list[Client], unit: float
) -> None:
    losses, weights, real = table(clients)
    beta = coefficient(losses, weights, real)
    assert bool(((beta >= SMALLEST - 1e-12) & (beta <= LARGEST + 1e-12)).all())
    assert torch.allclose(coefficient(unit * losses, weights, real), beta, rtol=0, atol=1e-9)
    assert torch.allclose(coefficient(losses, unit * weights, real), beta, rtol=0, atol=1e-9)


def test_a_model_without_any_loss_has_the_largest_beta_and_changes_no_weight() -> None:
    client = [(0.0, 0.5), (0.0, 2.0), (0.0, 0.5)]
    assert beta_of(*client) == pytest.approx(LARGEST)
    assert after([client]).tolist() == [pytest.approx([0.5, 2.0, 0.5])]


@pytest.mark.parametrize("loss", [1e-9, 1.0, 1e9])
def test_losses_that_are_all_equal_have_the_smallest_beta_and_change_no_weight(loss: float) -> None:
    client = [(loss, 0.5), (loss, 2.0), (loss, 0.5)]
    assert beta_of(*client) == pytest.approx(SMALLEST)
    assert after([client]).tolist() == [pytest.approx([0.5, 2.0, 0.5])]


@pytest.mark.parametrize(("loss", "beta"), [(0.0, LARGEST), (2.5, SMALLEST)])
def test_a_single_sample_always_weighs_one(loss: float, beta: float) -> None:
    assert beta_of((loss, 1.0)) == pytest.approx(beta)
    assert after([[(loss, 1.0)]], cap=10.0).tolist() == [[pytest.approx(1.0)]]


def test_a_client_without_samples_has_a_finite_beta_and_no_weights() -> None:
    assert SMALLEST <= beta_of() <= LARGEST + 1e-12
    assert after([[], [(1.0, 1.0), (0.0, 1.0)]], cap=10.0)[0].tolist() == [0.0, 0.0]


def test_a_client_whose_losses_are_not_numbers_leaves_the_others_alone() -> None:
    healthy, broken = [(1.0, 1.0), (0.0, 1.0)], [(math.nan, 1.0), (1.0, 1.0)]
    for cap in (None, 1.2):
        assert after([broken, healthy], cap)[1].tolist() == pytest.approx(after([healthy], cap)[0].tolist())


def test_what_is_given_stays_as_it_is() -> None:
    losses, weights, real = table([[(0.0, 2.1), (2.0, 0.6), (4.0, 0.3)], [(1.0, 1.0)]], padding=5.0)
    before = [tensor.clone() for tensor in (losses, weights, real)]
    reweighted(weights, losses, coefficient(losses, weights, real), real, 1.5)
    assert all(torch.equal(*pair) for pair in zip(before, (losses, weights, real), strict=True))

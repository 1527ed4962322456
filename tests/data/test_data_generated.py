"""Digits and the synthetic federations."""

import itertools

import numpy as np
import pytest
import torch

from tailorfl.data import SourceOptions, load_source
from tailorfl.errors import UserError


def test_digits_fill_the_range_of_a_byte() -> None:
    digits = load_source("digits")
    assert digits.inputs.shape == (1797, 1, 8, 8)
    assert digits.inputs.dtype == torch.uint8
    assert (digits.inputs.min(), digits.inputs.max()) == (0, 255)
    assert digits.test_size == 0


@pytest.mark.parametrize("name", ["synthetic", "synthetic-regression"])
def test_synthetic_data_are_determined_by_the_seed(name: str) -> None:
    one, same, other = (load_source(name, None, SourceOptions(seed=seed, clients=3)) for seed in (5, 5, 6))
    assert torch.equal(one.inputs, same.inputs)
    assert torch.equal(one.targets, same.targets)
    assert not torch.equal(one.inputs, other.inputs)


def best_single_accuracy(heterogeneity: float) -> float:
    """Of a model that sees the noise-free prototype and must name it alike for all clients."""
    shown = load_source("synthetic", None, SourceOptions(clients=200, heterogeneity=0)).targets.numpy()
    named = load_source("synthetic", None, SourceOptions(clients=200, heterogeneity=heterogeneity)).targets.numpy()
    table = np.bincount(shown * 10 + named, minlength=100).reshape(10, 10)
    return float(table.max(axis=1).sum() / table.sum())


def test_the_best_single_model_gets_worse_as_heterogeneity_grows() -> None:
    accuracies = [best_single_accuracy(h) for h in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    assert accuracies[0] == 1
    assert all(earlier > later for earlier, later in itertools.pairwise(accuracies))
    assert accuracies[-1] < 0.3


def test_every_client_names_its_own_prototypes_consistently() -> None:
    options = SourceOptions(clients=4, heterogeneity=1)
    shown = load_source("synthetic", None, options.model_copy(update={"heterogeneity": 0.0})).targets
    source = load_source("synthetic", None, options)
    assert source.owner is not None
    for client in range(4):
        own = source.owner == client
        pairs = {(int(a), int(b)) for a, b in zip(shown[own], source.targets[own], strict=True)}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
        assert all(a != b for a, b in pairs)


def fitted_weights(personalization: float) -> np.ndarray:
    options = SourceOptions(clients=6, dimension=4, noise=0.0, personalization=personalization)
    source = load_source("synthetic-regression", None, options)
    x, y = source.inputs.view(6, 200, 4).numpy(), source.targets.view(6, 200).numpy()
    return np.stack([np.linalg.lstsq(x[k], y[k], rcond=None)[0] for k in range(6)])


def test_without_personalization_all_clients_have_the_same_regression_weights() -> None:
    weights = fitted_weights(0.0)
    assert np.allclose(weights, weights[0], atol=1e-4)
    assert fitted_weights(1.0).std(axis=0).min() > 0.1


def test_the_personal_share_of_the_weights_is_the_ratio() -> None:
    shared, personal, half = fitted_weights(0.0), fitted_weights(1.0), fitted_weights(0.25)
    assert np.allclose(half, 0.75 * shared + 0.25 * personal, atol=1e-4)


def test_mixed_personalization_differs_between_clients() -> None:
    source = load_source("synthetic-regression", None, SourceOptions(personalization="mixed"))
    assert source.regression
    assert len(source.owners) == 20


def test_clients_have_covariances_of_their_own() -> None:
    source = load_source("synthetic-regression", None, SourceOptions(clients=2, samples=5000, dimension=3))
    first, second = (np.cov(rows.T) for rows in source.inputs.view(2, 5000, 3).numpy())
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize(
    ("name", "option", "line"),
    [
        ("synthetic", {"heterogeneity": 1.5}, "heterogeneity=1.5, allowed: 0 to 1"),
        ("synthetic", {"classes": 1}, "classes=1, allowed: at least 2"),
        ("synthetic", {"samples": 0}, "samples=0, allowed: at least 1"),
        ("synthetic-regression", {"personalization": -0.1}, "personalization=-0.1, allowed: 0 to 1, or mixed"),
        ("synthetic-regression", {"clients": 0}, "clients=0, allowed: at least 1"),
    ],
)
def test_bad_synthetic_options_are_refused(name: str, option: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        load_source(name, None, SourceOptions(**option))

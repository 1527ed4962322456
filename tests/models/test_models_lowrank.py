"""Low-rank factoring, and the shares of parameters that PPFE prints."""

import pytest
import torch
from torch import nn

from tailorfl.errors import UserError
from tailorfl.models import LowRankLinear, build_module, factor_linear, factored, linear_layers


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_full_rank_changes_nothing_but_rounding():
    linear = nn.Linear(7, 5).double()
    factors = factor_linear(linear, 100)
    x = torch.randn(3, 7, dtype=torch.float64)
    assert factors.rank == 5
    torch.testing.assert_close(factors(x), linear(x), rtol=1e-12, atol=1e-12)


def test_truncation_is_the_best_approximation_with_balanced_factors():
    linear = nn.Linear(9, 6, bias=False).double()
    factors = factor_linear(linear, 2)
    singular = torch.linalg.svdvals(linear.weight)
    error = torch.linalg.norm(linear.weight - factors.left @ factors.right)
    torch.testing.assert_close(error, singular[2:].square().sum().sqrt())
    torch.testing.assert_close(factors.left.T @ factors.left, factors.right @ factors.right.T)
    assert factors.bias is None
    assert factors.left.requires_grad
    assert factors.left.is_leaf


def test_factoring_draws_no_random_numbers():
    linear = nn.Linear(9, 6)
    state = torch.get_rng_state()
    factor_linear(linear, 2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("ranks", "percent"), [((100, 50, 24), 6.0), ((80, 40, 16), 17.7)])
def test_reductions_of_ppfe_on_cifar10(ranks, percent):
    module = build_module("ppfe-cnn", (3, 32, 32), 10)
    reduced = factored(module, dict(zip(("fc1", "fc2", "head"), ranks, strict=True)))
    assert round(100 * (1 - count(reduced) / count(module)), 1) == percent
    assert reduced(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_shared_shares_of_ppfe_on_cifar100():
    """Biases count on both sides: those of the shared layers, and all of the original network's."""
    module = build_module("ppfe-cnn-large", (3, 32, 32), 100)
    reduced = factored(module, {"fc1": 200})
    shares = [count(module[:-1]), count(reduced[:3]), count(module[:2])]
    assert [round(100 * share / count(module), 1) for share in shares] == [98.8, 83.8, 19.5]


def test_factored_copies_the_network_and_keeps_its_layers():
    module = build_module("ppfe-cnn", (3, 32, 32), 10)
    reduced = factored(module, {"fc1": 8, "head": 64})
    assert isinstance(reduced.fc1.linear, LowRankLinear)
    assert isinstance(reduced.head, LowRankLinear)
    assert isinstance(module.head, nn.Linear)
    assert [name for name, _ in reduced.named_children()] == [name for name, _ in module.named_children()]
    reduced.conv1.conv.weight.data.zero_()
    assert module.conv1.conv.weight.ne(0).any()
    assert linear_layers(module) == ["fc1", "fc2", "head"]
    assert linear_layers(reduced) == ["fc2"]


@pytest.mark.parametrize(
    ("ranks", "words"), [({"conv1": 3}, "fc1, head"), ({"tail": 3}, "tail"), ({"fc1": 0}, "rank 0")]
)
def test_what_cannot_be_factored_is_refused(ranks, words):
    with pytest.raises(UserError, match=words):
        factored(build_module("cnn", (1, 16, 16), 2), ranks)


def test_a_new_low_rank_layer_has_finite_values():
    assert LowRankLinear(4, 3, 2)(torch.randn(5, 4)).isfinite().all()

"""Several networks as one: by hand, for many clients at once, with extreme outputs, and as a program."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from tailorfl.models.ensemble import Combination, Ensemble, combine
from tailorfl.models.reduction import factored_by, masked

COMBINATIONS: tuple[Combination, ...] = ("probabilities", "logits")


def outputs_of(members: int, *shape: int, scale: float = 1.0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [scale * torch.randn(*shape, dtype=torch.float64, generator=rng) for _ in range(members)]


def test_probabilities_by_hand() -> None:
    one = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], dtype=torch.float64).log() + 5  # what all share is nothing
    other = torch.tensor([[0.1, 0.1, 0.8], [0.3, 0.3, 0.4]], dtype=torch.float64).log() - 2
    found = combine([one, other], torch.tensor([3.0, 1.0], dtype=torch.float64), "probabilities")
    wanted = torch.tensor([[0.4, 0.2125, 0.3875], [0.15, 0.225, 0.625]], dtype=torch.float64)
    torch.testing.assert_close(found.exp(), wanted)


def test_logits_by_hand() -> None:
    one, other = torch.tensor([[4.0, 0.0], [8.0, 2.0]]), torch.tensor([[0.0, 4.0], [0.0, -2.0]])
    found = combine([one, other], torch.tensor([3.0, 1.0]), "logits")
    assert found.tolist() == [[3.0, 1.0], [6.0, 1.0]]


def test_the_two_combinations_may_decide_differently() -> None:
    """One very sure member sways the logits; its probability is never more than one vote."""
    sure, others = torch.tensor([[30.0, 0.0]]), [torch.tensor([[0.0, 2.0]])] * 2
    weights = torch.ones(3)
    assert combine([sure, *others], weights, "logits").argmax(-1).tolist() == [0]
    assert combine([sure, *others], weights, "probabilities").argmax(-1).tolist() == [1]


def test_a_regression_is_the_weighted_mean() -> None:
    members = [torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [-2.0]])]
    assert combine(members, torch.tensor([1.0, 3.0]), "logits").tolist() == [[4.0], [-1.0]]


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("weight", [1e-6, 0.02, 2.3])
def test_one_member_gives_its_own_prediction(combination: Combination, weight: float) -> None:
    [outputs] = outputs_of(1, 7, 4)
    found = combine([outputs], torch.tensor([weight], dtype=torch.float64), combination)
    torch.testing.assert_close(found.softmax(-1), outputs.softmax(-1))
    if combination == "logits":
        torch.testing.assert_close(found, outputs)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_members_that_agree_are_as_one(combination: Combination) -> None:
    [outputs] = outputs_of(1, 7, 4)
    found = combine([outputs] * 3, torch.tensor([0.02, 1.0, 2.3], dtype=torch.float64), combination)
    torch.testing.assert_close(found.softmax(-1), outputs.softmax(-1))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.02, 2.3), min_size=1, max_size=4), st.floats(1e-3, 1e3), st.sampled_from(COMBINATIONS))
def test_weights_matter_up_to_scale_only(weights: list[float], scale: float, combination: Combination) -> None:
    members, beta = outputs_of(len(weights), 5, 3), torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(combine(members, scale * beta, combination), combine(members, beta, combination))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_each_client_combines_by_its_own_weights_as_if_alone(combination: Combination) -> None:
    members = outputs_of(3, 6, 5, 4)
    weights = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.02
    together = combine(members, weights, combination)
    assert together.shape == (6, 5, 4)
    for client in range(6):
        alone = combine([member[client] for member in members], weights[client], combination)
        torch.testing.assert_close(together[client], alone)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.02, 2.3), min_size=1, max_size=4), st.sampled_from([0.1, 1.0, 100.0, 1e4]))
def test_probabilities_stay_probabilities(weights: list[float], scale: float) -> None:
    found = combine(outputs_of(len(weights), 5, 3, scale=scale), torch.tensor(weights).double(), "probabilities")
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(found.log_softmax(-1), found)  # a cross-entropy takes them as they are


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_of_ten_thousand_lose_nothing(dtype: torch.dtype) -> None:
    """Each member is sure of another class: the others' probabilities are zero, and their logarithms are not."""
    one = torch.tensor([[1e4, 0.0, -1e4]], dtype=dtype, requires_grad=True)
    other = torch.tensor([[-1e4, 1e4, 0.0]], dtype=dtype)
    found = combine([one, other], torch.tensor([3.0, 1.0], dtype=dtype), "probabilities")
    wanted = torch.tensor([[math.log(0.75), math.log(0.25), -1e4 + math.log(0.25)]], dtype=dtype)
    torch.testing.assert_close(found.detach(), wanted)
    F.cross_entropy(found, torch.tensor([2])).backward()
    assert one.grad is not None
    assert bool(one.grad.isfinite().all())


def test_a_member_without_weight_does_not_count() -> None:
    members = outputs_of(2, 5, 3)
    for combination in COMBINATIONS:
        found = combine(members, torch.tensor([0.0, 2.0], dtype=torch.float64), combination)
        torch.testing.assert_close(found.softmax(-1), members[1].softmax(-1))


def small_members() -> list[nn.Module]:
    """A full network, a factored and a sparse one."""
    torch.manual_seed(0)
    full = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()), nn.Linear(144, 16), nn.Linear(16, 3)
    )
    return [full, factored_by(full, 1), masked(full, {"1": 0.3, "2": 0.5})]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_an_ensemble_is_its_members_combined(combination: Combination) -> None:
    members, weights, x = small_members(), torch.tensor([2.0, 0.5, 1.0]), torch.randn(6, 1, 8, 8)
    ensemble = Ensemble(members, weights, combination)
    torch.testing.assert_close(ensemble(x), combine([member(x) for member in members], weights, combination))
    assert len({id(parameter) for parameter in ensemble.parameters()}) == sum(len([*m.parameters()]) for m in members)


def test_an_ensembles_weights_go_with_it_and_do_not_train() -> None:
    members = small_members()
    ensemble = Ensemble(members, torch.tensor([2.0, 0.5, 1.0]), "logits")
    assert "weights" in ensemble.state_dict()
    assert "weights" not in dict(ensemble.named_parameters())
    other = Ensemble(small_members(), torch.ones(3), "logits")
    other.load_state_dict(ensemble.state_dict())
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(other(x), ensemble(x))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_an_ensemble_is_a_program_for_any_number_of_samples(combination: Combination) -> None:
    ensemble = Ensemble(small_members(), torch.tensor([2.0, 0.5, 1.0]), combination).eval()
    program = torch.export.export(ensemble, (torch.randn(2, 1, 8, 8),), dynamic_shapes=({0: Dim("batch", min=1)},))
    for rows in (1, 2, 17):
        x = torch.randn(rows, 1, 8, 8)
        torch.testing.assert_close(program.module()(x), ensemble(x))

"""Smaller forms of linear layers: PPFE's parameter counts, what the smaller networks compute, what is refused."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.errors import UserError
from tailorfl.models import BatchNorm1d, LowRankLinear, build_module, linear_layers
from tailorfl.models.lowrank import factor_linear, linear_in
from tailorfl.models.reduction import MaskedLinear, factored_by, factored_to, masked, narrowed_head, parameters

IMAGE = (3, 32, 32)
SHARES = (0.9, 0.7, 0.5, 0.3)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def network(*widths: int) -> nn.Sequential:
    """Hidden layers of a linear map and a ReLU, and a linear head; float64, always the same for the same widths."""
    torch.manual_seed(0)
    module = nn.Sequential()
    for place, (inputs, outputs) in enumerate(pairwise(widths[:-1]), start=1):
        hidden = nn.Sequential()
        hidden.add_module("linear", nn.Linear(inputs, outputs))
        hidden.add_module("relu", nn.ReLU())
        module.add_module(f"fc{place}", hidden)
    module.add_module("head", nn.Linear(widths[-2], widths[-1]))
    return module.double()


def inputs(width: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def linear(module: nn.Module, layer: str) -> nn.Linear:
    return linear_in(module, layer)[1]


REDUCTIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "factored_to": lambda module: factored_to(module, (2, 2, 1)),
    "factored_by": lambda module: factored_by(module, 1),
    "narrowed_head": lambda module: narrowed_head(module, ("fc1", "fc2", "head"), 0.5),
    "masked": lambda module: masked(module, {"fc2": 0.5, "head": 0.3}),
}


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_the_original_stays_as_it_is_and_shares_nothing_with_the_smaller_one(
    reduce: Callable[[nn.Module], nn.Module],
) -> None:
    module = network(10, 8, 6, 4)
    before, shown, random = {k: t.clone() for k, t in module.state_dict().items()}, repr(module), torch.get_rng_state()
    smaller = reduce(module)
    assert torch.equal(torch.get_rng_state(), random)
    assert parameters(smaller) < parameters(module)
    assert all(tensor.dtype == torch.float64 for tensor in smaller.parameters())
    assert smaller(inputs(10)).shape == (5, 4)
    assert smaller(inputs(10)).dtype == torch.float64
    with torch.no_grad():
        for tensor in smaller.parameters():
            tensor.fill_(9.0)
    assert repr(module) == shown
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_all_of_the_smaller_network_trains(reduce: Callable[[nn.Module], nn.Module]) -> None:
    smaller = reduce(network(10, 8, 6, 4))
    smaller(inputs(10)).square().sum().backward()
    assert all(tensor.is_leaf and tensor.grad is not None for tensor in smaller.parameters())


# Factoring.


@pytest.mark.parametrize(
    ("name", "classes", "numbers"), [("ppfe-cnn", 10, 307_842), ("ppfe-cnn-large", 100, 1_075_044)]
)
def test_the_networks_of_ppfe_have_the_parameters_that_the_paper_counts(name: str, classes: int, numbers: int) -> None:
    with torch.device("meta"):
        assert parameters(build_module(name, IMAGE, classes)) == numbers


@pytest.mark.parametrize(
    ("ranks", "numbers", "percent"), [((100, 50, 24), 289_462, 6.0), ((80, 40, 16), 253_222, 17.7)]
)
def test_the_reduced_networks_of_ppfe_on_cifar10(ranks: tuple[int, ...], numbers: int, percent: float) -> None:
    module = build_module("ppfe-cnn", IMAGE, 10)
    reduced = factored_to(module, ranks)
    convolutions, biases = 3 * 25 * 64 + 64 + 64 * 25 * 64 + 64, 120 + 64 + 10
    factors = sum(
        rank * (ins + outs)
        for rank, ins, outs in zip((*ranks[:2], 10), (1600, 120, 64), (120, 64, 10), strict=True)  # 10 = min(64, 10)
    )
    assert parameters(reduced) == convolutions + biases + factors == numbers
    assert round(100 * (1 - parameters(reduced) / parameters(module)), 1) == percent


def test_the_shared_layers_of_ppfe_on_cifar100() -> None:
    module = build_module("ppfe-cnn-large", IMAGE, 100)
    reduced = factored_to(module, (200, 100, 80))
    assert isinstance(module, nn.Sequential)
    assert isinstance(reduced, nn.Sequential)
    shared = [parameters(module[:-1]), parameters(reduced[:3]), parameters(module[:2])]
    assert [round(100 * numbers / 1_075_044, 1) for numbers in shared] == [98.8, 83.8, 19.5]


def test_a_rank_above_what_a_layer_has_is_what_it_has_and_changes_nothing() -> None:
    module = network(40, 30, 3)
    hidden = linear(module, "fc1")
    with torch.no_grad():  # of rank 2, so that nothing is lost with it
        hidden.weight.copy_(torch.randn(30, 2).double() @ torch.randn(2, 40).double())
    reduced = factored_to(module, (2, 1000))
    assert isinstance(reduced.head, LowRankLinear)
    assert reduced.head.rank == 3
    torch.testing.assert_close(reduced(inputs(40)), module(inputs(40)), rtol=1e-10, atol=1e-10)


def test_ranks_go_to_layers_from_base_to_head_and_past_those_without_a_linear_map() -> None:
    module = build_module("ppfe-cnn", IMAGE, 10)
    reduced = factored_to(module, (7, 5, 3))
    assert [reduced.get_submodule(path).rank for path in ("fc1.linear", "fc2.linear", "head")] == [7, 5, 3]
    assert type(reduced.get_submodule("conv1.conv")) is nn.Conv2d


@pytest.mark.parametrize("ranks", [(), (2,), (2, 2), (2, 2, 2, 2)])
def test_the_wrong_number_of_ranks_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"{len(ranks)} given for 3 linear layers \(fc1, fc2, head\)") as caught:
        factored_to(network(10, 8, 6, 4), ranks)
    assert str(list(ranks)) in str(caught.value)


@pytest.mark.parametrize(("ranks", "numbers"), [((99, 99), 290), ((5, 5), 190), ((5, 4), 175), ((6, 2), 165)])
def test_ranks_that_do_not_make_a_network_smaller_are_refused(ranks: tuple[int, ...], numbers: int) -> None:
    """It has 10 * 10 + 10 * 5 weights and 15 biases; a rank takes 20 numbers in the first layer, 15 in the second."""
    message = rf"has {numbers} parameters, the full one 165; allowed: ranks that make it smaller"
    with pytest.raises(UserError, match=message) as caught:
        factored_to(network(10, 10, 5), ranks)
    assert str(list(ranks)) in str(caught.value)


def test_one_layer_may_grow_if_the_network_shrinks() -> None:
    assert parameters(factored_to(network(10, 10, 5), (3, 5))) == 3 * 20 + 5 * 15 + 15


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(0, 9))
def test_factoring_by_a_level_shrinks_every_layer_that_it_factors(widths: list[int], level: int) -> None:
    module = network(*widths)
    reduced = factored_by(module, level)
    left = linear_layers(reduced)
    for name in linear_layers(module):
        full, now = module.get_submodule(name), reduced.get_submodule(name)
        if name in left:
            ins, outs = linear(module, name).in_features, linear(module, name).out_features
            assert SHARES[min(level, 3)] * ins * outs < ins + outs  # too small: even rank 1 is more than its share
            assert torch.equal(linear(reduced, name).weight, linear(module, name).weight)
        else:
            assert count(now) < count(full)
    assert reduced(inputs(widths[0])).shape == (5, widths[-1])


def test_the_levels_keep_less_and_less_and_the_last_one_goes_on() -> None:
    module = network(60, 40, 20)
    sizes = [parameters(factored_by(module, level)) for level in range(6)]
    # 60 * 40 / 100 = 24 and 40 * 20 / 60 = 13.3, times 0.9, 0.7, 0.5 and 0.3, rounded down.
    ranks = [(21, 12), (16, 9), (12, 6), (7, 4), (7, 4), (7, 4)]
    assert sizes == [100 * first + 60 * second + 60 for first, second in ranks]


def test_a_layer_that_does_not_train_does_not_train_when_it_is_factored() -> None:
    frozen = nn.Linear(8, 6)
    frozen.weight.requires_grad_(False)
    factors = factor_linear(frozen, 2)
    assert {name: tensor.requires_grad for name, tensor in factors.named_parameters()} == {
        "left": False,
        "right": False,
        "bias": True,
    }
    assert parameters(factors) == parameters(frozen) == 6


@pytest.mark.parametrize("name", ["tail", "relu", "two", "fc1.linear"])
def test_a_layer_without_exactly_one_linear_map_is_named(name: str) -> None:
    module = network(6, 5, 4)
    module.add_module("relu", nn.ReLU())
    module.add_module("two", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(UserError, match=rf"layer '{name}'; layers with one linear map: fc1, head$"):
        linear_in(module, name)
    for reduce in (masked, lambda module, layers: narrowed_head(module, list(layers), 0.5)):
        with pytest.raises(UserError, match=f"cannot reduce layer '{name}'"):
            reduce(module, {"fc1": 0.5, name: 0.5})


def test_the_linear_map_of_a_layer_is_found_wherever_it_is() -> None:
    module = network(6, 5, 4)
    module.add_module("deep", nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), nn.Dropout()))
    assert [linear_in(module, name)[0] for name in ("fc1", "head", "deep")] == ["fc1.linear", "head", "deep.0.1"]
    assert all(
        linear_in(module, name)[1] is module.get_submodule(linear_in(module, name)[0]) for name in ("fc1", "deep")
    )


# Width.


def test_the_widths_between_the_layers_are_cut_and_all_others_stay() -> None:
    module = network(12, 11, 7, 5, 4)
    smaller = narrowed_head(module, ("fc2", "fc3", "head"), 0.5)
    shapes = {name: tuple(linear(smaller, name).weight.shape) for name in linear_layers(smaller)}
    assert shapes == {"fc1": (11, 12), "fc2": (4, 11), "fc3": (3, 4), "head": (4, 3)}  # ceil of 3.5 and of 2.5
    assert [linear(smaller, name).in_features for name in shapes] == [12, 11, 4, 3]
    assert [linear(smaller, name).out_features for name in shapes] == [11, 4, 3, 4]
    for name, (outs, ins) in shapes.items():
        full, now = linear(module, name), linear(smaller, name)
        assert torch.equal(now.weight, full.weight[:outs, :ins])
        assert torch.equal(now.bias, full.bias[:outs])


def test_a_narrow_head_computes_the_function_of_its_slices() -> None:
    module = network(6, 5, 4, 3)
    x = inputs(6)
    first, second, head = (linear(module, name) for name in ("fc1", "fc2", "head"))
    h = F.relu(F.linear(F.relu(first(x)), second.weight[:2], second.bias[:2]))
    by_hand = F.linear(h, head.weight[:, :2], head.bias)
    torch.testing.assert_close(narrowed_head(module, ("fc2", "head"), 0.4)(x), by_hand)


@pytest.mark.parametrize("ratio", [0.9, 0.5, 1e-9])
def test_a_narrow_network_of_ppfe_runs_and_keeps_its_outputs(ratio: float) -> None:
    module = build_module("ppfe-cnn", (3, 16, 16), 10)
    smaller = narrowed_head(module, ("fc1", "fc2", "head"), ratio)
    assert smaller(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    assert linear(smaller, "fc1").in_features == linear(module, "fc1").in_features
    assert linear(smaller, "fc1").out_features == max(1, math.ceil(ratio * 120))


def test_ratio_one_is_a_copy() -> None:
    module = network(6, 5, 4, 3)
    same = narrowed_head(module, ("fc1", "fc2", "head"), 1.0)
    assert same is not module
    assert repr(same) == repr(module)
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in module.state_dict().items())


def test_the_last_layer_alone_has_no_width_to_cut() -> None:
    module = network(6, 5, 4)
    assert repr(narrowed_head(module, ("head",), 0.1)) == repr(module)


def test_layers_without_a_bias_are_cut_too() -> None:
    module = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False))
    smaller = narrowed_head(module, ("0", "1"), 0.5)
    assert {name: tuple(tensor.shape) for name, tensor in smaller.state_dict().items()} == {
        "0.weight": (2, 6),
        "1.weight": (3, 2),
    }


@pytest.mark.parametrize("beside", ["norm", "linear_norm"])
@pytest.mark.parametrize(
    ("norm", "found"),
    [(nn.LayerNorm(5), "weight"), (BatchNorm1d(5), "weight"), (BatchNorm1d(5, affine=False), "running_mean")],
    ids=["layer", "batch", "statistics"],
)
def test_a_layer_with_a_norm_beside_the_linear_map_is_refused(norm: nn.Module, found: str, beside: str) -> None:
    module = network(6, 5, 4)
    module.get_submodule("fc1").add_module(beside, norm)
    with pytest.raises(
        UserError, match=rf"layer 'fc1' cannot be made narrower: .* it has fc1\.{beside}\.{found}"
    ) as caught:
        narrowed_head(module, ("fc1", "head"), 0.5)
    assert "\n" not in str(caught.value)


# Sparsity.


@pytest.mark.parametrize("share", [0.0, 0.3, 0.4, 0.5, 1.0])
def test_a_masked_layer_has_its_share_of_zeros(share: float) -> None:
    module = network(20, 10, 5)
    sparse = masked(module, {"fc1": share})
    part = sparse.get_submodule("fc1.linear")
    assert isinstance(part, MaskedLinear)
    assert int((~part.mask).sum()) == round(share * 200)
    assert parameters(sparse) == parameters(module) - round(share * 200)
    assert torch.equal(part.weight, linear(module, "fc1").weight)
    assert type(sparse.get_submodule("head")) is nn.Linear


def test_a_masked_network_computes_the_function_of_the_weights_that_are_left() -> None:
    module = network(6, 5, 3)
    sparse = masked(module, {"fc1": 0.5, "head": 0.2})
    x, masks = inputs(6), dict(sparse.named_buffers())
    first, head = linear(module, "fc1"), linear(module, "head")
    h = F.relu(x @ first.weight.where(masks["fc1.linear.mask"], 0.0).T + first.bias)
    torch.testing.assert_close(sparse(x), h @ head.weight.where(masks["head.mask"], 0.0).T + head.bias)


def test_the_same_weights_are_held_at_zero_whoever_asks() -> None:
    """The mask depends on the layer's name and form alone, neither on its weights nor on numbers drawn elsewhere."""
    module = network(20, 10, 5)
    mask = masked(module, {"fc1": 0.3}).get_buffer("fc1.linear.mask")
    torch.manual_seed(77)
    other = nn.Sequential()
    other.add_module("fc1", nn.Sequential())
    other.get_submodule("fc1").add_module("linear", nn.Linear(20, 10))
    assert torch.equal(masked(other, {"fc1": 0.3}).get_buffer("fc1.linear.mask"), mask)
    assert torch.equal(masked(module, {"head": 0.9, "fc1": 0.3}).get_buffer("fc1.linear.mask"), mask)


def test_zeros_are_spread_and_more_of_them_include_the_fewer() -> None:
    """A layer that is sparser in a later stage holds at zero what it held there before."""
    masks = [masked(network(50, 40, 5), {"fc1": share}).get_buffer("fc1.linear.mask") for share in (0.3, 0.6)]
    assert bool((masks[1] <= masks[0]).all())
    assert 0.1 < (~masks[0]).double().mean(0).min() < (~masks[0]).double().mean(0).max() < 0.6


def test_layers_of_the_same_form_have_masks_of_their_own() -> None:
    sparse = masked(network(9, 9, 9, 9), {"fc1": 0.5, "fc2": 0.5})
    assert not torch.equal(sparse.get_buffer("fc1.linear.mask"), sparse.get_buffer("fc2.linear.mask"))


def test_a_weight_that_is_held_at_zero_has_no_gradient() -> None:
    sparse = masked(network(6, 5, 3), {"fc1": 0.5, "head": 0.2})
    sparse(inputs(6, rows=50)).square().sum().backward()
    for path in ("fc1.linear", "head"):
        part = sparse.get_submodule(path)
        assert isinstance(part, MaskedLinear)
        assert part.weight.grad is not None
        assert bool((part.weight.grad[~part.mask] == 0).all())
        assert bool((part.weight.grad[part.mask] != 0).any())


def test_the_mask_does_not_train_and_goes_with_the_network() -> None:
    sparse = masked(network(6, 5, 3), {"fc1": 0.5})
    assert set(dict(sparse.named_parameters())) == set(dict(network(6, 5, 3).named_parameters()))
    assert sparse.get_buffer("fc1.linear.mask").dtype == torch.bool
    assert "fc1.linear.mask" in sparse.state_dict()


def test_weights_that_do_not_train_count_neither_way() -> None:
    module = network(6, 5, 3)
    linear(module, "fc1").weight.requires_grad_(False)
    assert parameters(module) == 5 + 5 * 3 + 3
    assert parameters(masked(module, {"fc1": 0.5})) == 5 + 5 * 3 + 3
    assert parameters(masked(module, {"head": 0.4})) == 5 + 9 + 3

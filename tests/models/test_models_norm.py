"""Masked batch norm: it must equal torch's batch norm on the batch without its padding."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tailorfl.errors import UserError
from tailorfl.models import BatchNorm1d, BatchNorm2d, convert_norms, valid_samples
from tailorfl.models.norm import BatchNorm3d

CHANNELS = 3


def randomized(norm: nn.Module, seed: int = 0) -> nn.Module:
    """The norm in float64, with parameters and statistics that are not the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*norm.double().parameters(), *norm.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.5
    return norm


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    keep=st.lists(st.booleans(), min_size=2, max_size=8).filter(lambda flags: sum(flags) >= 2),
    size=st.sampled_from([None, 1, 4, (1, 1), (2, 3), (1, 2, 2)]),
    boolean=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_masked_norm_equals_torchs_on_the_unpadded_batch(keep, size, boolean, seed):
    space = () if size is None else (size,) if isinstance(size, int) else size
    ours_type = {0: BatchNorm1d, 1: BatchNorm1d, 2: BatchNorm2d, 3: BatchNorm3d}[len(space)]
    torchs_type = ours_type.__mro__[2]
    ours, torchs = randomized(ours_type(CHANNELS), seed), randomized(torchs_type(CHANNELS), seed)
    mask = torch.tensor(keep)
    x = torch.randn(len(keep), CHANNELS, *space, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (3 * x + 1).requires_grad_()
    cotangent = torch.randn_like(x)

    with valid_samples(mask if boolean else mask.float()):
        out = ours(x)
    expected = torchs(x[mask])
    close(out[mask], expected)
    (gradient, *ours_gradients) = torch.autograd.grad((out * cotangent)[mask].sum(), [x, *ours.parameters()])
    (expected_gradient, *gradients) = torch.autograd.grad((expected * cotangent[mask]).sum(), [x, *torchs.parameters()])
    close(gradient, expected_gradient)
    for left, right in zip(ours_gradients, gradients, strict=True):
        close(left, right)
    close(ours.running_mean, torchs.running_mean)
    close(ours.running_var, torchs.running_var)
    close(ours.eval()(x), torchs.eval()(x))


@pytest.mark.parametrize("masked", [True, False])
def test_stacked_norm_changes_the_stacked_buffers_and_equals_one_by_one(masked):
    clients, batch = 3, 5
    norms = [randomized(BatchNorm2d(CHANNELS), seed) for seed in range(clients)]
    x = torch.randn(clients, batch, CHANNELS, 2, 2, dtype=torch.float64)
    counts = [5, 3, 2] if masked else [5, 5, 5]
    masks = torch.tensor([[1.0] * n + [0.0] * (batch - n) for n in counts]) if masked else None
    parameters, buffers = torch.func.stack_module_state(norms)
    before = {name: value.clone() for name, value in buffers.items()}

    def loss(parameters, buffers, x, mask):
        with valid_samples(mask):
            out = functional_call(norms[0], (parameters, buffers), (x,))
        weight = torch.ones(batch, dtype=x.dtype) if mask is None else mask
        return (out.pow(3) * weight.reshape(-1, 1, 1, 1)).sum()

    with torch.no_grad():
        dims = (0, 0, 0, 0 if masked else None)
        gradients = vmap(grad(loss), in_dims=dims)(parameters, buffers, x, masks)
    for client, count in enumerate(counts):
        torchs = randomized(nn.BatchNorm2d(CHANNELS), client)
        torchs(x[client, :count]).pow(3).sum().backward()
        close(gradients["weight"][client], torchs.weight.grad)
        close(gradients["bias"][client], torchs.bias.grad)
        close(buffers["running_mean"][client], torchs.running_mean)
        close(buffers["running_var"][client], torchs.running_var)
        assert not torch.equal(buffers["running_mean"][client], before["running_mean"][client])


def test_a_batch_of_padding_alone_changes_no_statistics_and_stays_finite():
    norm = randomized(BatchNorm2d(CHANNELS))
    before = copy.deepcopy(norm.state_dict())
    x = torch.full((4, CHANNELS, 2, 2), torch.inf, dtype=torch.float64, requires_grad=True)
    with valid_samples(torch.zeros(4)):
        out = norm(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0.0, 0.0]), None])
def test_one_value_a_channel_moves_the_mean_but_not_the_variance(mask):
    norm = randomized(BatchNorm1d(CHANNELS))
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    x = torch.randn(1 if mask is None else 3, CHANNELS, dtype=torch.float64)
    with valid_samples(mask):
        out = norm(x)
    close(out[0], norm.bias)
    close(norm.running_mean, 0.9 * mean + 0.1 * x[0])
    assert torch.equal(norm.running_var, variance)


def test_the_mask_holds_only_within_its_scope():
    norm, x = BatchNorm1d(CHANNELS), torch.randn(4, CHANNELS)
    whole = norm(x)
    with valid_samples(torch.tensor([1.0, 1.0, 0.0, 0.0])):
        masked = norm(x)
        with valid_samples(None):
            torch.testing.assert_close(norm(x), whole)
        torch.testing.assert_close(norm(x), masked)
    torch.testing.assert_close(norm(x), whole)
    with valid_samples(torch.ones(3)), pytest.raises(ValueError, match="mask of shape"):
        norm(x)


def test_half_precision_keeps_its_type_and_single_precision_statistics():
    norm = BatchNorm2d(CHANNELS)
    with valid_samples(torch.tensor([1.0, 1.0, 0.0])):
        out = norm(torch.randn(3, CHANNELS, 2, 2, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32


def test_state_loads_from_torchs_norm_and_from_a_plain_dict():
    torchs, ours = randomized(nn.BatchNorm2d(CHANNELS)), BatchNorm2d(CHANNELS).double()
    ours.load_state_dict(torchs.state_dict())
    assert sorted(ours.state_dict()) == ["bias", "running_mean", "running_var", "weight"]
    BatchNorm2d(CHANNELS).load_state_dict(dict(ours.state_dict()))
    ours.reset_running_stats()
    assert ours.running_mean.eq(0).all()
    assert ours.running_var.eq(1).all()


def test_convert_norms_replaces_every_plain_norm_and_keeps_its_state():
    inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.1, momentum=0.3))
    module = nn.Sequential(inner, nn.Flatten(), nn.BatchNorm1d(4, affine=False), nn.GroupNorm(1, 4))
    weight = inner[1].weight
    assert convert_norms(module) is module
    assert type(inner[1]) is BatchNorm2d
    assert type(module[2]) is BatchNorm1d
    assert type(module[3]) is nn.GroupNorm
    assert inner[1].weight is weight
    assert (inner[1].eps, inner[1].momentum) == (0.1, 0.3)
    assert not any("num_batches" in name for name, _ in module.named_buffers())
    with valid_samples(torch.tensor([1.0, 1.0, 0.0])):
        module(torch.randn(3, 3, 1, 1))
    copy.deepcopy(module)


def test_convert_norms_keeps_a_norm_without_running_statistics():
    norm = convert_norms(nn.Sequential(nn.BatchNorm1d(CHANNELS, track_running_stats=False)))
    x = torch.randn(4, CHANNELS)
    for mode in (True, False):
        with valid_samples(torch.tensor([1.0, 1.0, 1.0, 0.0])):
            out = norm.train(mode)(x)
        torch.testing.assert_close(out[:3], nn.BatchNorm1d(CHANNELS)(x[:3]))


def test_convert_norms_refuses_cumulative_momentum():
    with pytest.raises(UserError, match="momentum=None"):
        convert_norms(nn.Sequential(nn.BatchNorm1d(3, momentum=None)))

"""The kernels of a stack compute what torch computes client by client; without a GPU, in Triton's interpreter."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from tailorfl.cohort.gradients import Inputs, stacked_gradients
from tailorfl.cohort.objective import cross_entropy
from tailorfl.models import Network, stacked
from tailorfl.models.stacked import Convolve, Correlate, Pool, RectifiedMaxima, convert_layers, stacked_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kernels = pytest.importorskip("tailorfl.models.kernels", reason="no Triton on this system", exc_type=ImportError)

needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="no CUDA device")
CLIENTS = 3


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Without TF32; whether a tensor is on a GPU is not asked."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(stacked, "_has_kernel", lambda images: stacked._scope.stacked)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def near(found, wanted):
    pairs = list(zip(tree_leaves(found), tree_leaves(wanted), strict=True))
    return bool(pairs) and all(torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max())) for a, b in pairs)


# Images, channels, height, width, outputs, filter's height and width, padding: whole and broken blocks of every kind.
SHAPES = [
    (2, 3, 12, 11, 7, 5, 5, (0, 0)),
    (2, 32, 9, 9, 64, 3, 3, (1, 1)),
    (3, 1, 10, 10, 20, 3, 3, (1, 1)),
    (1, 64, 6, 6, 70, 5, 3, (2, 0)),
    (9, 5, 9, 8, 3, 1, 1, (0, 0)),
]


@pytest.mark.parametrize(("images", "channels", "height", "width", "outputs", "tall", "wide", "padding"), SHAPES)
def test_convolutions_and_the_gradient_of_their_filters(
    images, channels, height, width, outputs, tall, wide, padding
):  # fmt: skip
    given, filters = drawn(CLIENTS, images, channels, height, width), drawn(CLIENTS, outputs, channels, tall, wide)
    bias = drawn(CLIENTS, outputs)
    found = kernels.convolve(given, filters, bias, padding)
    wanted = torch.stack([F.conv2d(*one, padding=padding) for one in zip(given, filters, bias, strict=True)])
    assert near(found, wanted)
    change = drawn(*wanted.shape)
    each = zip(given, filters, change, strict=True)
    by_torch = [torch.nn.grad.conv2d_weight(x, w.shape, g, padding=padding) for x, w, g in each]
    wanted = torch.stack(by_torch), change.sum((1, 3, 4))
    assert near(kernels.correlate(given, change, (tall, wide), padding, True), wanted)
    assert near(kernels.correlate(given, change, (tall, wide), padding, False)[0], wanted[0])


def test_images_may_lie_in_memory_in_any_order():
    given, filters = drawn(CLIENTS, 2, 6, 5, 4).permute(0, 1, 4, 2, 3), drawn(CLIENTS, 8, 4, 3, 3)
    assert near(
        kernels.convolve(given, filters, None, (1, 1)), kernels.convolve(given.contiguous(), filters, None, (1, 1))
    )


def test_a_client_with_more_numbers_than_fit_is_computed_in_parts(monkeypatch):
    given, filters, change = drawn(CLIENTS, 5, 4, 6, 6), drawn(CLIENTS, 8, 4, 3, 3), drawn(CLIENTS, 5, 8, 6, 6)
    whole = kernels.convolve(given, filters, None, (1, 1)), kernels.correlate(given, change, (3, 3), (1, 1), True)
    monkeypatch.setattr(kernels, "MOST", 8 * 6 * 6 * 2)
    assert near(
        (kernels.convolve(given, filters, None, (1, 1)), kernels.correlate(given, change, (3, 3), (1, 1), True)), whole
    )


@pytest.mark.parametrize(("shape", "far"), [((3, 5, 9, 8), False), ((3, 5, 9, 8), True), ((4, 70, 9, 8), True)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)),
                                                           ((3, 2), (1, 3), (1, 0))])  # fmt: skip
def test_maxima_and_their_gradient(kernel, stride, padding, relu, shape, far, monkeypatch):
    if far:  # places of 64 bits
        monkeypatch.setattr(kernels, "MOST", 1)
    given = drawn(*shape).requires_grad_()
    wanted = F.max_pool2d(given, kernel, stride, padding)
    wanted = wanted.relu() if relu else wanted
    found, codes = kernels.pool(given.detach(), kernel, stride, padding, relu)
    assert torch.equal(found, wanted)
    change = drawn(*wanted.shape)
    (by_torch,) = torch.autograd.grad(wanted, given, change)
    assert near(kernels.unpool(change, codes, shape[2:], kernel, stride, padding), by_torch)


def test_a_number_that_is_none_is_the_largest_as_in_torch():
    given = drawn(1, 1, 4, 4)
    given[0, 0, 1, 1] = torch.nan
    for relu in (False, True):
        found, _ = kernels.pool(given, (2, 2), (2, 2), (0, 0), relu)
        assert torch.equal(found.isnan(), F.max_pool2d(given, 2).isnan())


def test_a_window_of_nothing_but_minus_infinity_leads_back_into_the_image():
    given = torch.full((1, 1, 3, 3), -torch.inf, device=DEVICE)
    found, codes = kernels.pool(given, (3, 3), (2, 2), (1, 1), False)
    wanted, places = F.max_pool2d(given, 3, 2, 1, return_indices=True)
    assert torch.equal(found, wanted)
    change = drawn(*wanted.shape)
    back = torch.zeros(9, device=DEVICE).scatter_add(0, places.flatten(), change.flatten()).view(1, 1, 3, 3)
    assert near(kernels.unpool(change, codes, (3, 3), (3, 3), (2, 2), (1, 1)), back)


def test_images_far_apart_in_memory_are_computed_in_parts(monkeypatch):
    given, filters = drawn(4, CLIENTS, 3, 6, 6).transpose(0, 1), drawn(CLIENTS, 2, 3, 3, 3)
    convolve, counts = kernels.convolve, []

    def counted(images, *more):
        counts.append(images.shape[1])
        return convolve(images, *more)

    whole = convolve(given, filters, None, (1, 1))
    monkeypatch.setattr(kernels, "convolve", counted)
    # Half of a client's images is nearer together than this; all of them are not, though they have fewer numbers.
    monkeypatch.setattr(kernels, "MOST", 4 * 3 * 6 * 6 + 1)
    assert given[0].numel() < kernels.MOST
    assert near(convolve(given, filters, None, (1, 1)), whole)
    assert counts == [2, 2]


def ours(weights, bias, more, images):
    hidden = Convolve.apply(images[None], weights[None], bias[None], (1, 1)).squeeze(0)
    hidden = Pool.apply(hidden, (3, 3), (2, 2), (1, 1), True)[0]
    return Convolve.apply(hidden[None], more[None], None, (1, 1)).squeeze(0).square().sum()


def by_torch(weights, bias, more, images):
    hidden = F.max_pool2d(F.conv2d(images, weights, bias, padding=1), 3, 2, 1).relu()
    return F.conv2d(hidden, more, None, padding=1).square().sum()


TENSORS = drawn(CLIENTS, 6, 3, 3, 3), drawn(CLIENTS, 6), drawn(CLIENTS, 5, 6, 3, 3), drawn(CLIENTS, 2, 3, 9, 8)


def gradients(loss):
    return vmap(grad_and_value(loss, argnums=(0, 1, 2)))


def twice(loss):
    return vmap(grad(lambda *given: grad(loss)(*given).square().sum(), argnums=(0, 1, 2, 3)))


@pytest.mark.parametrize("kind", [gradients, twice])
def test_they_can_be_differentiated_under_vmap_once_and_twice(kind):
    assert near(kind(ours)(*TENSORS), kind(by_torch)(*TENSORS))


def test_they_can_be_traced():
    assert near(make_fx(gradients(ours))(*TENSORS)(*TENSORS), gradients(by_torch)(*TENSORS))


def test_what_is_not_stacked_may_be_shared():
    images, filters = TENSORS[3], TENSORS[0]
    for over in ((0, None), (None, 0)):
        given = images if over[0] == 0 else images[0], filters if over[1] == 0 else filters[0]
        found = vmap(lambda x, w: Convolve.apply(x[None], w[None], None, (1, 1))[0], over)(*given)
        assert near(found, vmap(lambda x, w: F.conv2d(x, w, padding=1), over)(*given))
    change = drawn(2, 6, 9, 8)
    shared = vmap(lambda x: Correlate.apply(x[None], change[None], (1, 1), False)[0][0])(images)
    assert near(shared, torch.stack([torch.nn.grad.conv2d_weight(x, (6, 3, 3, 3), change, padding=1) for x in images]))


class Mixed(nn.Module):
    """Layers that have a kernel, and layers that have none: steps of two, groups, uneven ends."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), RectifiedMaxima(nn.MaxPool2d(2)))
        self.strided = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.grouped = nn.Sequential(nn.Conv2d(8, 8, 3, padding="same", groups=2), nn.MaxPool2d(2, ceil_mode=True))
        self.head = nn.Sequential(nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.head(self.grouped(self.strided(self.first(x))))


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=needs_gpu)])
def test_a_network_has_the_same_gradients_with_kernels_and_without(half, monkeypatch):
    torch.manual_seed(0)
    network = Network(Mixed(), "mixed", DEVICE, half)
    values = {name: drawn(CLIENTS, *tensor.shape) for name, tensor in network.initial().items()}
    valid = torch.ones(CLIENTS, 4, device=DEVICE)
    targets = torch.arange(4, device=DEVICE).expand(CLIENTS, 4)
    inputs = Inputs(values, {}, (drawn(CLIENTS, 4, 3, 9, 9), targets, valid, valid, valid.sum(1)), {}, {}, {})
    compute = stacked_gradients(network, cross_entropy)
    calls = []
    convolve = kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *given: calls.append(1) or convolve(*given))
    found = compute(inputs)
    assert len(calls) == 3  # two forwards, and backwards where images are not the data
    monkeypatch.setattr(stacked, "_has_kernel", lambda images: False)
    wanted = compute(inputs)
    # In half precision the largest number of a window may be another one.
    assert near(found, wanted) or (half and all(map(roughly, tree_leaves(found), tree_leaves(wanted))))
    assert len(calls) == 3


class Shared(nn.Module):
    """A pooling that is there several times, is read before the ReLU after it, and a ReLU that somebody listens to."""

    def __init__(self):
        super().__init__()
        pool = nn.MaxPool2d(2)
        convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.body = nn.Sequential(convolutions[0], pool, nn.ReLU(), convolutions[1], pool)
        self.relu = nn.Sequential(nn.MaxPool2d(1), nn.ReLU())
        self.relu[1].register_forward_hook(lambda module, inputs, output: output + 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)) + self.relu(self.body[:2](x)).mean((2, 3)))


def test_layers_that_a_network_uses_in_its_own_way_compute_what_they_did():
    torch.manual_seed(0)
    plain = Shared()
    network, given = Network(copy.deepcopy(plain), "shared"), torch.randn(2, 3, 8, 8)
    for train in (True, False):
        assert torch.equal(network.forward(network.initial(), given, None, train), plain(given))


def test_outside_of_a_stack_layers_are_torchs_own():
    module = convert_layers(Mixed())
    given = torch.randn(2, 3, 9, 9)
    with stacked_layers():
        assert stacked._scope.stacked
    assert not stacked._scope.stacked
    torch.manual_seed(0)
    plain = Mixed()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(given), plain(given))


def test_whether_kernels_run_is_found_out_inside_of_vmap_too(monkeypatch, caplog):
    def asked(x):
        found.append(stacked._kernels_run(DEVICE))
        return x.sum()

    found = []
    stacked._kernels_run.cache_clear()
    vmap(grad(asked))(drawn(2, 3))
    assert found == [True]

    def no_compiler(*given):
        raise RuntimeError("Failed to find C compiler")

    stacked._kernels_run.cache_clear()
    monkeypatch.setattr(kernels, "pool", no_compiler)
    vmap(grad(asked))(drawn(2, 3))
    vmap(grad(asked))(drawn(2, 3))
    stacked._kernels_run.cache_clear()
    assert found == [True, False, False]
    assert len(caplog.messages) == 1, "it is said once"
    assert "RuntimeError: Failed to find C compiler" in caplog.messages[0]


def roughly(found, wanted):
    return found.dtype == wanted.dtype and (found - wanted).norm() < 0.1 * wanted.norm()


HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter has no bfloat16


def near_half(found, wanted):
    """As near as numbers of eight bits come."""
    return found.dtype == HALF and (found.float() - wanted).norm() < 6e-3 * wanted.norm()


def test_in_half_precision_sums_are_made_in_single():
    given, filters = drawn(CLIENTS, 4, 32, 9, 9).to(HALF), drawn(CLIENTS, 20, 32, 3, 3).to(HALF)
    bias, change = drawn(CLIENTS, 20).to(HALF), drawn(CLIENTS, 4, 20, 9, 9).to(HALF)
    wide = [tensor.float() for tensor in (given, filters, bias, change)]
    assert near_half(kernels.convolve(given, filters, bias, (1, 1)), kernels.convolve(*wide[:3], (1, 1)))
    found = kernels.correlate(given, change, (3, 3), (1, 1), True)
    wanted = kernels.correlate(wide[0], wide[3], (3, 3), (1, 1), True)
    assert all(map(near_half, found, wanted))
    largest, codes = kernels.pool(given[0], (3, 3), (2, 2), (1, 1), True)
    wanted, places = kernels.pool(wide[0][0], (3, 3), (2, 2), (1, 1), True)
    assert torch.equal(largest.float(), wanted)
    assert torch.equal(codes, places)
    back = kernels.unpool(largest, codes, (9, 9), (3, 3), (2, 2), (1, 1))
    assert near_half(back, kernels.unpool(wanted, places, (9, 9), (3, 3), (2, 2), (1, 1)))


@needs_gpu
def test_tf32_is_as_near_as_torchs():
    given, filters, change = drawn(CLIENTS, 8, 32, 16, 16), drawn(CLIENTS, 64, 32, 3, 3), drawn(CLIENTS, 8, 64, 16, 16)

    def both():
        return kernels.convolve(given, filters, None, (1, 1)), *kernels.correlate(given, change, (3, 3), (1, 1), True)

    exactly = both()
    torch.backends.cudnn.allow_tf32 = True
    for found, wanted in zip(both(), exactly, strict=True):
        assert 0 < (found - wanted).norm() / wanted.norm() < 2e-3


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the kernels run on the GPU that is here")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_for_gpus_which_the_interpreter_does_not_show(capability, tmp_path):
    script = Path(__file__).with_name("compile_kernels.py")
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiling["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script), capability], env=compiling, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["_convolve", "_correlate", "_pool", "_unpool"]

"""Training passes in half precision: what is computed in which type, and what stays as it was."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tailorfl.cohort import Engine
from tailorfl.cohort.gradients import Inputs, single_gradients, stacked_gradients
from tailorfl.cohort.objective import cross_entropy
from tailorfl.cohort.traces import Program
from tailorfl.errors import UserError
from tailorfl.models import Network, build_module
from tailorfl.models.half import HALF, half_precision

CLIENTS, BATCH = 3, 6


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pair(module):
    """A network in single precision, and the same in half."""
    return Network(module, "wide"), Network(module, "mixed", mixed=True)


def test_a_product_is_of_halves_and_all_that_leaves_is_single():
    _, network = pair(nn.Sequential(nn.Linear(8, 5)))
    values, given = network.initial(), drawn(4, 8)
    found = network.forward(values, given, None, train=True)
    by_hand = F.linear(given.to(HALF), values["0.weight"].to(HALF), values["0.bias"].to(HALF))
    assert found.dtype == torch.float32
    assert torch.equal(found, by_hand.float())


def test_tests_and_what_is_exported_are_in_single_precision():
    wide, mixed = pair(build_module("mlp", (8,), 3))
    values, given = wide.initial(), drawn(4, 8)
    assert torch.equal(mixed.forward(values, given, None, False), wide.forward(values, given, None, False))
    assert torch.equal(mixed.features(values, given, None, False), wide.features(values, given, None, False))
    assert not torch.equal(mixed.features(values, given, None, True), wide.features(values, given, None, True))
    assert mixed.features(values, given, None, True).dtype == mixed.initial()["head.weight"].dtype == torch.float32


def inputs_of(network, shape):
    values = {name: drawn(CLIENTS, *tensor.shape) * 0.1 for name, tensor in network.initial().items()}
    trained = {name: values.pop(name) for name in network.parameters}
    ones = torch.ones(CLIENTS, BATCH)
    targets = torch.arange(BATCH).expand(CLIENTS, BATCH) % 3
    return Inputs(trained, values, (drawn(CLIENTS, BATCH, *shape), targets, ones, ones, ones.sum(1)), {}, {}, {})


def near(found, wanted):
    flat = [torch.cat([tensor.flatten() for tensor in values.values()]) for values in (found, wanted)]
    return all(t.dtype == torch.float32 for t in found.values()) and F.cosine_similarity(*flat, dim=0) > 0.98


@pytest.mark.parametrize(("name", "shape"), [("mlp", (8,)), ("cnn", (3, 16, 16)), ("stride-cnn", (3, 16, 16))])
def test_gradients_are_those_of_single_precision_but_for_rounding_stacked_traced_and_alone(name, shape):
    wide, mixed = pair(build_module(name, shape, 3))
    wanted, losses = stacked_gradients(wide, cross_entropy)(inputs_of(wide, shape))
    compute = stacked_gradients(mixed, cross_entropy)
    found, of_mixed = compute(inputs_of(mixed, shape))
    assert near(found, wanted)
    assert not torch.equal(of_mixed, losses)
    assert torch.allclose(of_mixed, losses, rtol=0.02)
    traced, _ = Program(compute, inputs_of(mixed, shape))(inputs_of(mixed, shape))
    assert near(traced, found)
    for client in range(CLIENTS):
        rows = slice(client, client + 1)
        given = inputs_of(mixed, shape)
        one = Inputs(
            {name: tensor[rows] for name, tensor in given.trained.items()},
            {name: tensor[rows] for name, tensor in given.fixed.items()},
            tuple(tensor[rows] for tensor in given.batch),
            *({}, {}, {}),
        )
        alone, _ = single_gradients(mixed, cross_entropy)(one)
        assert near(alone, {name: tensor[rows] for name, tensor in found.items()})


def test_statistics_of_norms_are_counted_in_single_precision():
    _, network = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)))
    values, given = network.initial(), drawn(BATCH, 3, 8, 8)
    halves = F.conv2d(given.to(HALF), values["0.weight"].to(HALF), values["0.bias"].to(HALF)).float()
    network.forward(values, given, None, train=True)
    assert values["1.running_mean"].dtype == torch.float32
    assert torch.allclose(values["1.running_mean"], 0.1 * halves.mean((0, 2, 3)), atol=1e-6)


class Own(nn.Module):
    """What a network of a user's own may do between its layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.free = nn.Parameter(drawn(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.Sequential(nn.LayerNorm(8), nn.PReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = F.linear(self.body(x), self.free) + x @ self.free
        x = self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return self.head(self.norm(x).softmax(-1) * torch.einsum("bi,ij->bj", x, self.free))


def test_a_network_of_a_users_own_runs_whatever_it_does_between_its_layers():
    torch.manual_seed(0)
    wide, mixed = pair(Own())
    found, wanted = (network.forward(wide.initial(), drawn(4, 8), None, train=True) for network in (mixed, wide))
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, atol=0.05)
    assert not torch.equal(found, wanted)


class Last(nn.Module):
    def forward(self, x):
        return x[0]


class Again(nn.Module):
    """Computes its layer anew on the way back, when it is in single precision."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda given: self.layer(given).tanh(), x, use_reentrant=False)


class Wide(torch.autograd.Function):
    """Goes back in single precision only, and does not say why."""

    @staticmethod
    def forward(given):
        return given.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        if gradient.dtype == HALF:
            raise NotImplementedError
        return gradient


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(Wide.apply(self.body(x)))


def test_an_error_without_a_word_is_told_by_its_kind():
    network = Network(Silent(), "own", mixed=True)
    with pytest.raises(UserError, match="precision=mixed: NotImplementedError; allowed: float32"):
        Engine(torch.device("cpu")).plan(network, drawn(1, 8))


def test_what_cannot_be_computed_so_is_refused_in_one_line():
    network = Network(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 4), Last()), "own", mixed=True)
    with pytest.raises(
        UserError, match=r"does not run on .* 8: RNN input dtype .*with precision=mixed; allowed: float32"
    ):
        network.tried(drawn(1, 8), train=True)
    with pytest.raises(UserError, match="own gives a tuple; allowed: one tensor of outputs"):
        Network(nn.Sequential(nn.LSTM(8, 4)), "own", mixed=True).tried(drawn(1, 8), train=True)
    again = Network(nn.Sequential(Again()), "own", mixed=True)
    with pytest.raises(UserError, match=r"own cannot be trained with precision=mixed: .*; allowed: float32") as caught:
        Engine(torch.device("cpu")).plan(again, drawn(1, 8))
    assert "\n" not in str(caught.value)
    Engine(torch.device("cpu")).plan(Network(nn.Sequential(Again()), "own"), drawn(1, 8))


def test_what_a_network_writes_its_products_into_is_written():
    given, room = drawn(4, 8), torch.zeros(8, 8)
    with half_precision(True):
        torch.mm(given.t(), given, out=room)
    assert torch.equal(room, given.t() @ given)


def test_the_scope_is_this_threads_alone_and_ends_with_an_error():
    given, seen = drawn(2, 2), []
    with pytest.raises(RuntimeError), half_precision(True):  # noqa: PT012
        assert (given @ given).dtype == HALF
        thread = threading.Thread(target=lambda: seen.append((given @ given).dtype))
        thread.start()
        thread.join()
        raise RuntimeError
    assert seen == [torch.float32]
    assert (given @ given).dtype == torch.float32
    with half_precision(False):
        assert (given @ given).dtype == torch.float32

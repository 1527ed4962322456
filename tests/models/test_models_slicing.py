"""Narrow networks: their shapes, what they compute, and what cannot be narrowed."""

import math

import pytest
import torch
from torch import Tensor, nn

from tailorfl.errors import UserError
from tailorfl.models import build_module, networks
from tailorfl.models.slicing import cut, leading, narrowed, narrowed_shapes, shapes_of

IMAGE = (3, 16, 16)
OPTIONS: dict[str, dict] = {
    "resnet18": {"width": 0.15, "stem": "cifar"},
    "mobilenet": {"width": 0.15},
    "stride-cnn": {"width": 0.25},
    "ssd-resnet18": {"stages": 3},
}
NETWORKS = [name for name in networks if name != "text"]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_module(name, IMAGE, 5, **OPTIONS.get(name, {})).double()


@pytest.mark.parametrize("ratio", [0.5, 0.3, 1e-3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        ("resnet18", {"stem": "cifar", "stages": 3}),
        ("mobilenet", {}),
        ("stride-cnn", {}),
    ],
)
def test_a_narrowed_network_is_the_one_that_the_zoo_builds_in_that_width(name: str, options: dict, ratio: float):
    with torch.device("meta"):
        full, narrow = (build_module(name, IMAGE, 7, **options, width=width) for width in (1.0, ratio))
    found = narrowed(full, ratio)
    assert shapes_of(found) == shapes_of(narrow)
    assert repr(found) == repr(narrow)  # the sizes that layers state, groups too


@pytest.mark.parametrize("name", NETWORKS)
def test_a_narrowed_network_computes_what_the_full_one_does_without_the_other_channels(name: str):
    """With all weights outside of the slices at zero, the channels that were cut away carry nothing."""
    full = network(name)
    for buffer in full.buffers():
        buffer.copy_(torch.rand_like(buffer) + 0.5)
    narrow = narrowed(full, 0.4)
    kept = shapes_of(narrow)
    with torch.no_grad():
        for key, tensor in full.named_parameters():
            inside = torch.zeros_like(tensor)
            leading(inside, kept[key]).fill_(1)
            tensor *= inside
    x = torch.randn(2, *IMAGE, dtype=torch.float64)
    assert any(kept[key] != tensor.shape for key, tensor in full.named_parameters()) == (name != "linear")
    torch.testing.assert_close(narrow.eval()(x), full.eval()(x), rtol=0, atol=1e-12)
    assert full(x).std() > 1e-6


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_and_statistics_are_leading_slices_and_copies(name: str):
    full = network(name)
    narrow = narrowed(full, 0.5)
    theirs = dict(full.state_dict())
    for key, tensor in narrow.state_dict().items():
        assert torch.equal(tensor, leading(theirs[key], tensor.shape))
        tensor.fill_(7)
    assert not any((tensor == 7).any() for tensor in full.state_dict().values())


def test_the_inputs_and_the_outputs_keep_their_width():
    found = narrowed_shapes(build_module("cnn", (3, 32, 32), 10), 0.3)
    assert found["conv1.conv.weight"] == (10, 3, 5, 5)
    assert found["conv2.conv.weight"] == (20, 10, 5, 5)
    assert found["fc1.linear.weight"] == (154, 20 * 5 * 5)  # whole channels
    assert found["head.weight"] == (10, 154)
    assert found["head.bias"] == (10,)


@pytest.mark.parametrize("name", [*NETWORKS, "text"])
def test_ratio_one_is_the_identity(name: str):
    full = build_module("text", (8,), 2, vocabulary=20) if name == "text" else network(name)
    copy = narrowed(full, 1.0)
    assert copy is not full
    assert repr(copy) == repr(full)
    assert all(torch.equal(tensor, copy.state_dict()[key]) for key, tensor in full.state_dict().items())


def test_a_network_can_be_cut_to_any_shapes():
    full = network("mlp")
    found = cut(full, {"fc1.linear.weight": torch.Size((3, 20)), "fc1.linear.bias": torch.Size((3,))})
    layer = found.get_submodule("fc1.linear")
    assert (layer.in_features, layer.out_features) == (20, 3)
    assert torch.equal(layer.weight, full.get_submodule("fc1.linear").weight[:3, :20])
    assert found.get_parameter("head.weight").shape == (5, 200)


def test_what_does_not_train_does_not_train_in_the_copy():
    full = network("mlp")
    full.get_parameter("fc1.linear.weight").requires_grad_(False)
    narrow = narrowed(full, 0.5)
    trains = {key: parameter.requires_grad for key, parameter in narrow.named_parameters()}
    assert trains == {key: key != "fc1.linear.weight" for key in trains}


class Residual(nn.Module):
    """A shortcut from the image itself, a flatten by hand, a norm of flat features, a scalar beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.shortcut = nn.Conv2d(3, 6, 1)
        self.depthwise = nn.Conv2d(6, 12, 3, groups=6)
        self.norm = nn.BatchNorm1d(12 * 14 * 14)
        self.hidden = nn.Linear(12 * 14 * 14, 8)
        self.head = nn.Linear(8, 5)
        self.other_head = nn.Linear(12 * 14 * 14, 5)
        self.register_buffer("temperature", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        h = torch.relu(self.conv(x) + self.shortcut(x))
        h = self.norm(self.depthwise(h).view(rows, -1))
        return (self.head(torch.relu(self.hidden(h))) + self.other_head(h)) / self.temperature


def test_a_users_network_is_followed_however_it_is_wired():
    full = Residual()
    narrow = narrowed(full, 0.5)
    assert narrow(torch.randn(2, *IMAGE)).shape == (2, 5)
    found = shapes_of(narrow)
    assert found["shortcut.weight"] == (3, 3, 1, 1)
    assert found["depthwise.weight"] == (6, 1, 3, 3)
    assert found["norm.running_mean"] == (6 * 14 * 14,)
    assert found["other_head.weight"] == (5, 6 * 14 * 14)
    assert narrow.norm.num_features == 6 * 14 * 14
    assert (narrow.depthwise.groups, narrow.depthwise.in_channels, narrow.depthwise.out_channels) == (3, 3, 6)


class TwoHeads(nn.Module):
    """Outputs of two layers beside one another, in rows; one of them is also what a third layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.one = nn.Conv2d(6, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.norm(self.one(torch.relu(self.conv(x))))
        return torch.cat([one.flatten(2), self.two(torch.relu(one)).flatten(2)], 1).transpose(1, 2)


def test_outputs_may_be_joined_for_none_of_them_is_cut():
    narrow = narrowed(TwoHeads(), 0.5)
    assert narrow(torch.randn(2, *IMAGE)).shape == (2, 256, 6)
    found = shapes_of(narrow)
    assert [found[key] for key in ("conv.weight", "one.weight", "norm.weight", "two.weight")] == [
        (3, 3, 3, 3),
        (4, 3, 1, 1),
        (4,),
        (2, 4, 1, 1),
    ]


def functional(forward, **layers: nn.Module) -> nn.Module:
    kind = type("Mine", (nn.Module,), {"forward": forward})
    module = kind()
    for name, layer in layers.items():
        module.add_module(name, layer)
    return module


CONV, HEAD = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (build_module("text", (8,), 2, vocabulary=20), r"layer embedding \(WordVectors\); allowed: linear"),
        (nn.Sequential(nn.LSTM(4, 4)), r"layer 0 \(LSTM\)"),
        (nn.Sequential(CONV, nn.GroupNorm(2, 8), nn.Flatten()), r"layer 1 \(GroupNorm\)"),
        (nn.Sequential(CONV, nn.Conv2d(8, 8, 3, groups=2)), r"layer 1 \(Conv2d\)"),
        (nn.Sequential(CONV, nn.ConvTranspose2d(8, 3, 3)), r"layer 1 \(ConvTranspose2d\)"),
        (nn.Sequential(CONV, nn.PixelShuffle(2), nn.Conv2d(2, 5, 3)), "layer 2: it takes 2 channels and is given 8"),
        (functional(lambda self, x: self.b(torch.cat([self.a(x)] * 2, 1)), a=CONV, b=nn.Conv2d(16, 5, 1)), "cat"),
        (functional(lambda self, x: self.b(self.a(x) + x), a=nn.Linear(8, 8), b=HEAD), "add .*different widths"),
        (functional(lambda self, x: self.b(self.a(x) * self.a.bias), a=nn.Linear(8, 8), b=HEAD), "a.bias"),
        (functional(lambda self, x: self.b(x if x.sum() > 0 else -x), b=HEAD), "cannot be traced"),
        (functional(lambda self, x: self.b(self.a(self.a(x))), a=nn.Linear(8, 8), b=HEAD), "a: it is used twice"),
    ],
)
def test_what_cannot_be_narrowed_is_named_in_one_line(module: nn.Module, reason: str):
    with pytest.raises(UserError, match=f"cannot narrow.*{reason}") as caught:
        narrowed(module, 0.5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, math.nan])
def test_a_ratio_that_is_none_is_refused(ratio: float):
    with pytest.raises(UserError, match="above 0, up to 1"):
        narrowed(network("mlp"), ratio)

"""Networks from a user's own file."""

import sys

import pytest
import torch
from torch import nn

from tailorfl.errors import UserError
from tailorfl.models import BatchNorm2d, Network, build_module, load_user_module

SOURCE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, input_shape, classes, width=4):
        super().__init__(
            nn.Sequential(nn.Conv2d(input_shape[0], width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1)),
            nn.Sequential(nn.Flatten(), nn.Linear(width, classes)),
        )

class OnlyClasses(nn.Sequential):
    def __init__(self, *, classes):
        super().__init__(nn.Linear(3, classes))

class Nothing(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2))

class Needy(nn.Module):
    def __init__(self, classes, depth):
        super().__init__()

class AnyOption(nn.Sequential):
    def __init__(self, **options):
        super().__init__(nn.Linear(options["width"], 2))

class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

class Fails(nn.Module):
    def __init__(self):
        raise RuntimeError("first line\\nsecond line")

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

class TiedWithin(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 2))
        self[0][1].weight = self[0][0].weight

def empty():
    return nn.Sequential(nn.ReLU())

def lazy():
    return nn.Sequential(nn.LazyLinear(2))

def number():
    return 3

value = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with a user's files, forgotten afterwards."""
    (tmp_path / "my_networks.py").write_text(SOURCE)
    (tmp_path / "my_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_networks", "my_broken"):
        sys.modules.pop(name, None)


def test_a_class_in_the_working_directory_is_built_with_our_norms():
    module = load_user_module("my_networks:Net", [3, 8, 8], 5, {"width": 6})
    assert type(module[0][1]) is BatchNorm2d
    assert module(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert build_module("my_networks:Net", (3, 8, 8), 5)[0][0].out_channels == 4


@pytest.mark.parametrize(("name", "outputs"), [("OnlyClasses", 7), ("Nothing", 2)])
def test_a_class_gets_only_the_arguments_it_takes(name, outputs):
    module = load_user_module(f"my_networks:{name}", (3,), 7)
    assert isinstance(module[0], nn.Linear)
    assert module[0].out_features == outputs


def test_a_class_that_takes_any_option_gets_the_options():
    assert load_user_module("my_networks:AnyOption", (3,), 2, {"width": 9})[0].in_features == 9


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("my_networks", {}, ["package.module:Class"]),
        ("no_such_file:Net", {}, ["no_such_file", "No module named"]),
        ("my_broken:Net", {}, ["my_broken", "no_such_dependency"]),
        ("my_networks:Missing", {}, ["no class 'Missing'", "Net, OnlyClasses"]),
        ("my_networks:value", {}, ["no class 'value'"]),
        ("my_networks:number", {}, ["int", "torch.nn.Module"]),
        ("my_networks:empty", {}, ["no layers"]),
        ("my_networks:lazy", {}, ["lazy"]),
        ("my_networks:Outside", {}, ["outside its layers", "scale"]),
        ("my_networks:Tied", {}, ["belong to two layers (second.weight)", "within one child"]),
        ("my_networks:Needy", {}, ["needs depth"]),
        ("my_networks:Fails", {}, ["RuntimeError: first line"]),
        ("my_networks:Net", {"height": 3}, ["no option 'height'", "width"]),
        ("my_networks:Net", {"classes": 3}, ["no option 'classes'"]),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(path, options, words):
    with pytest.raises(UserError) as caught:
        load_user_module(path, (3, 8, 8), 5, options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_parameters_may_be_tied_within_a_layer() -> None:
    network = Network(load_user_module("my_networks:TiedWithin", (3,), 2))
    assert network.tried(torch.ones(1, 3), train=True).shape == (2, 2)

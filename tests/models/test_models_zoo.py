"""The built-in networks: sizes, layers, shapes, and what they refuse."""

import math

import pytest
import torch
from torch import nn

from tailorfl.errors import UserError
from tailorfl.models import build_module, networks

OPTIONS = {"text": {"vocabulary": 50, "dimension": 8}}
CLASSIFIERS = [name for name, entry in networks.items() if not entry.detection]
IMAGE_NETWORKS = [name for name in CLASSIFIERS if len(networks[name].input_shape) == 3]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def inputs(shape: tuple[int, ...], batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 50, (batch, *shape)) if len(shape) == 1 else torch.randn(batch, *shape)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "parameters"),
    [
        ("linear", (1, 28, 28), 10, {}, 7_850),
        ("mlp", (1, 28, 28), 10, {}, 159_010),
        ("cnn", (3, 32, 32), 10, {}, 878_538),
        ("ppfe-cnn", (3, 32, 32), 10, {}, 307_842),
        ("ppfe-cnn-large", (3, 32, 32), 100, {}, 1_075_044),
        ("pfps-cnn", (3, 32, 32), 10, {}, 940_362),
        ("pflego-cnn", (3, 32, 32), 10, {}, 1_756_426),
        ("pflego-omniglot", (1, 28, 28), 55, {}, 640 + 3 * 36_928 + 65 * 55),
        ("pmixfed-cnn", (3, 32, 32), 10, {}, 398_666),
        ("pmixfed-mnist", (1, 28, 28), 10, {}, 184_586),
        ("mobilenet", (3, 32, 32), 10, {}, 3_217_226),
        ("resnet18", (3, 224, 224), 1000, {}, 11_689_512),
        ("resnet18", (3, 224, 224), 500, {"width": math.log10(500) / 3}, 9_311_566),
        ("resnet18", (3, 224, 224), 500, {"widths": [58, 58, 116, 231, 461]}, 9_311_566),
        ("resnet18", (3, 64, 64), 200, {"width": math.log10(200) / 3, "stages": 4}, 1_697_410),
        ("resnet18", (3, 64, 64), 200, {"widths": (50, 50, 99, 197), "stages": 4}, 1_697_410),
        ("resnet18", (3, 64, 64), 100, {"width": math.log10(100) / 3, "stages": 4}, 1_266_324),
        ("resnet18", (3, 64, 64), 100, {"widths": (43, 43, 86, 171), "stages": 4}, 1_266_324),
        ("stride-cnn", (3, 128, 128), 10, {}, 391_466),
        ("ssd-resnet18", (3, 512, 512), 80, {}, 18_821_131),
        ("ssd-resnet18", (3, 256, 256), 20, {"width": math.log(20, 80), "stages": 6}, 13_043_463),
        ("text", (32,), 2, {"vocabulary": 50}, 50 * 50 + 4 * 128 * 180 + 129 * 120 + 121 * 64 + 65 * 2),
    ],
)
def test_parameter_count(name, shape, classes, options, parameters):
    with torch.device("meta"):
        assert count(build_module(name, shape, classes, **options)) == parameters


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [
        ("linear", {}, "head"),
        ("mlp", {}, "fc1 head"),
        ("mlp", {"hidden": [30, 20]}, "fc1 fc2 head"),
        ("mlp", {"hidden": []}, "head"),
        ("cnn", {}, "conv1 conv2 fc1 head"),
        ("ppfe-cnn", {}, "conv1 conv2 fc1 fc2 head"),
        ("ppfe-cnn-large", {}, "conv1 conv2 fc1 fc2 head"),
        ("pfps-cnn", {}, "conv1 conv2 fc1 fc2 head"),
        ("pflego-cnn", {}, "conv1 conv2 fc1 fc2 head"),
        ("pflego-omniglot", {}, "conv1 conv2 conv3 conv4 head"),
        ("pmixfed-cnn", {}, "conv1 conv2 conv3 conv4 head"),
        ("pmixfed-mnist", {}, "conv1 conv2 fc1 head"),
        ("mobilenet", {"width": 0.1}, "stem " + " ".join(f"block{i}" for i in range(1, 14)) + " head"),
        ("resnet18", {"stages": 3, "width": 0.1}, "stem stage2_1 stage2_2 stage3_1 stage3_2 head"),
        ("resnet18", {"stages": 1}, "stem head"),
        ("stride-cnn", {}, "conv1 conv2 conv3 conv4 head"),
        ("stride-cnn", {"stages": 2, "width": 0.5}, "conv1 conv2 head"),
        ("ssd-resnet18", {"stages": 6}, "stage1 stage2 stage3 stage4 stage5 stage6 head"),
        ("ssd-resnet18", {"stages": 2}, "stage1 stage2 head"),
        ("text", OPTIONS["text"], "embedding lstm fc1 fc2 head"),
    ],
)
def test_layers_run_from_base_to_head(name, options, layers):
    module = build_module(name, networks[name].input_shape, 10, **options)
    assert [layer for layer, _ in module.named_children()] == layers.split()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_forward_gives_a_score_a_class_and_features_are_vectors(name):
    shape = networks[name].input_shape if name != "resnet18" else (3, 64, 64)
    module = build_module(name, shape, 7, **OPTIONS.get(name, {})).eval()
    assert module(inputs(shape)).shape == (2, 7)
    if len(module) > 1:
        assert module[:-1](inputs(shape)).dim() == 2


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_forward_on_small_gray_images(name):
    module = build_module(name, (1, 28, 28), 3).eval()
    assert module(inputs((1, 28, 28))).shape == (2, 3)


@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_forward_on_the_smallest_images_and_on_oblong_ones(name):
    least = networks[name].minimum
    for shape in ((2, least, least), (3, 33, 20)):
        assert build_module(name, shape, 3).eval()(inputs(shape)).shape == (2, 3)


def test_cifar_stem_keeps_the_image_size():
    module = build_module("resnet18", (3, 32, 32), 10, stem="cifar", width=0.1)
    assert module.stem(inputs((3, 32, 32))).shape == (2, 7, 32, 32)
    assert build_module("resnet18", (3, 32, 32), 10).stem(inputs((3, 32, 32))).shape == (2, 64, 8, 8)


def test_widths_round_up_and_forgive_float_error():
    from tailorfl.models.registry import scaled_widths

    assert scaled_widths("x", 0.1, (30, 31, 64, 1)) == (3, 4, 7, 1)
    assert scaled_widths("x", math.log10(5), (32, 64, 128)) == (23, 45, 90)
    assert scaled_widths("x", 2, (64,)) == (128,)


def test_text_ignores_padding_and_gives_its_vector_no_gradient():
    module = build_module("text", (6,), 2, **OPTIONS["text"])
    ids = torch.tensor([[4, 9, 3]])
    padded = torch.tensor([[4, 9, 3, 0, 0, 0]])
    torch.testing.assert_close(module(ids), module(padded))
    module.embedding.weight.data[0] = 5
    torch.testing.assert_close(module(ids), module(padded))
    module(padded).sum().backward()
    assert module.embedding.weight.grad[0].eq(0).all()
    assert module.embedding.weight.grad[9].ne(0).any()


def test_frozen_pretrained_vectors_are_no_parameter():
    vectors = torch.randn(20, 5)
    module = build_module("text", (6,), 2, vectors=vectors, freeze_embedding=True)
    assert torch.equal(module.embedding.weight, vectors)
    assert "embedding.weight" not in dict(module.named_parameters())
    assert "embedding.weight" in module.state_dict()
    assert "embedding.weight" in dict(build_module("text", (6,), 2, vectors=vectors).named_parameters())


@pytest.mark.parametrize("entry", networks.values(), ids=networks)
def test_every_entry_says_what_it_is_in_one_line(entry):
    assert entry.description.endswith(".")
    assert "\n" not in entry.description + entry.paper
    assert entry.paper


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("cnnn", (3, 32, 32), {}, ["unknown network 'cnnn'", "resnet18", "package.module:Class"]),
        ("cnn", (3, 15, 32), {}, ["at least 16x16", "got 15x32"]),
        ("cnn", (784,), {}, ["(channels, height, width)", "(784,)"]),
        ("cnn", (), {}, ["positive integers"]),
        ("mlp", (0,), {}, ["positive integers"]),
        ("text", (3, 32, 32), {"vocabulary": 5}, ["(length,)"]),
        ("cnn", (3, 32, 32), {"depth": 3}, ["no option 'depth'", "channels, hidden"]),
        ("linear", (3,), {"hidden": 3}, ["no option 'hidden'", "none"]),
        ("cnn", (3, 32, 32), {"channels": [3]}, ["channels=[3]", "2 positive integers"]),
        ("mlp", (3,), {"hidden": 200}, ["hidden=200", "list of positive integers"]),
        ("mlp", (3,), {"hidden": [2, 0]}, ["hidden=[2, 0]"]),
        ("resnet18", (3, 32, 32), {"stages": 6}, ["stages=6", "1 to 5"]),
        ("resnet18", (3, 32, 32), {"stem": "big"}, ["stem='big'", "imagenet, cifar"]),
        ("resnet18", (3, 32, 32), {"widths": [1, 2]}, ["widths=[1, 2]", "5 positive integers"]),
        ("mobilenet", (3, 32, 32), {"width": 0}, ["width=0", "above 0"]),
        ("stride-cnn", (3, 32, 32), {"width": "wide"}, ["width='wide'"]),
        ("ssd-resnet18", (3, 256, 256), {"stages": 1}, ["stages=1", "from 2 to 7"]),
        ("ssd-resnet18", (3, 256, 256), {"stages": 8}, ["stages=8", "from 2 to 7"]),
        ("ssd-resnet18", (3, 64, 64), {"stages": 7}, ["7 stages", "at least 65x65", "got 64x64", "fewer stages"]),
        ("ssd-resnet18", (3, 65, 20), {"stages": 6}, ["at least 33x33", "got 65x20"]),
        ("ssd-resnet18", (3, 256, 256), {"width": 0}, ["width=0", "above 0"]),
        ("text", (8,), {}, ["vocabulary"]),
        ("text", (8,), {"vocabulary": -1}, ["vocabulary=-1", "positive"]),
        ("text", (8,), {"vectors": torch.zeros(3)}, ["(3,)", "[vocabulary, dimension]"]),
        ("text", (8,), {"vectors": torch.zeros(3, 2), "vocabulary": 4}, ["vocabulary=4", "3 vectors"]),
    ],
)
def test_bad_requests_are_refused_in_one_line(name, shape, options, words):
    with pytest.raises(UserError) as caught:
        build_module(name, shape, 10, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("classes", [0, -1, 2.5, True])
def test_class_count_must_be_a_positive_integer(classes):
    with pytest.raises(UserError, match="classes="):
        build_module("mlp", (4,), classes)

"""How weights begin."""

import math

import pytest
import torch
from torch import Tensor, nn

from tailorfl.models import build_module
from tailorfl.models.initialize import initialize


def drawn(body: str, head: str, name: str = "cnn") -> nn.Module:
    torch.manual_seed(0)
    return initialize(build_module(name, (3, 16, 16), 10), body, head)  # type: ignore[arg-type]


def weights(module: nn.Module) -> list[Tensor]:
    return [p for name, p in module.named_parameters() if name.endswith("weight")]


def spread(weight: Tensor) -> float:
    return float(weight.detach().std())


def test_glorot_and_he_have_their_variance_and_no_bias() -> None:
    fan = [(math.prod(w.shape[1:]), w.shape[0] * math.prod(w.shape[2:])) for w in weights(drawn("he", "glorot"))]
    module = drawn("he", "glorot")
    *body, head = weights(module)
    assert spread(body[1]) == pytest.approx(math.sqrt(2 / fan[1][0]), rel=0.1)
    assert spread(head) == pytest.approx(math.sqrt(2 / sum(fan[-1])), rel=0.1)
    assert all(not p.any() for name, p in module.named_parameters() if name.endswith("bias"))


def test_an_orthogonal_head_has_rows_at_right_angles() -> None:
    head = weights(drawn("default", "orthogonal"))[-1]
    assert torch.allclose(head @ head.T, torch.eye(len(head)), atol=1e-5)


def test_a_uniform_head_lies_between_0_and_1_with_its_bias() -> None:
    module = drawn("default", "uniform")
    *_, weight, bias = module.parameters()
    for tensor in (weight, bias):
        assert 0 <= tensor.min() < tensor.max() <= 1
    assert spread(weight) == pytest.approx(math.sqrt(1 / 12), rel=0.1)


def test_by_default_all_stays_as_it_was_and_one_part_may() -> None:
    torch.manual_seed(0)
    plain = build_module("cnn", (3, 16, 16), 10)
    same = drawn("default", "default")
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), same.parameters(), strict=True))
    only_head = drawn("default", "uniform")
    equal = [torch.equal(*pair) for pair in zip(plain.parameters(), only_head.parameters(), strict=True)]
    assert equal == [True] * (len(equal) - 2) + [False] * 2


def test_norms_stay_as_they_are() -> None:
    module = drawn("he", "glorot", "stride-cnn")
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    assert norms
    assert all(norm.weight.eq(1).all() and norm.bias.eq(0).all() for norm in norms)

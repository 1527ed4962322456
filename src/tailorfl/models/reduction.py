"""Smaller forms of a network's linear layers: PPFE's control of the capacity of personal layers."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tailorfl.errors import UserError
from tailorfl.models.lowrank import factored, linear_in, linear_layers
from tailorfl.models.slicing import cut, shapes_of
from tailorfl.seeding import generator

Reduction = Literal["svd", "width", "sparse", "none"]

# What is kept of the rank at which factoring saves nothing, level by level.
SHARES = (0.9, 0.7, 0.5, 0.3)


class MaskedLinear(nn.Module):
    """A linear map some of whose weights are held at zero, always the same ones."""

    mask: Tensor

    def __init__(self, linear: nn.Linear, mask: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.mask, self.bias)


def factored_to(module: nn.Module, ranks: Sequence[int]) -> nn.Module:
    """A copy in which every layer with a linear map is factored to its rank; base to head."""
    names = linear_layers(module)
    if len(ranks) != len(names):
        raise UserError(
            f"ranks={list(ranks)}: {len(ranks)} given for {len(names)} linear layers ({', '.join(names)}); "
            "allowed: one a layer"
        )
    reduced = factored(module, dict(zip(names, ranks, strict=True)))
    if parameters(reduced) >= parameters(module):
        raise UserError(
            f"ranks={list(ranks)}: the factored network has {parameters(reduced):,} parameters, the full one "
            f"{parameters(module):,}; allowed: ranks that make it smaller"
        )
    return reduced


def factored_by(module: nn.Module, level: int) -> nn.Module:
    """A copy in which every linear layer is factored so far that it has a share of its parameters; from level 0 on."""
    ranks = {}
    for name in linear_layers(module):
        _, linear = linear_in(module, name)
        worthwhile = linear.in_features * linear.out_features / (linear.in_features + linear.out_features)
        rank = math.floor(SHARES[min(level, len(SHARES) - 1)] * worthwhile)
        if rank >= 1:
            ranks[name] = rank
    return factored(module, ranks)


def narrowed_head(module: nn.Module, layers: Sequence[str], ratio: float) -> nn.Module:
    """A copy in which the hidden widths between these layers, which end the network, are cut to ceil(ratio * width)."""
    shapes: dict[str, torch.Size] = {}
    before: int | None = None  # inputs of the layer, where they are cut
    for place, name in enumerate(layers):
        path, linear = linear_in(module, name)
        others = [n for n in shapes_of(module) if n.startswith(f"{name}.") and not n.startswith(f"{path}.")]
        if others:
            raise UserError(f"layer {name!r} cannot be made narrower: beside a linear map it has {', '.join(others)}")
        outputs = linear.out_features if place == len(layers) - 1 else math.ceil(ratio * linear.out_features)
        shapes[f"{path}.weight"] = torch.Size((outputs, before or linear.in_features))
        shapes[f"{path}.bias"] = torch.Size((outputs,))
        before = outputs if outputs < linear.out_features else None
    return cut(module, shapes)


def masked(module: nn.Module, sparsity: Mapping[str, float]) -> nn.Module:
    """A copy in which so large a share of the weights of each of these layers is held at zero.

    Which weights is drawn from the layer's name alone, so that all clients hold the same ones at zero.
    """
    sparse = copy.deepcopy(module)
    for name, share in sparsity.items():
        path, linear = linear_in(sparse, name)
        weights = linear.weight.numel()
        order = torch.from_numpy(generator(0, "mask", name).permutation(weights))
        mask = (order >= round(share * weights)).reshape(linear.weight.shape)
        sparse.set_submodule(path, MaskedLinear(linear, mask.to(linear.weight.device)))
    return sparse


def parameters(module: nn.Module) -> int:
    """How many numbers of a network train; weights that are held at zero do not."""
    sparse = [part for part in module.modules() if isinstance(part, MaskedLinear) and part.weight.requires_grad]
    held = sum(int((~part.mask).sum()) for part in sparse)
    return sum(tensor.numel() for tensor in module.parameters() if tensor.requires_grad) - held

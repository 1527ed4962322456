"""Low-rank factoring of linear layers: PPFE's model reduction by truncated SVD."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from tailorfl.errors import UserError


class LowRankLinear(nn.Module):
    """A linear map whose weight is the product `left @ right` of two factors of the given rank."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.right = nn.Parameter(torch.empty(rank, in_features))
        self.left = nn.Parameter(torch.empty(out_features, rank))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each factor is drawn as torch draws a linear layer's weight."""
        for factor in (self.right, self.left):
            nn.init.kaiming_uniform_(factor, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.right), self.left, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def factor_linear(linear: nn.Linear, rank: int) -> LowRankLinear:
    """The best approximation of `linear` with this rank, W = U S V^T cut to its largest singular values.

    Each factor takes the square root of the singular values; a rank above min(in, out) means min(in, out).
    """
    if rank < 1:
        raise UserError(f"rank {rank} of a low-rank layer; allowed: 1 or more")
    rank = min(rank, linear.in_features, linear.out_features)
    with torch.no_grad():
        # Built without storage first: initial values would be overwritten, and would draw random numbers.
        with torch.device("meta"):
            factors = LowRankLinear(linear.in_features, linear.out_features, rank, linear.bias is not None)
        factors = factors.to(linear.weight.dtype).to_empty(device=linear.weight.device)
        factors.requires_grad_(linear.weight.requires_grad)
        left, singular, right = torch.linalg.svd(linear.weight, full_matrices=False)
        root = singular[:rank].sqrt()
        factors.left.copy_(left[:, :rank] * root)
        factors.right.copy_(root[:, None] * right[:rank])
        if factors.bias is not None:
            factors.bias.copy_(linear.bias).requires_grad_(linear.bias.requires_grad)
    return factors


def linear_layers(module: nn.Module) -> list[str]:
    """The names of the layers that `factored` can factor: those with exactly one linear map inside."""
    return [name for name, layer in module.named_children() if len(_linears(layer)) == 1]


def factored(module: nn.Module, ranks: Mapping[str, int]) -> nn.Module:
    """A copy of the network in which the linear map inside each named layer is factored to its rank."""
    reduced = copy.deepcopy(module)
    for name, rank in ranks.items():
        path, linear = linear_in(reduced, name)
        reduced.set_submodule(path, factor_linear(linear, rank))
    return reduced


def linear_in(module: nn.Module, layer: str) -> tuple[str, nn.Linear]:
    """The linear map of a layer that has exactly one, and where it is."""
    allowed = linear_layers(module)
    if layer not in allowed:
        raise UserError(f"cannot reduce layer {layer!r}; layers with one linear map: {', '.join(allowed) or 'none'}")
    path = f"{layer}.{_linears(module.get_submodule(layer))[0]}".rstrip(".")
    linear = module.get_submodule(path)
    assert isinstance(linear, nn.Linear)
    return path, linear


def _linears(layer: nn.Module) -> list[str]:
    """The paths of the linear maps inside a layer ('' is the layer itself)."""
    return [path for path, part in layer.named_modules() if isinstance(part, nn.Linear)]

"""How the weights of linear layers and convolutions begin, where that is not torch's way."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

Start = Literal["default", "glorot", "he", "orthogonal", "uniform"]

STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "glorot": nn.init.xavier_normal_,
    "he": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "orthogonal": nn.init.orthogonal_,
    "uniform": nn.init.uniform_,  # between 0 and 1
}


def initialize(module: nn.Module, body: Start, head: Start) -> nn.Module:
    """Draw the weights of a network anew, in place. Norms, embeddings and recurrent layers stay as they are."""
    layers = [child for child in module.children() if any(True for _ in child.parameters())]
    for layer in layers:
        start = head if layer is layers[-1] else body
        for part in layer.modules() if start != "default" else ():
            if isinstance(part, nn.Linear | nn.modules.conv._ConvNd):
                _draw(part.weight, part.bias, start)
    return module


def _draw(weight: Tensor, bias: Tensor | None, start: Start) -> None:
    STARTS[start](weight)
    if bias is not None:
        (nn.init.uniform_ if start == "uniform" else nn.init.zeros_)(bias)

"""The server's step: the averaged update taken as a gradient (Reddi et al., Adaptive Federated Optimization, 2021)."""

from typing import Literal

import torch

from tailorfl.exchange.messages import Server
from tailorfl.models.network import Values

ServerOptimizer = Literal["average", "sgd", "adam"]


def server_step(
    server: Server,
    average: Values,
    kind: ServerOptimizer,
    lr: float,
    momentum: float,
    epsilon: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.99),
    plain: frozenset[str] = frozenset(),
) -> None:
    """Move the server's values towards the clients' average. ``plain`` names (statistics) are simply replaced."""
    for name, target in average.items():
        if kind == "average" or name in plain:
            server.values[name] = target
            continue
        gradient = server.values[name] - target
        if kind == "sgd":
            direction = _state(server, f"momentum/{name}", gradient).mul_(momentum).add_(gradient)
        else:
            first = _state(server, f"first/{name}", gradient).lerp_(gradient, 1 - betas[0])
            second = _state(server, f"second/{name}", gradient).lerp_(gradient.square(), 1 - betas[1])
            direction = first / (second.sqrt() + epsilon)
        server.values[name] = server.values[name] - lr * direction


def _state(server: Server, name: str, like: torch.Tensor) -> torch.Tensor:
    return server.state.setdefault(name, torch.zeros_like(like))

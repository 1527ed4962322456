"""What is refused of a site's answer, before it can do harm to the average."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tailorfl.models.network import Values
from tailorfl.models.slicing import leading

Schema = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of what a client sends, by name


class RefusedError(Exception):
    """An answer that does not count, and why."""


class ChangedError(RefusedError):
    """A site has other data than it said."""


# What reading an answer may end with, whatever a site has put into it.
UNREADABLE = (RefusedError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
SHOWN = 300  # characters of what a site says


def said(text: object) -> str:
    """What a site says of itself, on one line of the log."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


def schema_of(tensors: Mapping[str, Tensor]) -> Schema:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_tensors(sent: Mapping[str, Tensor], expected: Schema) -> None:
    """The tensors that the method's client code sends, all of them, no other, and only finite numbers."""
    missing, extra = sorted(set(expected) - set(sent)), sorted(set(sent) - set(expected))
    if missing:
        raise RefusedError(f"{missing[0]} is missing")
    if extra:
        raise RefusedError(f"{extra[0]} is not among what is asked for")
    for name, tensor in sent.items():
        shape, kind = expected[name]
        if tuple(tensor.shape) != shape:
            raise RefusedError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype != kind:
            raise RefusedError(f"{name} is of type {tensor.dtype}, not {kind}")
        if not bool(tensor.isfinite().all()):
            raise RefusedError(f"{name} is not finite")


def check_samples(samples: float, known: int) -> int:
    """As many training rows as the site said it has."""
    if not isinstance(samples, int) or samples != known:
        raise ChangedError(f"it counts {samples} training rows, and said that it has {known}")
    return samples


def check_loss(loss: float) -> float:
    """A training loss that can enter the average."""
    if not math.isfinite(loss):
        raise RefusedError(f"its training loss is {loss}")
    return loss


def check_norm(sent: Values, received: Mapping[str, Tensor], gradients: bool, bound: float) -> None:
    """The length of the update, over all tensors that were received: a gradient, or how far they were moved."""
    if not bound:
        return
    total = 0.0
    for name, tensor in sent.items():
        if name in received:
            before = torch.zeros_like(tensor) if gradients else leading(received[name], tensor.shape).to(tensor)
            total += float((tensor.double() - before.double()).square().sum())
    if math.sqrt(total) > bound:
        raise RefusedError(f"its update has a norm of {math.sqrt(total):.4g}, above max-update-norm={bound:g}")


def check_score(numbers: Mapping[str, float], known: int) -> dict[str, float]:
    """Samples, hits and summed loss that can be true."""
    if set(numbers) != {"samples", "correct", "loss"}:
        raise RefusedError(f"a score has {sorted(numbers)}, not samples, correct and loss")
    samples, correct = numbers["samples"], numbers["correct"]
    # None of the rows: where there is no object to find in them.
    if samples not in (0, known) or not 0 <= correct <= samples:
        raise ChangedError(f"a score counts {correct} hits of {samples} rows, and the site said that it has {known}")
    if numbers["loss"] < 0:
        raise RefusedError(f"a score has a loss of {numbers['loss']:g}")
    return dict(numbers)

"""Whether two networks are one and the same program, whatever weights they are given."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tailorfl.models.network import Network, named_tensors

REGISTERED = ("_parameters", "_buffers", "_modules")


def same_program(one: Network, other: Network) -> bool:
    """Whether networks compute the same from the same tensors.

    They do where their modules are of the same classes with equal settings, and what is constant in them is equal.
    What cannot be compared counts as another.
    """
    if one is other:
        return True
    places = one.device == other.device and one.mixed == other.mixed
    alike = places and one.layers == other.layers and _alike(one.module, other.module)
    return alike and _same_tensors(named_tensors(one.module), named_tensors(other.module), set(one.names))


def _alike(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = (dict(whole.named_modules(remove_duplicate=False)) for whole in (one, other))
    return (
        list(mine) == list(theirs)
        and _first_names(mine) == _first_names(theirs)
        and all(
            type(module) is type(theirs[name]) and _equal(_settings(module), _settings(theirs[name]))
            for name, module in mine.items()
        )
    )


def _first_names(modules: Mapping[str, nn.Module]) -> list[str]:
    """Of each module the first name that it has: one that is there several times has several."""
    first: dict[int, str] = {}
    return [first.setdefault(id(module), name) for name, module in modules.items()]


def _settings(module: nn.Module) -> dict[str, Any]:
    """All that a module knows beside its tensors and children."""
    return {name: value for name, value in vars(module).items() if name not in REGISTERED}


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    try:
        return bool(one == other)
    except Exception:  # of a user's own, say with a tensor in it
        return False


def _same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor], given: set[str]) -> bool:
    """Whether tensors that a network is given are of the same form, and the others are equal."""
    return list(one) == list(other) and all(
        tensor.shape == other[name].shape and tensor.dtype == other[name].dtype
        if name in given
        else _equal(tensor.detach(), other[name].detach())
        for name, tensor in one.items()
    )

"""The networks one can ask for by name: the papers' own, common ones, and a user's class."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tailorfl.models import deep, plain, ssd, text  # noqa: F401  (they register their networks)
from tailorfl.models.registry import NetworkEntry, build_registered, networks
from tailorfl.models.user import load_user_module

__all__ = ["NetworkEntry", "build_module", "load_user_module", "networks"]


def build_module(name: str, input_shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """The network of that name for inputs of this shape (without the batch); its children are its layers, base to head.

    `name` is a built-in network (the keys of `networks`) or `package.module:Class`.
    """
    if ":" in name:
        return load_user_module(name, input_shape, classes, options)
    return build_registered(name, input_shape, classes, options)

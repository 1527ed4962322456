"""The list of built-in networks: what each is called, what it takes, and where it comes from."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tailorfl.errors import UserError

Builder = Callable[..., nn.Module]


@dataclass(frozen=True)
class NetworkEntry:
    """One built-in network; `input_shape` is the natural one, and `options` are the builder's keywords.

    Networks for object detection find boxes; all others give a number a class.
    """

    name: str
    build: Builder
    description: str
    paper: str
    input_shape: tuple[int, ...]
    any_shape: bool
    minimum: int
    detection: bool

    @property
    def options(self) -> dict[str, Any]:
        """Option names with their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


networks: dict[str, NetworkEntry] = {}


def network(
    name: str,
    *,
    paper: str,
    input_shape: tuple[int, ...],
    any_shape: bool = False,
    minimum: int = 1,
    detection: bool = False,
) -> Callable[[Builder], Builder]:
    """Register the builder `(input_shape, classes, *, options)` below; its docstring's first line describes it.

    `minimum` is the least height and width of its images.
    """

    def register(build: Builder) -> Builder:
        description = inspect.cleandoc(build.__doc__ or "").splitlines()[0]
        networks[name] = NetworkEntry(name, build, description, paper, input_shape, any_shape, minimum, detection)
        return build

    return register


def build_registered(name: str, input_shape: Sequence[int], classes: int, options: dict[str, Any]) -> nn.Module:
    """Check what was asked against the entry of that name, then build."""
    if name not in networks:
        allowed = ", ".join(sorted(networks))
        raise UserError(f"unknown network {name!r}; allowed: {allowed}, or your own as package.module:Class")
    entry = networks[name]
    shape = tuple(input_shape)
    _check_shape(entry, shape)
    positive_integer(name, "classes", classes)
    for option in options:
        if option not in entry.options:
            allowed = ", ".join(entry.options) or "none"
            raise UserError(f"network {name!r} has no option {option!r}; allowed: {allowed}")
    return entry.build(shape, classes, **options)


def _check_shape(entry: NetworkEntry, shape: tuple[int, ...]) -> None:
    if not shape or any(not _is_positive_integer(size) for size in shape):
        raise UserError(f"network {entry.name!r}: input shape {shape}; allowed: positive integers")
    if entry.any_shape:
        return
    form = "(channels, height, width)" if len(entry.input_shape) == 3 else "(length,)"
    if len(shape) != len(entry.input_shape):
        raise UserError(f"network {entry.name!r} takes inputs of shape {form}, got {shape}")
    if len(shape) == 3 and min(shape[1:]) < entry.minimum:
        least = f"{entry.minimum}x{entry.minimum}"
        raise UserError(f"network {entry.name!r} takes images of at least {least} pixels, got {shape[1]}x{shape[2]}")


def _is_positive_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def positive_integer(name: str, option: str, value: Any) -> int:
    """The value of an option, if it is a positive integer."""
    if not _is_positive_integer(value):
        raise UserError(f"network {name!r}: {option}={value!r}; allowed: a positive integer")
    return int(value)


def positive_integers(name: str, option: str, value: Any, length: int | None = None) -> tuple[int, ...]:
    """The value of an option, if it is a list of (so many) positive integers."""
    is_list = isinstance(value, (list, tuple)) and all(_is_positive_integer(item) for item in value)
    if not is_list or length not in (None, len(value)):
        many = "" if length is None else f"{length} "
        raise UserError(f"network {name!r}: {option}={value!r}; allowed: a list of {many}positive integers")
    return tuple(value)


def scaled_widths(name: str, width: Any, base: Sequence[int]) -> tuple[int, ...]:
    """Channel counts of a network of this width ratio, rounded up."""
    if isinstance(width, bool) or not isinstance(width, (int, float)) or not 0 < width < math.inf:
        raise UserError(f"network {name!r}: width={width!r}; allowed: a number above 0 (1 is the full width)")
    # 0.1 * 30 is a little more than 3 in floating point, and means 3.
    return tuple(max(1, math.ceil(width * channels - 1e-6)) for channels in base)


def stage_count(name: str, stages: Any, most: int, least: int = 1) -> int:
    """The value of the option `stages`, if it is between `least` and `most`."""
    if not _is_positive_integer(stages) or not least <= stages <= most:
        raise UserError(f"network {name!r}: stages={stages!r}; allowed: an integer from {least} to {most}")
    return int(stages)

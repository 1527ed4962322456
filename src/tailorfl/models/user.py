"""Networks from a user's own code, named as package.module:Class."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from tailorfl.errors import UserError
from tailorfl.models.norm import convert_norms


def load_user_module(
    path: str, input_shape: Sequence[int], classes: int, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Import `package.module:Class` (the working directory counts) and build it, with our batch norms in it.

    The class gets `input_shape` and `classes` if it takes arguments of these names, and the options.
    """
    build = _find(path)
    arguments = _arguments(path, build, {"input_shape": tuple(input_shape), "classes": classes}, dict(options or {}))
    try:
        module = build(**arguments)
    except Exception as error:
        raise UserError(f"network {path}: building it failed with {_first_line(error)}") from error
    _check(path, module)
    return convert_norms(module)


def _find(path: str) -> Callable[..., Any]:
    """The class (or function) that the path names."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserError(f"network {path!r}; allowed: package.module:Class")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"network {path}: importing {module_name} failed with {_first_line(error)}") from error
    build = getattr(module, name, None)
    if not callable(build):
        found = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
        raise UserError(f"network {path}: {module_name} has no class {name!r}; it has: {', '.join(found) or 'none'}")
    return build


def _arguments(
    path: str, build: Callable[..., Any], offered: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What the class is called with: of what is offered, the names it takes; of the options, all."""
    parameters = inspect.signature(build).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = {p.name for p in named}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option in offered or not (takes_any or option in names):
            allowed = ", ".join(sorted(names - set(offered))) or "none"
            raise UserError(f"network {path} has no option {option!r}; allowed: {allowed}")
    arguments = {name: value for name, value in offered.items() if name in names} | options
    missing = [p.name for p in named if p.default is p.empty and p.name not in arguments]
    if missing:
        raise UserError(f"network {path} needs {', '.join(missing)}; given: {', '.join(arguments) or 'nothing'}")
    return arguments


def _check(path: str, module: object) -> None:
    """A network is a torch module whose parameters all lie in its children, its layers."""
    if not isinstance(module, nn.Module):
        raise UserError(f"network {path} gives a {type(module).__name__}; allowed: a torch.nn.Module")
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise UserError(f"network {path} has lazy layers of unknown size; allowed: layers with their sizes given")
    outside = [name for name, _ in module.named_parameters(recurse=False)]
    if outside:
        raise UserError(
            f"network {path} has parameters outside its layers ({', '.join(outside)}); allowed: in children"
        )
    _check_ties(path, module)
    if not any(True for _ in module.parameters()):
        raise UserError(f"network {path} has no layers; allowed: a module with at least one child with parameters")


def _check_ties(path: str, module: nn.Module) -> None:
    """A tensor belongs to one layer: that layer travels or stays, trains or does not, with all its tensors."""
    known = {name for name, _ in module.named_parameters()}
    inside = (f"{child}.{name}" for child, layer in module.named_children() for name, _ in layer.named_parameters())
    tied = [name for name in inside if name not in known]
    if tied:
        raise UserError(
            f"network {path} has parameters that belong to two layers ({', '.join(tied)}); "
            "allowed: tied parameters within one child"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"

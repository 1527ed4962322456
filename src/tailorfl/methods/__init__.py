"""One file a method; every method that is found here, or registered by another package, can be run by its name."""

import importlib
import importlib.metadata
import inspect
import pkgutil
import sys
from functools import cache
from pathlib import Path

from tailorfl.errors import UserError
from tailorfl.methods.method import Method

__all__ = ["Method", "find_method", "methods"]

ENTRY_POINTS = "tailorfl.methods"


@cache
def methods() -> dict[str, type[Method]]:
    """All methods by name: the files of this package, then those of others (entry points ``tailorfl.methods``)."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        for kind in _methods_in(f"{__name__}.{module.name}"):
            found[kind.name] = kind
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            kind = entry.load()
        except Exception as error:  # anything another package may raise
            raise UserError(f"method {entry.name} ({entry.value}) cannot be imported: {_said(error)}") from error
        if not (inspect.isclass(kind) and issubclass(kind, Method)):
            raise UserError(f"entry point {entry.name} of group {ENTRY_POINTS} is not a tailorfl Method")
        found[entry.name] = kind
    return dict(sorted(found.items()))


def find_method(name: str) -> type[Method]:
    """A method by name, or by ``package.module:Class`` where it is not registered."""
    if ":" in name:
        return _imported(name)
    if name not in methods():
        raise UserError(f"unknown method {name!r}; allowed: {', '.join(methods())}, or package.module:Class")
    return methods()[name]


def _methods_in(module: str) -> list[type[Method]]:
    members = vars(importlib.import_module(module)).values()
    return [kind for kind in members if inspect.isclass(kind) and issubclass(kind, Method) and kind.__module__ == module
            and kind.name]  # fmt: skip


def _imported(path: str) -> type[Method]:
    module_name, _, class_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # anything a user's module may raise
        raise UserError(f"method {path}: module {module_name!r} cannot be imported: {_said(error)}") from error
    kind = getattr(module, class_name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Method)):
        there = ", ".join(k.__name__ for k in _methods_in(module_name)) or "none"
        raise UserError(f"method {path}: {module_name} has no Method called {class_name}; it has: {there}")
    if inspect.isabstract(kind):
        raise UserError(f"method {path}: {class_name} lacks {', '.join(sorted(kind.__abstractmethods__))}")
    return kind


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

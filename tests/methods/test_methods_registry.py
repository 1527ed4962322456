"""How methods are found: by name, by entry point, by module and class."""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from method_runs import federation, run

from tailorfl.errors import UserError
from tailorfl.methods import find_method, methods

SOURCE = '''
from typing import ClassVar
from tailorfl.methods.fedavg import FedAvg

class Sloth(FedAvg):
    """Does little."""
    name: ClassVar[str] = "sloth"
    naps: int = 3

from tailorfl.methods import Method

class Unborn(Method):
    """Does not say what a client does."""
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module in the folder where the command is run."""
    (tmp_path / "my_methods.py").write_text(SOURCE)
    (tmp_path / "my_broken_methods.py").write_text("def half(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_methods"
    for name in ("my_methods", "my_broken_methods"):
        sys.modules.pop(name, None)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[importlib.metadata.EntryPoint]]:
    """Entry points as other packages declare them."""
    declared: list[importlib.metadata.EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: declared)
    methods.cache_clear()
    yield declared
    methods.cache_clear()


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, "tailorfl.methods")


def test_the_methods_of_the_package_are_found_by_name() -> None:
    assert {"fedavg", "fedavg-ft", "fedper", "local"} <= set(methods())


def test_a_method_of_another_package_is_found_by_its_entry_point(module: str, entry_points: list) -> None:
    sys.path.insert(0, str(Path.cwd()))
    entry_points.append(entry("sloth", f"{module}:Sloth"))
    assert find_method("sloth").__name__ == "Sloth"
    assert {"sloth", "fedavg"} <= set(methods())


@pytest.mark.parametrize(
    ("value", "reason"), [("json:dumps", "not a tailorfl Method"), ("nowhere_at_all:X", "nowhere_at_all")]
)
def test_an_entry_point_that_is_no_method_is_named(entry_points: list, value: str, reason: str) -> None:
    entry_points.append(entry("odd", value))
    with pytest.raises(UserError, match=rf"odd.*{reason}"):
        find_method("fedavg")


def test_a_method_is_found_by_module_and_class_and_runs(module: str) -> None:
    built = federation(f"{module}:Sloth", naps=5, rounds=1)
    assert built.config.method.model_dump()["naps"] == 5
    assert len(run(built)) == 1


def test_an_unknown_method_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(UserError, match=r"unknown method 'fedpre'; allowed: .*fedavg.*fedper"):
        find_method("fedpre")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere_at_all:Sloth", "No module named 'nowhere_at_all'"),
        ("my_methods:Snail", "no Method called Snail; it has: Sloth"),
        ("my_methods:ClassVar", "no Method called ClassVar"),
        ("my_broken_methods:Half", "SyntaxError"),
        (":Sloth", "cannot be imported"),
    ],
)
def test_a_module_or_class_that_does_not_fit_is_refused_in_one_line(module: str, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        find_method(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_method_that_does_not_say_what_a_client_does_is_refused(module: str) -> None:
    with pytest.raises(UserError, match="Unborn lacks train"):
        find_method(f"{module}:Unborn")

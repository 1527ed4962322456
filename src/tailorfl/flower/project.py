"""The folder of a Flower app: a pyproject.toml that holds the experiment, and two thin modules."""

import math
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tailorfl import __version__
from tailorfl.data.atomic import whole_file
from tailorfl.errors import UserError

if TYPE_CHECKING:
    from tailorfl.study.config import Config  # it takes torch along, which the command does without until it must

PROJECT = "pyproject.toml"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # of a site: also the name of its folder and of its key

Value = str | int | float | bool  # what Flower lets a configuration hold


@dataclass(frozen=True)
class RunConfig:
    """What server and sites are told: the ``[tool.flwr.app.config]`` of an app."""

    experiment: str  # YAML, complete
    out: str  # the run's folder on the server's machine
    state: str = ""  # where virtual nodes keep their clients' state; real ones say it themselves
    nodes: int = 0
    wait: float = 600.0
    deadline: float = 600.0
    min_answers: int = 1
    max_update_norm: float = 0.0
    max_samples: int = 0

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise UserError(f"deadline={self.deadline}: allowed: numbers above 0")
        least = {"nodes": 0, "wait": 0, "deadline": 0, "min_answers": 1, "max_update_norm": 0, "max_samples": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if not math.isfinite(value) or value < lowest:
                raise UserError(f"{_key(name)}={value}: allowed: numbers from {lowest}")

    def entries(self) -> dict[str, Value]:
        """Keys as Flower's configurations spell them."""
        return {_key(field.name): getattr(self, field.name) for field in fields(self)}


def experiment_text(config: "Config") -> str:
    """All settings as YAML, those that were left at their defaults too: both sides then agree on all of them."""
    return yaml.safe_dump(config.flat(), sort_keys=False, allow_unicode=True)


def write_app(folder: Path, run: RunConfig) -> None:
    """Write an app that ``flwr run`` takes; its pyproject.toml last, because that makes the folder an app."""
    for side in ("server", "client"):
        _write(folder / f"{side}_app.py", _module(side))
    _write(folder / PROJECT, _project(run))


def read_run(folder: Path) -> RunConfig:
    """What an app's folder says of its run."""
    path = folder / PROJECT
    try:
        found = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"]
        return RunConfig(**{field.name: found[_key(field.name)] for field in fields(RunConfig)})
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not of an app that 'tailor flower' wrote ({error})") from error


def stored_settings(folder: Path) -> dict[str, Any]:
    """The settings of an app's experiment, its method among them."""
    found = yaml.safe_load(read_run(folder).experiment)
    if not isinstance(found, dict) or "method" not in found:
        raise UserError(f"{folder / PROJECT}: its experiment names no method")
    return found


def check_name(name: str) -> str:
    """A site's name, if it can be one: files and folders are called after it."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a site's name; allowed: up to 100 letters, digits and . _ -")
    return name


def node_config(entries: dict[str, Value]) -> str:
    """The text of ``--node-config``: ``key=value`` with spaces between, every text in quotes."""
    return " ".join(f"{key}={_quoted(key, value)}" for key, value in entries.items())


def _quoted(key: str, value: Value) -> str:
    if not isinstance(value, str):
        return _number(value)
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise UserError(f"{key}={value!r}: a site's settings hold no line breaks or control characters")
    if "'" not in value:
        return f"'{value}'"  # taken as it stands, backslashes too
    if '"' not in value:
        return '"' + value.replace("\\", "\\\\") + '"'
    raise UserError(f"{key}={value}: Flower cannot take both kinds of quotes in one value; allowed: one of them")


def _number(value: int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(name: str) -> str:
    return name.replace("_", "-")


def _write(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _module(side: str) -> str:
    return (
        f'"""The {side} side of a federation; tailorfl has all of it."""\n\n'
        f"from tailorfl.flower import apps\n\n"
        f"app = apps.{side}_app\n"
    )


def _project(run: RunConfig) -> str:
    settings = "\n".join(f"{key} = {_toml(value)}" for key, value in run.entries().items())
    # No dependencies: tailorfl is installed where the app runs, and nothing is installed when it starts.
    return f"""\
# A Flower app, for a SuperLink that was started with --disable-runtime-dependency-installation:
# server and sites run what is installed there, tailorfl[flower] among it.

[project]
name = "tailorfl-federation"
version = "{_plain_version()}"
description = "Personalized federated learning with tailorfl"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tailorfl"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
{settings}
"""


def _plain_version() -> str:
    found = re.match(r"\d+(\.\d+)*", __version__)
    return found[0] if found else "0.0.0"


def _toml(value: Value) -> str:
    if not isinstance(value, str):
        return _number(value)
    if "\n" not in value:
        return f'"{_escaped(value)}"'
    return '"""\n' + "\n".join(_escaped(line) for line in value.split("\n")) + '"""'


def _escaped(line: str) -> str:
    line = line.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(f"\\u{ord(one):04X}" if ord(one) < 32 or ord(one) == 127 else one for one in line)

"""What the commands have in common: options, where they print, the log, and how to go on."""

import logging
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from tailorfl.errors import UserError

Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, over the file's.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A YAML file of settings.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="TAILOR_DATA", help="The folder that holds the datasets.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped or killed.")]
Page = Annotated[bool, typer.Option("--page/--no-page", help="Write the page of the results, report.html.")]
Loggers = Annotated[list[str] | None, typer.Option("--log", help="Also log to tensorboard, or mlflow; repeatable.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and the result only.")]

WIDEST = 10_000  # letters on a line of a pipe or a file

# What is printed may hold anything a user typed: no :codes: for pictures in it.
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def show_log(quiet: bool) -> None:
    """Let the library's log appear, above a progress bar if there is one; with ``quiet`` warnings only."""
    handler = RichHandler(console=err, show_path=False, show_time=False, markup=False, highlighter=None)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("tailorfl").setLevel(logging.WARNING if quiet else logging.INFO)


def say(line: str, console: Console = out) -> None:
    """A line as it is: it may hold anything a user typed, and is not broken where the terminal ends."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_list(table: Table) -> None:
    """A table that is searched as well as read: where there is no terminal its cells are not broken."""
    console = out if out.is_terminal else Console(width=WIDEST, emoji=False)
    console.print(table)


def refuse_empty_paths(command: Any) -> None:
    """In a command and all below it: an empty path, as a variable that is not set gives one, is the current folder."""
    for below in getattr(command, "commands", {}).values():
        refuse_empty_paths(below)
    for parameter in command.params:
        if parameter.type.name == "path":
            parameter.callback = _not_empty


def _not_empty(context: Any, parameter: Any, given: Any) -> Any:
    if "" in (given if isinstance(given, tuple | list) else [given]):
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.human_readable_name
        raise UserError(f"{name} is empty; allowed: the name of a file or folder")
    return given


def split_method(first: str | None, settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The method may be left out where a file names it: what stands in its place is a setting then."""
    if first and "=" in first:
        return None, [first, *(settings or ())]
    return first, list(settings or ())


def stopped(how: str) -> NoReturn:
    """End a command that was interrupted, and say how to go on."""
    say(f"stopped; go on with: {how}", err)
    raise typer.Exit(130)


_claimed: list[Path] = []


def fresh(name: str) -> Path:
    """A new folder below ``runs``, which no other command takes for its own."""
    name = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)
    for n in count(1):
        path = Path("runs") / (name if n == 1 else f"{name}-{n}")
        if not path.parent.exists():
            _claimed.append(path.parent)
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            _claimed.append(path)
            return path
    raise AssertionError("there is always another number")


def leave_no_empty_folders() -> None:
    """At the end of a command: take away those that it made and put nothing into."""
    while _claimed:
        with suppress(OSError):  # something is in it
            _claimed.pop().rmdir()

"""Figures and tables of papers, measured again: what there is, its options, and its results on disk."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tailorfl.data.atomic import whole_file
from tailorfl.errors import UserError
from tailorfl.study import ridge
from tailorfl.study.config import in_words, unknown_key
from tailorfl.study.run import check_writable

OPTIONS = "options.yaml"

Show = Callable[[int, int], None]  # steps done, of how many
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """How one figure or table of a paper is measured and shown."""

    about: str
    options: type[BaseModel]
    run: Callable[[Any, Show], Rows]
    tables: Callable[[Rows, Any], Sequence[Table]]
    picture: Callable[[Rows, Any, Path], None] | None = None


STUDIES: dict[str, Study] = {
    ridge.NAME: Study(
        "PPFE, local training and FedAvg by ridge regression, over clients and personalization ratios",
        ridge.Figure3,
        ridge.sweep,
        ridge.tables,
        ridge.picture,
    ),
}


def find_study(name: str) -> Study:
    if name not in STUDIES:
        raise UserError(f"unknown study {name!r}; allowed: {', '.join(STUDIES)}")
    return STUDIES[name]


def read_options(name: str, settings: Mapping[str, Any]) -> BaseModel:
    """The checked options of a study; every problem in one line."""
    kind = find_study(name).options
    see = f"tailor reproduce {name} --options"
    allowed = list(kind.model_fields)
    problems = [unknown_key(key, name, allowed, see) for key in settings if key not in allowed]
    try:
        options = kind(**{key: value for key, value in settings.items() if key in kind.model_fields})
    except ValidationError as error:
        found = {_key(problem): in_words(problem["msg"]) for problem in reversed(error.errors())}
        problems += [f"{key}={settings.get(key)}: {text}" if key else text for key, text in reversed(found.items())]
    if problems:
        raise UserError("; ".join(problems))
    return options


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that cannot take the results, before anything is measured."""
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not force:
        raise UserError(f"{folder} exists; allowed: another --out, --force to replace")
    if taken and not (folder / OPTIONS).is_file():
        raise UserError(f"{folder} holds no study; --force replaces only a study")
    check_writable(folder)


def write(rows: Rows, options: BaseModel, name: str, folder: Path) -> Path:
    """The options, and the measurements as CSV, floats to six digits; what was there before is gone."""
    # The options come first: a folder that has them is a study, which --force may replace.
    with whole_file(folder / OPTIONS) as temporary:
        temporary.write_text(yaml.safe_dump({"study": name, **options.model_dump(mode="json")}, sort_keys=False))
    table, picture = folder / f"{stem(name)}.csv", folder / f"{stem(name)}.png"
    for path in (table, picture):
        path.unlink(missing_ok=True)
    with whole_file(table) as temporary, temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _digits(value) for key, value in row.items()} for row in rows)
    return table


def stem(name: str) -> str:
    """What the files of a study are called: ``figure3`` for ``ppfe/figure3``."""
    return name.rpartition("/")[2]


@contextmanager
def progress(console: Console, name: str) -> Iterator[Show]:
    """A live bar on a terminal, a line for every tenth of the way elsewhere."""
    bar = Progress(console=console, disable=not console.is_terminal)
    task = bar.add_task(name, total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not console.is_terminal and 10 * done // total > 10 * (done - 1) // total:
            console.print(f"{name}: {done} of {total}", highlight=False)

    with bar:
        yield show


def studies_table() -> Table:
    table = Table("study", "what is measured")
    for name, study in STUDIES.items():
        table.add_row(name, study.about)
    return table


def options_table(name: str) -> Table:
    table = Table("key", "default", "meaning", title=f"options of {name}")
    for key, info in find_study(name).options.model_fields.items():
        default = list(info.default) if isinstance(info.default, tuple) else info.default
        table.add_row(key, str(default), info.description or "")
    return table


def _key(problem: Mapping[str, Any]) -> str:
    return str(problem["loc"][0]) if problem["loc"] else ""


def _digits(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value

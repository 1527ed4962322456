"""Recipes on disk: those of the papers, and a user's own."""

import math
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailorfl.errors import UserError
from tailorfl.study.config import in_words, read_yaml
from tailorfl.study.recipe import SAFE, Point, Recipe
from tailorfl.study.tidy import read_csv

PACKAGED = Path(__file__).parent / "recipes"
RECIPE = "recipe"  # a folder of a study: the user's own recipe, as it was measured
HEAD = ("study", "row", "column", "value")  # of the published figures


@cache
def recipes() -> dict[str, Recipe]:
    """The recipes that come with the package, by name."""
    return {recipe.name: recipe for file in sorted(PACKAGED.glob("*.yaml")) for recipe in read_file(file)}


def is_file(name: str) -> bool:
    """Whether a study is named by a file: ``mine.yaml``, or ``mine.yaml#name``."""
    return name.partition("#")[0].endswith((".yaml", ".yml"))


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or from a file of the user's own."""
    if not is_file(name):
        return recipes()[name]
    path, _, entry = name.partition("#")
    found = {recipe.name.partition("/")[2]: recipe for recipe in read_file(Path(path))}
    if entry and entry not in found:
        raise UserError(f"{path} has no study {entry!r}; allowed: {', '.join(found)}")
    if not entry and len(found) > 1:
        raise UserError(f"{path} has several studies; allowed: {', '.join(f'{path}#{one}' for one in found)}")
    return found[entry] if entry else next(iter(found.values()))


def files_of(recipe: Recipe) -> list[Path]:
    """Of a user's own: the recipe, and its published figures if there are some."""
    file = Path(recipe.file.partition("#")[0])
    return [one for one in (file, file.with_suffix(".csv")) if one.is_file()] if recipe.file else []


def kept(folder: Path, file: str) -> str:
    """A user's own recipe as it lies in the folder of its study; where it is not there, as it was named."""
    path, _, entry = file.partition("#")
    copy = folder / RECIPE / Path(path).name
    return f"{copy}#{entry}" if copy.is_file() else file


def read_file(file: Path) -> list[Recipe]:
    """All recipes of a file, with the published figures in the CSV file of the same name beside it, if there is one."""
    read = read_yaml(file, "recipe")
    studies = read.get("studies") if isinstance(read, dict) else None
    if not isinstance(studies, dict) or not studies:
        raise UserError(f"recipe {file} has no studies; allowed: a line 'studies:' and below it a name for each")
    wrong = [str(key) for key in read if key not in ("paper", "studies")]
    wrong += [str(name) for name in studies if not SAFE.fullmatch(str(name))]
    if wrong:
        raise UserError(f"recipe {file}: {wrong[0]!r} does not belong there; allowed: paper, and names below studies")
    published = _read_published(file.with_suffix(".csv"))
    unknown = sorted(set(published) - set(map(str, studies)))
    if unknown:
        allowed = ", ".join(map(str, studies))
        raise UserError(f"{file.with_suffix('.csv')}: unknown study {unknown[0]!r}; allowed: {allowed}")
    paper = " ".join(str(read.get("paper") or "").split())
    return [_read_study(file, str(name), study, published.get(str(name), {}), paper) for name, study in studies.items()]


def _read_study(file: Path, name: str, study: Any, published: dict[Point, float | None], paper: str) -> Recipe:
    own = "" if file.parent == PACKAGED else f"{file.absolute()}#{name}"
    known = {"name": f"{file.stem}/{name}", "published": published, "paper": paper, "file": own}
    try:
        return Recipe.model_validate({**study, **known} if isinstance(study, dict) else study)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        said = f"{place}: {in_words(problem['msg'])}" if place else in_words(problem["msg"])
    except UserError as error:
        said = str(error)
    raise UserError(f"recipe {file}, {name}: {said}")


def _read_published(file: Path) -> dict[str, dict[Point, float | None]]:
    """Study, then row and column, to the figure; an empty value means that the paper prints none for this cell."""
    if not file.is_file():
        return {}
    found: dict[str, dict[Point, float | None]] = {}
    for number, line in enumerate(read_csv(file, HEAD), start=2):
        said, (study, row, column, text) = f"{file}, line {number}", (line[name] for name in HEAD)
        try:
            value = float(text) if text else None
        except ValueError:
            value = math.nan
        if not (study and row and column) or (value is not None and not math.isfinite(value)):
            raise UserError(f"{said}: {text!r} is no figure; allowed: {','.join(HEAD)}, the value a number or empty")
        if (row, column) in found.setdefault(study, {}):
            raise UserError(f"{said}: {row}, {column} of {study} is there twice; allowed: one figure a cell")
        found[study][row, column] = value
    return found

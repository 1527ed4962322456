"""An exported model at work: image files, tables, texts or arrays in, predictions out. It needs no data and no run."""

import csv
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table
from torch import Tensor

from tailorfl.data.atomic import check_named, whole_file
from tailorfl.data.reason import reason
from tailorfl.data.source import Column
from tailorfl.data.sources.images import SUFFIXES, pillow, read_image, to_pixels
from tailorfl.data.sources.table import Columns, height, read_csv, read_numbers, read_parquet, standardize
from tailorfl.data.sources.text import with_vocabulary
from tailorfl.detection.detections import select
from tailorfl.errors import UserError
from tailorfl.study.export import ABOUT, FORMAT, PROGRAM, VOCABULARY, first_names

ARRAY = ".npy"
TABLES = (".csv", ".csv.gz", ".parquet")
ALLOWED = {
    "image": "image files, folders of them",
    "features": f"tables ({', '.join(TABLES)})",
    "text": f"files of text (a line each), tables ({', '.join(TABLES)})",
}
SHOWN = 40  # rows on a terminal
THRESHOLD, OBJECTS = 0.5, 200  # of detectors, unless set: the least probability, and how many objects in an image

Row = list[str]


@dataclass(frozen=True)
class Model:
    """A client's model as ``tailor export`` wrote it."""

    folder: Path
    about: dict[str, Any]
    program: Callable[[Tensor], Tensor]

    @property
    def kind(self) -> str:
        return str(self.about["input"]["kind"])

    @property
    def task(self) -> str:
        return str(self.about["task"])

    @property
    def classes(self) -> list[str]:
        return list(self.about["classes"] or ())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.about["input"]["shape"][1:])

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.about["input"]["dtype"])
        return found

    @cached_property
    def vocabulary(self) -> list[str]:
        return (self.folder / VOCABULARY).read_text(encoding="utf-8").split("\n")[:-1]

    @cached_property
    def columns(self) -> list[Column]:
        """Of a table: those that are inputs, in their order; none where the data had no names for them."""
        names, scale = self.about["input"]["columns"] or [], self.about["normalization"]
        if scale["where"] == "none":
            return [Column(name) for name in names]
        return list(map(Column, names, scale["mean"], scale["std"]))


@dataclass(frozen=True)
class Part:
    """What one argument holds: so many inputs, read when they are asked for."""

    path: Path
    names: Sequence[str]
    read: Callable[[int], "Sample"]


@dataclass(frozen=True)
class Sample:
    """One input of a model. An image is so wide and high in its file."""

    input: Tensor
    name: str = ""
    size: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class Prediction:
    """A model on its inputs. Row after row is computed when it is asked for."""

    model: Model
    parts: Sequence[Part]
    batch_size: int = 64
    top: int = 1  # classes that are named; of a detector, objects in an image
    threshold: float = THRESHOLD

    @property
    def count(self) -> int:
        return sum(len(part.names) for part in self.parts)

    @property
    def header(self) -> Row:
        if self.model.task == "detection":
            return ["input", "prediction", "probability", "x0", "y0", "x1", "y1"]
        if self.model.task == "regression":
            return ["input", "prediction"]
        places = ("" if place == 1 else f"_{place}" for place in range(1, self.top + 1))
        return ["input", *(f"{what}{place}" for place in places for what in ("prediction", "probability"))]

    def rows(self, watch: Callable[[int], None] = lambda done: None) -> Iterator[Row]:
        """A row an input, of a detector a row an object; ``watch`` is told how many inputs are done."""
        samples, done = self._samples(), 0
        while batch := list(islice(samples, self.batch_size)):
            with torch.no_grad():
                outputs = self.model.program(torch.stack([sample.input for sample in batch]))
            yield from self._said(batch, outputs)
            done += len(batch)
            watch(done)

    def _samples(self) -> Iterator[Sample]:
        for part in self.parts:
            for number, name in enumerate(part.names):
                yield replace(part.read(number), name=name)

    def _said(self, batch: Sequence[Sample], outputs: Tensor) -> Iterator[Row]:
        if self.model.task == "detection":
            return self._objects(batch, outputs)
        if self.model.task == "regression":
            digits = 17 if outputs.dtype == torch.float64 else 9
            return ([sample.name, f"{value:.{digits}g}"] for sample, value in zip(batch, outputs[:, 0], strict=True))
        return self._classes(batch, outputs)

    def _classes(self, batch: Sequence[Sample], outputs: Tensor) -> Iterator[Row]:
        order = outputs.argsort(dim=1, descending=True, stable=True)[:, : self.top]
        best = outputs.softmax(1).gather(1, order)
        for sample, labels, probabilities in zip(batch, order.tolist(), best.tolist(), strict=True):
            pairs = zip(labels, probabilities, strict=True)
            yield [sample.name, *(cell for label, p in pairs for cell in (self.model.classes[label], f"{p:.6f}"))]

    def _objects(self, batch: Sequence[Sample], outputs: Tensor) -> Iterator[Row]:
        """Boxes in pixels of the image as it is in its file."""
        for sample, found in zip(batch, select(outputs, threshold=self.threshold, most=self.top), strict=True):
            scale = torch.tensor((*sample.size, *sample.size))
            for label, probability, *box in torch.cat([found[:, :2], found[:, 2:] * scale], dim=1).tolist():
                corners = (f"{number:.1f}" for number in box)
                yield [sample.name, self.model.classes[int(label)], f"{probability:.6f}", *corners]


def predict(
    folder: Path,
    inputs: Sequence[Path],
    batch_size: int = 64,
    top: int | None = None,
    threshold: float | None = None,
) -> Prediction:
    """The model in a folder on these files, all of which are there and, but for images, well-formed."""
    absent = [path for path in inputs if not path.exists()]
    if absent:
        raise UserError(f"{absent[0]}: no such file or folder")
    model = load_model(folder)
    if top and top > 1 and model.task == "regression":
        raise UserError(f"--top {top}: {folder} predicts a number; allowed: only for models with classes")
    if threshold is not None and model.task != "detection":
        raise UserError(f"--threshold {threshold:g}: {folder} finds no objects; allowed: only for detectors")
    parts = [open_input(model, path) for path in inputs]
    usual, most = (OBJECTS, OBJECTS) if model.task == "detection" else (1, max(len(model.classes), 1))
    return Prediction(model, parts, batch_size, min(top or usual, most), THRESHOLD if threshold is None else threshold)


def load_model(folder: Path) -> Model:
    about = _read_about(folder)
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.load(folder / PROGRAM).module()
    except Exception as error:  # whatever torch raises for a file that it cannot read
        raise UserError(f"{folder / PROGRAM} cannot be loaded: {reason(error)}") from error
    return Model(folder, about, program)


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    if not path.is_file():
        if several := sorted(found.parent.name for found in folder.glob(f"*/{ABOUT}")):
            raise UserError(
                f"{folder} holds a model in each of its folders; allowed: one of these, {first_names(several)}"
            )
        raise UserError(
            f"{folder} holds no model ({ABOUT} is missing); allowed: a folder that 'tailor export' has written"
        )
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise UserError(f"{path} has the format {found!r}; allowed: {FORMAT!r}, as 'tailor export' writes it")
    return about


# Inputs.


def open_input(model: Model, path: Path) -> Part:
    """The inputs in a file or a folder."""
    if path.suffix.lower() == ARRAY:
        return _array(model, path)
    if model.kind == "image":
        return _images(model, path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; allowed: {_allowed(model)}")
    return _table(model, path) if model.kind == "features" else _text(model, path)


def _allowed(model: Model) -> str:
    return f"{ALLOWED[model.kind]}, arrays ({ARRAY})"


def _images(model: Model, path: Path) -> Part:
    files = _image_files(path) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} has no images; allowed: {', '.join(sorted(SUFFIXES))} files in it, or below")
    wanted = model.about["input"]["files"]
    mode, size = wanted["mode"], (wanted["width"], wanted["height"])
    if mode is None:
        raise UserError(f"{model.folder} takes images of {model.shape[0]} channels; allowed: arrays ({ARRAY})")
    pillow()  # if it is missing, that is said before anything is computed

    def pixels(image: Any) -> Sample:
        in_file = image.size
        if model.task == "detection":
            image.draft(mode, size)  # as in training: a JPEG file is decoded at a half or less where that is enough
        found = torch.from_numpy(to_pixels(image, mode, size).copy())
        return Sample(255 - found if wanted["inverted"] else found, size=in_file)

    def read(number: int) -> Sample:
        found: Sample = read_image(files[number], pixels)
        return found

    return Part(path, [str(file) for file in files], read)


def _image_files(folder: Path) -> list[Path]:
    """All in it, also in folders in it, but for hidden ones."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _table(model: Model, path: Path) -> Part:
    """Columns are found by their names; others, such as a label, may be there too."""
    table, [wide] = _read_table(model, path), model.shape
    if not model.columns:
        if len(table) != wide:
            raise UserError(f"{path} has {len(table)} columns; allowed: {wide}, in the order of the training data")
        numbers = read_numbers(table, str(path)).astype(np.float32)
        return _rows(path, torch.from_numpy(numbers).to(model.dtype))
    names = [column.name for column in model.columns]
    if missing := [name for name in names if name not in table]:
        raise UserError(f"{path} has no column {missing[0]!r}; the model takes: {first_names(names)}")
    features = {name: table[name] for name in names}
    return _rows(path, standardize(read_numbers(features, str(path)), model.columns).to(model.dtype))


def _text(model: Model, path: Path) -> Part:
    """A text a line, or the text of a table's column."""
    if path.name.lower().endswith(TABLES):
        table, [column] = _read_table(model, path), model.columns
        if column.name not in table:
            raise UserError(f"{path} has no column {column.name!r}, of which the model takes the text")
        return _rows(path, _word_ids(model, [str(value) for value in table[column.name]]))
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {reason(error)}") from error
    texts = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not texts:
        raise UserError(f"{path} has no text in it")
    part = _rows(path, _word_ids(model, list(texts.values())))
    return replace(part, names=[f"{path}:{number}" for number in texts])


def _word_ids(model: Model, texts: Sequence[str]) -> Tensor:
    return with_vocabulary(texts, model.vocabulary, *model.shape)


def _read_table(model: Model, path: Path) -> Columns:
    name = path.name.lower()
    if not name.endswith(TABLES):
        raise UserError(f"{path} is no table by its name; allowed: {_allowed(model)}")
    used = {column.name for column in model.columns} or None
    table = read_parquet(path, str(path)) if name.endswith(".parquet") else read_csv(path, str(path), used)
    if not height(table):
        raise UserError(f"{path} has no rows")
    return table


def _array(model: Model, path: Path) -> Part:
    """Inputs as the program takes them, one or many."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not an array that can be read ({reason(error)})") from error
    array = array[None] if array.shape == model.shape else array
    if array.shape[1:] != model.shape:
        one = " x ".join(map(str, model.shape))
        raise UserError(f"{path} has the shape {' x '.join(map(str, array.shape))}; allowed: N x {one}, or {one}")
    if not len(array):
        raise UserError(f"{path} has no rows")
    _check_numbers(model, path, array)
    inputs = torch.from_numpy(array.astype(model.about["input"]["dtype"]))
    size = (model.shape[-1], model.shape[-2]) if model.kind == "image" else (1, 1)
    return Part(path, _numbered(path, len(inputs)), lambda number: Sample(inputs[number], size=size))


def _check_numbers(model: Model, path: Path, array: np.ndarray) -> None:
    """Numbers that the program would take for something else, or trip over."""
    kinds = {"image": (np.uint8,), "features": (np.floating, np.integer), "text": (np.integer,)}
    if not any(np.issubdtype(array.dtype, kind) for kind in kinds[model.kind]):
        raise UserError(f"{path} holds {array.dtype}; allowed: {model.about['input']['dtype']}")
    if model.kind == "features" and not np.isfinite(array).all():
        raise UserError(f"{path} holds a number that is not finite")
    if model.kind == "text" and (array.min() < 0 or array.max() >= len(model.vocabulary)):
        low, high = array.min(), array.max()
        raise UserError(f"{path} holds word ids from {low} to {high}; allowed: 0 to {len(model.vocabulary) - 1}")


def _rows(path: Path, inputs: Tensor) -> Part:
    return Part(path, _numbered(path, len(inputs)), lambda number: Sample(inputs[number]))


def _numbered(path: Path, rows: int) -> Sequence[str]:
    return [f"{path}:{number}" for number in range(1, rows + 1)]


# Outputs.


def write_csv(found: Prediction, path: Path, shown: Console) -> int:
    """All predictions as a file, with a bar on a terminal; how many rows it has."""
    check_named("--out", path, "CSV", [part.path for part in found.parts if not part.path.is_dir()])
    with whole_file(path) as temporary, temporary.open("w", newline="") as file:
        return stream_csv(found, file, shown)


def print_csv(found: Prediction, shown: Console) -> None:
    """All predictions on the standard output, for other programs."""
    try:
        stream_csv(found, sys.stdout, shown)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has enough, as head does; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stream_csv(found: Prediction, file: IO[str], shown: Console) -> int:
    writer, count = csv.writer(file, lineterminator="\n"), 0
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task("predict", total=found.count)
        rows = found.rows(lambda done: bar.update(task, completed=done))
        first = list(islice(rows, 1))  # before the header is written: the first inputs may be refused
        writer.writerow(found.header)
        for row in chain(first, rows):
            writer.writerow(row)
            count += 1
    return count


def as_table(found: Prediction) -> Table:
    """The first predictions, for a terminal."""
    rows = list(islice(found.rows(), SHOWN + 1))
    more = f"the first {SHOWN} rows; --out FILE.csv has all" if len(rows) > SHOWN else None
    first, *others = found.header
    table = Table(first, caption=more, caption_justify="left")
    for column in others:
        table.add_column(column, justify="left" if column.startswith("prediction") else "right")
    for row in rows[:SHOWN]:
        table.add_row(*map(escape, row))
    return table

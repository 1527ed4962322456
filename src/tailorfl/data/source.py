"""What a dataset's files hold, before it is divided among clients, and the options with which they are read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from tailorfl.data.objects import check_objects, main_class, renumbered
from tailorfl.errors import UserError

Kind = Literal["image", "text", "features"]

PADDING, UNKNOWN = 0, 1  # the first two word ids of every vocabulary


class SourceOptions(BaseModel):
    """How a source is read; each source uses the few options that concern it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(0, description="of all randomness")
    image_size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="side in pixels to which images are resized; omniglot 28, voc and coco 256 unless set",
    )
    client_folders: bool = Field(False, description="folder:PATH holds PATH/<client>/<class>/<image>")
    allow_partial: bool = Field(False, description="cifar10: go on with the training batches that are there")
    label_column: str | None = Field(None, description="tables: the label; the last column unless named")
    client_column: str | None = Field(None, description="tables: whose row it is")
    text_column: str | None = Field(None, description="tables: the rows are text, in this column")
    task: Literal["classification", "regression"] = Field("classification", description="what a table's label is")
    train_split: str = Field("train", description="Hugging Face, voc, coco: the split to train on")
    test_split: str | None = Field(
        None,
        description="the split to test on; unless set: Hugging Face test, if there is one; coco val; voc test (and "
        "trainval to train on) if there is one, else val",
    )
    class_names: tuple[str, ...] = Field(
        (), description="the classes in their order, also those of which there are no rows; default: those there are"
    )
    max_length: int = Field(25, description="text: words a row")
    vocabulary_size: int = Field(10_000, description="text: words that are known, with padding and the unknown word")
    glove: Path | None = Field(None, description="text: a file of word vectors, a word and its numbers a line")
    clients: int | None = Field(None, description="synthetic: natural clients; 20 unless set")
    samples: int | None = Field(None, description="synthetic: rows a client; 100 images, 200 regression rows")
    classes: int = Field(10, description="synthetic: classes")
    dimension: int = Field(20, description="synthetic-regression: features")
    heterogeneity: float = Field(0.5, description="synthetic: 0, clients alike, to 1, each has names of its own")
    personalization: float | Literal["mixed"] = Field(0.5, description="synthetic-regression: r_p; mixed: U(0, 1)")
    noise: float | None = Field(
        None, description="synthetic: deviation; 0.25 of the pixel range, detection 0.1, regression 0.5"
    )


class Column(NamedTuple):
    """A column of a table that is an input; numbers became (number - mean) / deviation."""

    name: str
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True)
class Reading:
    """How files became inputs, as far as the inputs do not say it: to read others in the same way."""

    columns: tuple[Column, ...] = ()  # tables: the features in their order, or the text
    inverted: bool = False  # images: 255 minus the pixels of the files


AS_IT_IS = Reading()


@dataclass(frozen=True)
class Source:
    """A dataset as its files give it, before it is divided among clients."""

    name: str
    kind: Kind
    inputs: Tensor  # image: uint8 [M, channels, h, w]; features: float32 [M, d]; text: int64 word ids [M, length]
    targets: Tensor  # int64 [M] class numbers; float32 [M] for regression; float32 [M, N, 6] objects for detection
    train_size: int  # rows [0, train_size) are for training, the rest is the source's own test set
    classes: tuple[str, ...]  # class names, () for regression
    owner: Tensor | None = None  # int64 [M]: the natural client of each row
    owners: tuple[str, ...] = ()  # natural client names
    vectors: Tensor | None = None  # text: word vectors [vocabulary, dim] where a GloVe file was given
    vocabulary: tuple[str, ...] = ()  # text
    reading: Reading = AS_IT_IS

    def __post_init__(self) -> None:
        rows = len(self.inputs)
        if len(self.targets) != rows or (self.owner is not None and len(self.owner) != rows):
            raise UserError(f"data={self.name}: {rows} inputs need as many targets and owners")
        if not 0 < self.train_size <= rows:
            raise UserError(
                f"data={self.name}: train_size={self.train_size}, allowed: 1 to {rows} (the rows there are)"
            )
        _check_types(self)
        _check_numbers(self)

    @property
    def regression(self) -> bool:
        return not self.classes

    def with_classes(self, names: tuple[str, ...]) -> "Source":
        """The same with the classes numbered by their place among these names, which must have all of them."""
        if not names:
            return self
        unknown = [name for name in self.classes if name not in names]
        if self.regression or unknown or len(set(names)) < len(names):
            what = f"{unknown[0]!r} is missing" if unknown else "one is there twice" if self.classes else "it has none"
            raise UserError(f"class_names={list(names)}: {what}; allowed: all classes of {self.name}, once each")
        number = torch.tensor([names.index(name) for name in self.classes])
        targets = renumbered(self.targets, number) if self.detection else number[self.targets]
        return replace(self, targets=targets, classes=names)

    @property
    def detection(self) -> bool:
        return self.targets.ndim == 3

    @property
    def labels(self) -> Tensor:
        """int64 [M] class numbers, by which rows are divided: see ``labels_of``."""
        return labels_of(self.targets, self.classes)

    @property
    def test_size(self) -> int:
        return len(self.inputs) - self.train_size


def labels_of(targets: Tensor, classes: tuple[str, ...]) -> Tensor:
    """One class a row: of an image with objects that of the largest, and of a regression 0."""
    if targets.ndim == 3:
        return main_class(targets)
    return targets if classes else torch.zeros(len(targets), dtype=torch.int64, device=targets.device)


def _check_types(source: Source) -> None:
    """The rest of the library trusts these."""
    wanted = {"image": (torch.uint8, 4), "features": (torch.float32, 2), "text": (torch.int64, 2)}
    found = (source.inputs.dtype, source.inputs.ndim)
    if found != wanted[source.kind]:
        raise UserError(
            f"data={source.name}: {source.kind} inputs are {found[0]} with {found[1]} dimensions, "
            f"allowed: {wanted[source.kind][0]} with {wanted[source.kind][1]}"
        )
    if source.detection:
        if source.kind != "image" or source.inputs.shape[1] != 3 or not source.classes:
            raise UserError(f"data={source.name}: objects need colour images, and classes with names")
        return
    kind = torch.float32 if source.regression else torch.int64
    if source.targets.ndim != 1:
        raise UserError(
            f"data={source.name}: targets have {source.targets.ndim} dimensions, allowed: 1, or 3 (objects)"
        )
    if source.targets.dtype != kind:
        raise UserError(f"data={source.name}: targets are {source.targets.dtype}, allowed: {kind}")


def _check_numbers(source: Source) -> None:
    """Class and owner numbers must have a name, and boxes a place in the image."""
    if source.detection:
        check_objects(source.name, source.targets, len(source.classes))
    for what, numbers, names in (
        ("target", None if source.regression or source.detection else source.targets, source.classes),
        ("owner", source.owner, source.owners),
    ):
        if numbers is not None and (numbers.min() < 0 or numbers.max() >= len(names)):
            low, high = int(numbers.min()), int(numbers.max())
            raise UserError(f"data={source.name}: {what} numbers are {low} to {high}, allowed: 0 to {len(names) - 1}")

"""What a dataset's files hold, before it is divided among clients, and the options with which they are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from tailorfl.errors import UserError

Kind = Literal["image", "text", "features"]

PADDING, UNKNOWN = 0, 1  # the first two word ids of every vocabulary


class SourceOptions(BaseModel):
    """How a source is read; each source uses the few options that concern it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    # images
    image_size: int | None = None  # side in pixels; omniglot 28, synthetic 8, image folders as they are
    client_folders: bool = False  # folder:PATH holds PATH/<client>/<class>/<image>
    allow_partial: bool = False  # cifar10: go on with the training batches that are there
    # tables and Hugging Face datasets
    label_column: str | None = None  # tables: the last column unless named
    client_column: str | None = None  # names the natural client of a row
    text_column: str | None = None  # the rows are text, not numbers
    task: Literal["classification", "regression"] = "classification"
    train_split: str = "train"
    test_split: str | None = None  # Hugging Face: the split called "test" if there is one
    # text
    max_length: int = 25  # words a row
    vocabulary_size: int = 10_000  # with the padding and the unknown word
    glove: Path | None = None  # word vectors, one word and its numbers a line
    # synthetic
    clients: int = 20  # natural clients
    samples: int | None = None  # rows a client: 100 images, 200 regression rows
    classes: int = 10
    dimension: int = 20  # features of synthetic-regression
    heterogeneity: float = 0.5  # synthetic: 0, all clients alike, to 1, each client has its own names for all classes
    personalization: float | Literal["mixed"] = 0.5  # synthetic-regression: the ratio r_p; mixed: U(0, 1) a client
    noise: float | None = None  # standard deviation: 0.25 of the pixel range, 0.5 in the regression


@dataclass(frozen=True)
class Source:
    """A dataset as its files give it, before it is divided among clients."""

    name: str
    kind: Kind
    inputs: Tensor  # image: uint8 [M, channels, h, w]; features: float32 [M, d]; text: int64 word ids [M, length]
    targets: Tensor  # int64 [M] class numbers; float32 [M] for regression
    train_size: int  # rows [0, train_size) are for training, the rest is the source's own test set
    classes: tuple[str, ...]  # class names, () for regression
    owner: Tensor | None = None  # int64 [M]: the natural client of each row
    owners: tuple[str, ...] = ()  # natural client names
    vectors: Tensor | None = None  # text: word vectors [vocabulary, dim] where a GloVe file was given
    vocabulary: tuple[str, ...] = ()  # text

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

    @property
    def test_size(self) -> int:
        return len(self.inputs) - self.train_size


def _check_types(source: Source) -> None:
    """The rest of the library trusts these."""
    wanted = {"image": (torch.uint8, 4), "features": (torch.float32, 2), "text": (torch.int64, 2)}
    found = (source.inputs.dtype, source.inputs.ndim)
    if found != wanted[source.kind]:
        raise UserError(
            f"data={source.name}: {source.kind} inputs are {found[0]} with {found[1]} dimensions, "
            f"allowed: {wanted[source.kind][0]} with {wanted[source.kind][1]}"
        )
    kind = torch.float32 if source.regression else torch.int64
    if source.targets.dtype != kind:
        raise UserError(f"data={source.name}: targets are {source.targets.dtype}, allowed: {kind}")


def _check_numbers(source: Source) -> None:
    """Class and owner numbers must have a name."""
    for what, numbers, names in (
        ("target", None if source.regression else source.targets, source.classes),
        ("owner", source.owner, source.owners),
    ):
        if numbers is not None and (numbers.min() < 0 or numbers.max() >= len(names)):
            low, high = int(numbers.min()), int(numbers.max())
            raise UserError(f"data={source.name}: {what} numbers are {low} to {high}, allowed: 0 to {len(names) - 1}")

"""The sources there are, by name, and the one way to load them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tailorfl.data.source import Source, SourceOptions
from tailorfl.data.sources import cifar, detection, generated, hugging_face, idx, images, prepared, table, text
from tailorfl.data.sources.files import data_folder
from tailorfl.errors import UserError

# The argument after the colon (or the source's name), the data folder, the options.
Loader = Callable[[str, Path | None, SourceOptions], Source]


@dataclass(frozen=True)
class SourceEntry:
    """One line of the list of sources."""

    description: str
    load: Loader
    files: tuple[str, ...] = ()  # below the data folder; idx files may end in .gz
    obtain: str = "nothing to get"
    argument: str = ""  # what follows the name and a colon
    sized: bool = False  # whether images are read or made at the size that is asked for


def _downloaded(description: str, load: Loader, files: tuple[str, ...], sized: bool = False) -> SourceEntry:
    return SourceEntry(description, load, files, "tailor data prepare downloads them", sized=sized)


SOURCES: dict[str, SourceEntry] = {
    "digits": SourceEntry("1,797 digits of 8x8 pixels, part of scikit-learn", generated.load_digits),
    "synthetic": SourceEntry(
        "small images that clients name differently: heterogeneity=0..1", generated.make_images, sized=True
    ),
    "synthetic-detection": SourceEntry(
        "coloured shapes with boxes, for detection; clients are alike", generated.make_detection, sized=True
    ),
    "synthetic-regression": SourceEntry(
        "linear regression with personal weights: personalization=0..1 or mixed", generated.make_regression
    ),
    "mnist": _downloaded("60,000 + 10,000 digits, 28x28, 10 classes", idx.load_mnist, idx.MNIST_FILES),
    "fashion-mnist": _downloaded("60,000 + 10,000 clothes, 28x28, 10 classes", idx.load_fashion, idx.FASHION_FILES),
    "emnist": _downloaded("handwritten letters, 28x28, 26 classes", idx.load_emnist, idx.emnist_files("letters")),
    "emnist-balanced": _downloaded(
        "letters and digits, 28x28, 47 classes", idx.load_emnist, idx.emnist_files("balanced")
    ),
    "emnist-byclass": _downloaded(
        "letters and digits, 28x28, 62 classes", idx.load_emnist, idx.emnist_files("byclass")
    ),
    "cifar10": _downloaded(
        "50,000 + 10,000 colour images, 32x32, 10 classes",
        cifar.load_cifar10,
        (*cifar.CIFAR10_BATCHES, cifar.CIFAR10_TEST),
    ),
    "cifar100": _downloaded(
        "50,000 + 10,000 colour images, 32x32, 100 classes", cifar.load_cifar100, cifar.CIFAR100_FILES
    ),
    "omniglot": _downloaded(
        "32,460 handwritten characters; each of 50 alphabets is a natural client",
        images.load_omniglot,
        tuple(f"{folder}/<alphabet>/<character>/*.png" for folder in images.OMNIGLOT_FOLDERS),
        sized=True,
    ),
    "sent140": _downloaded(
        "tweets, negative or positive; each user is a natural client", text.load_sent140, text.SENT140_EXPECTED
    ),
    "folder": SourceEntry(
        "images in <class>/, train/<class>/ and test/<class>/, or (client_folders=true) <client>/<class>/",
        images.load_folder,
        obtain="your own",
        argument="PATH",
        sized=True,
    ),
    "voc": SourceEntry(
        "images with boxes in the layout of PASCAL VOC: the folder of a year, or of several",
        detection.load_voc,
        obtain="the publisher's, or your own",
        argument="PATH",
        sized=True,
    ),
    "coco": SourceEntry(
        "images with boxes in the layout of MS COCO: annotations/instances_<split>.json, <split>/",
        detection.load_coco,
        obtain="the publisher's, or your own",
        argument="PATH",
        sized=True,
    ),
    "csv": SourceEntry(
        "a table: numeric features, label_column (default: the last), client_column",
        table.load_csv,
        obtain="your own",
        argument="PATH",
    ),
    "parquet": SourceEntry(
        "a table: numeric features, label_column (default: the last), client_column",
        table.load_parquet,
        obtain="your own",
        argument="PATH",
    ),
    "hf": SourceEntry(
        "a dataset of the Hugging Face hub, hf:NAME or hf:NAME:CONFIGURATION",
        hugging_face.load_hugging_face,
        obtain="downloaded when used",
        argument="NAME",
        sized=True,
    ),
    "file": SourceEntry(
        "a prepared source in one safetensors file",
        prepared.load_prepared,
        obtain="tailor data prepare writes it",
        argument="PATH",
    ),
}


def source_names() -> tuple[str, ...]:
    """As a user writes them: mnist, csv:PATH."""
    return tuple(f"{name}:{entry.argument}" if entry.argument else name for name, entry in SOURCES.items())


def load_source(name: str, data_dir: Path | None = None, options: SourceOptions | None = None) -> Source:
    """The source of that name, from the data folder (the argument, else TAILOR_DATA) where it needs files."""
    head, colon, argument = name.partition(":")
    entry = SOURCES.get(head)
    if entry is None or bool(entry.argument) != bool(argument) or bool(colon) != bool(argument):
        raise UserError(f"data={name} is not known; allowed: {', '.join(source_names())}")
    folder = data_folder(data_dir)
    place = _place(argument, folder) if entry.argument == "PATH" else argument
    source = entry.load(place or name, folder, options or SourceOptions())
    # Its name is what was asked for: a run may go on where the data folder is another.
    return replace(source, name=name) if place != argument and head != "file" else source


def _place(path: str, folder: Path | None) -> str:
    """A path as it is, or below the data folder if it is there and not here."""
    if folder is None or Path(path).exists() or not (folder / path).exists():
        return path
    return str(folder / path)

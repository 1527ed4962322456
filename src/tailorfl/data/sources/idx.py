"""Reads MNIST, Fashion-MNIST and EMNIST from their idx files, packed or not."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from tailorfl.data.reason import reason
from tailorfl.data.source import Source, SourceOptions
from tailorfl.data.sources import files
from tailorfl.errors import UserError

FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
EMNIST_CLASSES = {"letters": 26, "balanced": 47, "byclass": 62}
UNSIGNED_BYTE = 8


def read_idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an idx file."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({reason(error)})") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE:
        raise UserError(
            f"{path} is not an idx file of unsigned bytes: it starts with {raw[:4].hex()}, allowed: 000008.."
        )
    start = 4 + 4 * raw[3]
    shape = tuple(map(int, np.frombuffer(raw[4:start], ">u4")))
    if len(raw) - start != np.prod(shape, dtype=np.int64):
        raise UserError(f"{path} announces an array of shape {shape} but has {len(raw) - start} bytes for it")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def names_of(prefix: str, test: str) -> tuple[str, ...]:
    """The four files of an idx dataset: images and labels for training, then for testing."""
    parts = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"{prefix}{split}-{part}" for split in ("train", test) for part in parts)


MNIST_FILES = names_of("MNIST/raw/", "t10k")
FASHION_FILES = names_of("FashionMNIST/raw/", "t10k")


def emnist_files(split: str) -> tuple[str, ...]:
    return names_of(f"EMNIST/raw/emnist-{split}-", "test")


def load_mnist(name: str, folder: Path | None, options: SourceOptions) -> Source:
    return _source(name, files.find(name, folder, MNIST_FILES), tuple(map(str, range(10))))


def load_fashion(name: str, folder: Path | None, options: SourceOptions) -> Source:
    return _source(name, files.find(name, folder, FASHION_FILES), FASHION)


def load_emnist(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """EMNIST stores its images transposed, and numbers the letters from 1."""
    split = name.removeprefix("emnist").removeprefix("-") or "letters"
    paths = files.find(name, folder, emnist_files(split))
    first = 1 if split == "letters" else 0
    mapping = files.present(folder, f"EMNIST/raw/emnist-{split}-mapping.txt")
    classes = _mapped_names(mapping) if mapping else _plain_names(split)
    return _source(name, paths, classes, first_label=first, transposed=True)


def _mapped_names(path: Path) -> tuple[str, ...]:
    """A line of the mapping file has a label and the codes of its characters; the first (upper case) gives the name."""
    rows = sorted(tuple(map(int, line.split()[:2])) for line in path.read_text().splitlines() if line.strip())
    return tuple(chr(code) for _, code in rows)


def _plain_names(split: str) -> tuple[str, ...]:
    return tuple(chr(65 + i) if split == "letters" else str(i) for i in range(EMNIST_CLASSES[split]))


def _source(
    name: str, paths: list[Path], classes: tuple[str, ...], first_label: int = 0, transposed: bool = False
) -> Source:
    train_images, train_labels, test_images, test_labels = map(read_idx, paths)
    for images, labels, path in ((train_images, train_labels, paths[0]), (test_images, test_labels, paths[2])):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise UserError(f"{path} holds images of shape {images.shape}, the labels beside it {labels.shape}")
    images = np.concatenate([train_images, test_images])
    images = np.ascontiguousarray(images.swapaxes(1, 2)) if transposed else images
    labels = np.concatenate([train_labels, test_labels]).astype(np.int64) - first_label
    return Source(
        name=name,
        kind="image",
        inputs=torch.from_numpy(images).unsqueeze(1),
        targets=torch.from_numpy(labels),
        train_size=len(train_images),
        classes=classes,
    )

"""Reads CIFAR-10 and CIFAR-100 from their binary distribution."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tailorfl.data.source import Source, SourceOptions
from tailorfl.data.sources import files
from tailorfl.errors import UserError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CIFAR10_BATCHES = tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = "cifar-10-batches-bin/test_batch.bin"
CIFAR100_FILES = ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load_cifar10(name: str, folder: Path | None, options: SourceOptions) -> Source:
    there = [batch for batch in CIFAR10_BATCHES if files.present(folder, batch)]
    if there and len(there) < len(CIFAR10_BATCHES) and not options.allow_partial:
        absent = ", ".join(batch for batch in CIFAR10_BATCHES if batch not in there)
        raise UserError(
            f"data={name} has {len(there)} of its {len(CIFAR10_BATCHES)} training batches, {absent} missing under "
            f"{folder}; {files.obtain(name, folder)}, allow_partial=true goes on without"
        )
    paths = files.find(name, folder, (*(there or CIFAR10_BATCHES), CIFAR10_TEST))
    return _source(name, paths[:-1], paths[-1], label_bytes=1, classes=CIFAR10_CLASSES)


def load_cifar100(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """The fine labels; the coarse one before it is left out."""
    train, test = files.find(name, folder, CIFAR100_FILES)
    listed = files.present(folder, "cifar-100-binary/fine_label_names.txt")
    classes = tuple(listed.read_text().split()) if listed else tuple(map(str, range(100)))
    return _source(name, [train], test, label_bytes=2, classes=classes)


def _source(name: str, train: Sequence[Path], test: Path, label_bytes: int, classes: tuple[str, ...]) -> Source:
    """The images stay bytes: as floats they would take four times the memory."""
    sizes = [_rows(path, label_bytes) for path in (*train, test)]
    inputs = np.empty((sum(sizes), PIXELS), np.uint8)
    targets = np.empty(sum(sizes), np.int64)
    start = 0
    for path, size in zip((*train, test), sizes, strict=True):
        records = np.fromfile(path, np.uint8).reshape(size, label_bytes + PIXELS)
        inputs[start : start + size] = records[:, label_bytes:]
        targets[start : start + size] = records[:, label_bytes - 1]
        start += size
    return Source(
        name=name,
        kind="image",
        inputs=torch.from_numpy(inputs).view(-1, *SHAPE),
        targets=torch.from_numpy(targets),
        train_size=sum(sizes[:-1]),
        classes=classes,
    )


def _rows(path: Path, label_bytes: int) -> int:
    rows, rest = divmod(path.stat().st_size, label_bytes + PIXELS)
    if rest or not rows:
        record = f"{label_bytes + PIXELS} (an image and its label)"
        raise UserError(f"{path} has {path.stat().st_size} bytes, allowed: a multiple of {record}")
    return rows

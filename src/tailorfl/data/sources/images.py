"""Reads image files: Omniglot's drawings and any folder of classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.extras import import_extra
from tailorfl.data.reason import reason
from tailorfl.data.source import Reading, Source, SourceOptions
from tailorfl.data.sources import files
from tailorfl.errors import UserError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
OMNIGLOT_FOLDERS = ("omniglot-py/images_background", "omniglot-py/images_evaluation")
OMNIGLOT_SIZE = 28
GREY_MODES = {"1", "L"}


@dataclass(frozen=True)
class ImageFile:
    path: Path
    label: str
    owner: str = ""


def pillow() -> Any:
    return import_extra("PIL.Image", "image", "reading image files")


def to_pixels(image: Any, mode: str, size: int | tuple[int, int] | None) -> np.ndarray:
    """A Pillow image as uint8 [channels, h, w], resized to a square or to (width, height) where one is given."""
    image = image.convert(mode)
    wanted = (size, size) if isinstance(size, int) else size
    if wanted is not None and image.size != wanted:
        sampling = pillow().Resampling  # box: every pixel counts by its area
        shrinks = image.size[0] >= wanted[0] and image.size[1] >= wanted[1]
        image = image.resize(wanted, sampling.BOX if shrinks else sampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def stack_images(arrays: Sequence[np.ndarray], source: str) -> Tensor:
    """One uint8 tensor of all images; they must be of one size."""
    sizes = sorted({array.shape[1:] for array in arrays})
    if len(sizes) > 1:
        (h, w), (last_h, last_w) = sizes[0], sizes[-1]
        raise UserError(
            f"data={source} has images of {len(sizes)} sizes, {w}x{h} to {last_w}x{last_h}; set image_size=PIXELS"
        )
    return torch.from_numpy(np.stack(arrays))


def load_omniglot(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """Every alphabet is a client of its own; a class is a character's number within its alphabet. Ink is 255."""
    if folder is None or not all((folder / part).is_dir() for part in OMNIGLOT_FOLDERS):
        raise files.missing(name, folder, [f"{part}/<alphabet>/<character>/*.png" for part in OMNIGLOT_FOLDERS])
    alphabets = [alphabet for part in OMNIGLOT_FOLDERS for alphabet in _folders(folder / part)]
    found = [
        ImageFile(path, str(number), alphabet.name)
        for alphabet in alphabets
        for number, character in enumerate(_folders(alphabet))
        for path in _images(character)
    ]
    size = options.image_size or OMNIGLOT_SIZE
    pixels = _read_all(found, lambda image: 255 - to_pixels(image, "L", size), name)
    characters = max((int(file.label) for file in found), default=0) + 1
    classes = tuple(map(str, range(characters)))
    source = _source(name, pixels, found, len(found), classes, [alphabet.name for alphabet in alphabets])
    return replace(source, reading=Reading(inverted=True))


def load_folder(path: str, folder: Path | None, options: SourceOptions) -> Source:
    """PATH/<class>/, PATH/train/<class>/ with PATH/test/<class>/, or with client_folders PATH/<client>/<class>/."""
    root, name = Path(path), f"folder:{path}"
    if not root.is_dir():
        raise UserError(f"data={name}: no folder {path}; allowed: a folder of <class>/<image>")
    train, test = _listed(root, options.client_folders)
    if not train:
        layout = "<client>/<class>/<image>" if options.client_folders else "<class>/<image> or train/<class>/<image>"
        raise UserError(f"data={name} has no images in {layout}; allowed: {', '.join(sorted(SUFFIXES))} files there")
    found = [*train, *test]
    mode = "L" if set(_read_all(found, lambda image: image.mode, name)) <= GREY_MODES else "RGB"
    pixels = _read_all(found, lambda image: to_pixels(image, mode, options.image_size), name)
    classes = tuple(sorted({file.label for file in found}))
    owners = sorted({file.owner for file in found}) if options.client_folders else []
    return _source(name, pixels, found, len(train), classes, owners)


def _listed(root: Path, client_folders: bool) -> tuple[list[ImageFile], list[ImageFile]]:
    if client_folders:
        return [file for client in _folders(root) for file in _labelled(client, client.name)], []
    if (root / "train").is_dir():
        return _labelled(root / "train"), _labelled(root / "test") if (root / "test").is_dir() else []
    return _labelled(root), []


def _labelled(root: Path, owner: str = "") -> list[ImageFile]:
    return [ImageFile(path, folder.name, owner) for folder in _folders(root) for path in _images(folder)]


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _read_all(found: Sequence[ImageFile], read: Callable[[Any], Any], source: str) -> list[Any]:
    """What ``read`` makes of every image, in order. One after the other: threads were slower on small files."""
    return [read_image(file.path, read, source) for file in found]


def read_image(path: Path, read: Callable[[Any], Any], source: str = "") -> Any:
    """What ``read`` makes of an image file."""
    library = pillow()
    try:
        with library.open(path) as image:
            return read(image)
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as error:
        of = f"data={source}: " if source else ""
        raise UserError(f"{of}{path} is not an image that can be read ({reason(error)})") from error


def _source(
    name: str,
    pixels: list[np.ndarray],
    found: Sequence[ImageFile],
    train_size: int,
    classes: tuple[str, ...],
    owners: Sequence[str],
) -> Source:
    class_number = {label: i for i, label in enumerate(classes)}
    owner_number = {owner: i for i, owner in enumerate(owners)}
    return Source(
        name=name,
        kind="image",
        inputs=stack_images(pixels, name),
        targets=torch.tensor([class_number[file.label] for file in found]),
        train_size=train_size,
        classes=classes,
        owner=torch.tensor([owner_number[file.owner] for file in found]) if owners else None,
        owners=tuple(owners),
    )

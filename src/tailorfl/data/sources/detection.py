"""Reads images with boxes around their objects: folders of PASCAL VOC and of MS COCO."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from tailorfl.data.objects import stack_objects
from tailorfl.data.reason import reason
from tailorfl.data.source import Source, SourceOptions
from tailorfl.data.sources.images import read_image, to_pixels
from tailorfl.errors import UserError

log = logging.getLogger(__name__)

SIZE = 256  # side in pixels unless set
# fmt: off
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
SLACK = 1.0  # pixels by which a box may reach over the image: annotators round
THREADS = 8


@dataclass(frozen=True)
class Box:
    """An object in pixels, as the files have it."""

    label: str
    corners: tuple[float, float, float, float]  # x0, y0, x1, y1
    ignored: bool


@dataclass(frozen=True)
class Picture:
    """An image file and its objects."""

    path: Path
    noted: Path  # the file with the boxes, for error lines
    boxes: list[Box] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Whether there is something to learn from it."""
        return any(not box.ignored for box in self.boxes)


def load_voc(path: str, folder: Path | None, options: SourceOptions) -> Source:
    """A folder with JPEGImages, Annotations and ImageSets/Main, or one of several years of these, which are joined."""
    name = f"voc:{path}"
    years = _years(name, Path(path))
    there = sorted({file.stem for year in years for file in (year / "ImageSets/Main").glob("*.txt")})
    splits = _voc_splits(there, options)
    for split in splits:
        if split and split not in there:
            # Not the lists of each class, dog_train, that real folders have: a train is also a class.
            general = ", ".join(one for one in there if not one.startswith(tuple(f"{c}_" for c in VOC_CLASSES)))
            raise UserError(f"data={name} has no split {split}; allowed: {general or 'none, there is no list'}")
    train, test = (
        [_voc_picture(name, year, number) for year in years for number in _voc_list(year, split)] for split in splits
    )
    named = {box.label for picture in (*train, *test) for box in picture.boxes}
    classes = VOC_CLASSES if named <= set(VOC_CLASSES) else tuple(sorted(named))
    return _source(name, train, test, classes, options)


def _years(name: str, root: Path) -> list[Path]:
    for place in (root, root / "VOCdevkit"):
        years = [year for year in (place, *sorted(place.glob("VOC*"))) if (year / "ImageSets/Main").is_dir()]
        if years:
            return years
    raise UserError(
        f"data={name}: no VOC folder; allowed: one with JPEGImages, Annotations and ImageSets/Main, or a VOCdevkit of "
        "such folders (VOC2007, VOC2012)"
    )


def _voc_splits(there: Sequence[str], options: SourceOptions) -> tuple[str, str | None]:
    """Unless a test split is asked for: the official test list where there is one, with all else to train on."""
    if options.test_split or "test" not in there:
        return options.train_split, options.test_split or ("val" if "val" in there else None)
    return "trainval" if options.train_split == "train" else options.train_split, "test"


def _voc_list(year: Path, split: str | None) -> list[str]:
    """The images of a list; none where the year does not have it, as 2012 has no test list."""
    path = year / f"ImageSets/Main/{split}.txt"
    return [line.split()[0] for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []


def _voc_picture(name: str, year: Path, number: str) -> Picture:
    noted = year / f"Annotations/{number}.xml"
    try:
        boxes = [_voc_box(element) for element in ElementTree.parse(noted).getroot().findall("object")]
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise UserError(f"data={name}: {noted} cannot be read: {reason(error)}") from error
    return Picture(year / f"JPEGImages/{number}.jpg", noted, boxes)


def _voc_box(element: ElementTree.Element) -> Box:
    """Pixels are counted from 1 in these files, and the last ones belong to the box."""
    label = (element.findtext("name") or "").strip()
    texts = [element.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    if not label or None in texts:
        raise ValueError("an object needs a name and a bndbox with xmin, ymin, xmax, ymax")
    x0, y0, x1, y1 = (float(text or "") for text in texts)
    return Box(label, (x0 - 1, y0 - 1, x1, y1), (element.findtext("difficult") or "0").strip() == "1")


def load_coco(path: str, folder: Path | None, options: SourceOptions) -> Source:
    """A folder with annotations/instances_<split>2017.json, and the images in <split>2017/ (or without the 2017)."""
    name, root = f"coco:{path}", Path(path)
    there = sorted(file.stem.removeprefix("instances_") for file in (root / "annotations").glob("instances_*.json"))
    train = _coco_split(name, there, options.train_split)
    wanted = options.test_split or ("val" if {"val", "val2017"} & set(there) else None)
    test = _coco_split(name, there, wanted) if wanted else None
    splits = [_coco_pictures(name, root, split) for split in (train, test) if split]
    classes, found = splits[0]
    if any(other != classes for other, _ in splits):
        raise UserError(f"data={name}: the splits {train} and {test} have other categories; allowed: the same")
    return _source(name, found, splits[1][1] if test else [], classes, options)


def _coco_split(name: str, there: Sequence[str], wanted: str) -> str:
    for split in (wanted, f"{wanted}2017"):
        if split in there:
            return split
    allowed = ", ".join(there) or "none: there is no annotations/instances_<split>.json"
    raise UserError(f"data={name} has no split {wanted}; allowed: {allowed}")


def _coco_pictures(name: str, root: Path, split: str) -> tuple[tuple[str, ...], list[Picture]]:
    """The classes, in the order of their numbers, and the images in the order of the file."""
    noted = root / f"annotations/instances_{split}.json"
    folders = [root / split, root / split.removesuffix("2017"), root / "images" / split]
    images = next((place for place in folders if place.is_dir()), root / split)
    try:
        facts = json.loads(noted.read_bytes())
        classes = {one["id"]: str(one["name"]) for one in sorted(facts["categories"], key=lambda one: one["id"])}
        pictures = {one["id"]: Picture(images / one["file_name"], noted) for one in facts["images"]}
        for one in facts["annotations"]:
            box = _coco_box(classes[one["category_id"]], one)
            if box:
                pictures[one["image_id"]].boxes.append(box)
    except KeyError as error:
        raise UserError(f"data={name}: {noted}: {error} is named and not there") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"data={name}: {noted} cannot be read: {reason(error)}") from error
    if len(set(classes.values())) < len(classes):
        raise UserError(f"data={name}: {noted} has two categories of one name; allowed: different names")
    return tuple(classes.values()), list(pictures.values())


def _coco_box(label: str, facts: dict[str, Any]) -> Box | None:
    """None for a box of no area: the official files have some."""
    x, y, width, height = map(float, facts["bbox"])
    if width == 0 or height == 0:
        return None
    return Box(label, (x, y, x + width, y + height), bool(facts.get("iscrowd", 0)))


def _source(
    name: str, train: Sequence[Picture], test: Sequence[Picture], classes: tuple[str, ...], options: SourceOptions
) -> Source:
    """Training images without an object that counts are left out; test images stay, to be tested for false alarms."""
    train = [picture for picture in train if picture.counts]
    both = {picture.path for picture in train} & {picture.path for picture in test}
    if both:
        raise UserError(
            f"data={name}: {len(both)} images are to train on and to test on, such as {min(both)}; "
            "allowed: another train_split or test_split"
        )
    if not train:
        raise UserError(f"data={name} has no image with an object to train on")
    pictures = [*train, *test]
    inputs, sizes = _read(name, pictures, options.image_size or SIZE)
    number = {label: i for i, label in enumerate(classes)}
    objects = [_objects(name, picture, *size, number) for picture, size in zip(pictures, sizes, strict=True)]
    return Source(
        name=name,
        kind="image",
        inputs=inputs,
        targets=stack_objects(objects),
        train_size=len(train),
        classes=classes,
    )


def _read(name: str, pictures: Sequence[Picture], side: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """All images as squares, and their width and height before. Decoding is long work: several at once."""
    inputs = torch.empty(len(pictures), 3, side, side, dtype=torch.uint8)
    log.info("%s: reading %d images, %.1f GB", name, len(pictures), inputs.numel() / 1e9)

    def read(row: int) -> tuple[int, int]:
        def pixels(image: Any) -> tuple[int, int]:
            size: tuple[int, int] = image.size
            image.draft("RGB", (side, side))  # a JPEG file is decoded at a half or less where that is enough
            inputs[row] = torch.from_numpy(to_pixels(image, "RGB", side).copy())
            return size

        found: tuple[int, int] = read_image(pictures[row].path, pixels, name)
        return found

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return inputs, list(pool.map(read, range(len(pictures))))


def _objects(name: str, picture: Picture, width: int, height: int, number: dict[str, int]) -> list[list[float]]:
    return [
        [number[box.label], *_relative(name, picture, box, (width, height)), float(box.ignored)]
        for box in picture.boxes
    ]


def _relative(name: str, picture: Picture, box: Box, size: tuple[int, int]) -> Iterable[float]:
    """The corners in units of the image."""
    limits = size * 2
    x0, y0, x1, y1 = (min(max(value, 0.0), limit) / limit for value, limit in zip(box.corners, limits, strict=True))
    over = any(not -SLACK <= value <= limit + SLACK for value, limit in zip(box.corners, limits, strict=True))
    if over or not (x0 < x1 and y0 < y1):
        shown = ", ".join(f"{value:g}" for value in box.corners)
        what = "reaches over its image" if over else "is inside out"
        raise UserError(
            f"data={name}: {picture.noted}: the {box.label} at ({shown}) in {picture.path.name} {what}; "
            f"allowed: x0 < x1 up to {size[0]}, y0 < y1 up to {size[1]}"
        )
    return x0, y0, x1, y1

"""The readers of images with boxes, on tiny folders made here and on the real one where TAILOR_DATA has it."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tailorfl.data import Source, SourceOptions, federate, load_source, save_source
from tailorfl.data.partition import PartitionOptions
from tailorfl.errors import UserError

BACK, FRONT = 40, 220


def write_image(path: Path, size: tuple[int, int], box: Sequence[int] = ()) -> None:
    """A bright box on dark, as JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), BACK, np.uint8)
    if box:
        pixels[box[1] : box[3], box[0] : box[2]] = FRONT
    Image.fromarray(pixels).save(path, quality=95)


def voc_object(label: str, corners: Sequence[float], difficult: str = "<difficult>0</difficult>") -> str:
    names = ("xmin", "ymin", "xmax", "ymax")
    box = "".join(f"<{name}>{value}</{name}>" for name, value in zip(names, corners, strict=True))
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    return f"<object><name>{label}</name>{difficult}<bndbox>{box}</bndbox>{part}</object>"


def write_voc(folder: Path, number: str, objects: str, size: tuple[int, int] = (40, 20)) -> None:
    write_image(folder / f"JPEGImages/{number}.jpg", size, (10, 5, 30, 15))
    path = folder / f"Annotations/{number}.xml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"<annotation>{objects}</annotation>")


def write_lists(folder: Path, **lists: Sequence[str]) -> None:
    (folder / "ImageSets/Main").mkdir(parents=True, exist_ok=True)
    for name, numbers in lists.items():
        (folder / f"ImageSets/Main/{name}.txt").write_text("".join(f"{number}\n" for number in numbers))


DOG = voc_object("dog", (11, 6, 30, 15))


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    folder = tmp_path / "VOCdevkit/VOC2012"
    for number in ("a", "b", "c"):
        write_voc(folder, number, DOG)
    write_lists(folder, train=["a", "b"], val=["c"], trainval=["a", "b", "c"], dog_train=["a", "b"])
    return folder


def read_voc(folder: Path, **options: Any) -> Source:
    return load_source(f"voc:{folder}", None, SourceOptions(**options))


def test_a_path_may_be_below_the_data_folder(voc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name stays what was asked for, so that a run can go on where the data folder is another."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    source = load_source("voc:VOCdevkit", tmp_path, SourceOptions(image_size=20))
    assert source.name == "voc:VOCdevkit"
    assert torch.equal(source.inputs, read_voc(voc, image_size=20).inputs)
    with pytest.raises(UserError, match="VOCdevkit"):
        load_source("voc:VOCdevkit", None, SourceOptions(image_size=20))


def test_voc_boxes_count_pixels_from_1_and_include_the_last(voc: Path) -> None:
    source = read_voc(voc, image_size=20)
    assert source.targets[0, 0].tolist() == pytest.approx([11, 0.25, 0.25, 0.75, 0.75, 0])
    assert (source.train_size, source.test_size) == (2, 1)
    assert len(source.classes) == 20
    assert source.classes[11] == "dog"
    assert source.inputs.shape == (3, 3, 20, 20)
    # 10 of 20 columns and rows: the box is where the pixels are, at any size
    assert (source.inputs[0, :, 6:14, 6:14] > 200).all()
    assert (source.inputs[0, :, :4] < 60).all()
    assert read_voc(voc).inputs.shape[2:] == (256, 256)


def test_difficult_objects_are_to_be_ignored_and_images_with_nothing_else_not_trained_on(voc: Path) -> None:
    hard = "<difficult>1</difficult>"
    write_voc(voc, "a", DOG + voc_object("cat", (1, 1, 5, 5), hard) + voc_object("cat", (1, 1, 9, 9), ""))
    write_voc(voc, "b", voc_object("dog", (1, 1, 5, 5), hard))
    write_voc(voc, "c", voc_object("dog", (1, 1, 5, 5), hard))
    source = read_voc(voc)
    assert (source.train_size, source.test_size) == (1, 1)
    assert source.targets[0, :, 5].tolist() == [0, 1, 0]
    assert source.targets[1, :, 0].tolist() == [11, -1, -1]


def test_years_are_joined_and_the_official_test_list_is_used(voc: Path) -> None:
    other = voc.parent / "VOC2007"
    for number in ("x", "y", "z"):
        write_voc(other, number, DOG, size=(60, 60))
    write_lists(other, train=["x"], val=["y"], trainval=["x", "y"], test=["z"])
    for folder in (voc.parent, voc.parent.parent):
        source = read_voc(folder)
        assert (source.train_size, source.test_size) == (5, 1)
    assert source.targets[5, 0, 1:5].tolist() == pytest.approx([10 / 60, 5 / 60, 30 / 60, 15 / 60])
    assert read_voc(voc.parent, test_split="test").train_size == 3, "the splits that are asked for, to the letter"
    assert read_voc(voc).train_size == 2
    assert read_voc(voc.parent, test_split="val").test_size == 2


def test_voc_folders_with_other_names_have_the_classes_they_name(voc: Path) -> None:
    write_voc(voc, "c", voc_object("zebra", (1, 1, 5, 5)))
    assert read_voc(voc).classes == ("dog", "zebra")


def test_a_voc_folder_without_anything_to_test_on_is_divided(voc: Path) -> None:
    (voc / "ImageSets/Main/val.txt").unlink()
    source = read_voc(voc)
    assert source.test_size == 0


@pytest.mark.parametrize(
    ("objects", "line"),
    [
        (voc_object("dog", (1, 1, 42, 20)), r"b.xml: the dog at \(0, 0, 42, 20\) in b.jpg reaches over its image"),
        (voc_object("dog", (30, 1, 20, 20)), r"b.xml: .* is inside out; allowed: x0 < x1 up to 40, y0 < y1 up to 20"),
        (voc_object("dog", ("one", 1, 2, 2)), "b.xml cannot be read: could not convert string to float"),  # type: ignore[arg-type]
        ("<object><name>dog</name></object>", "b.xml cannot be read: an object needs a name and a bndbox"),
        ("<object>", "b.xml cannot be read: mismatched tag"),
        (voc_object("dog", (1, 1, float("nan"), 2)), "b.xml: .* reaches over its image"),
    ],
)
def test_bad_voc_annotations_are_refused_in_a_line(voc: Path, objects: str, line: str) -> None:
    write_voc(voc, "b", objects)
    with pytest.raises(UserError, match=line) as caught:
        read_voc(voc)
    assert "\n" not in str(caught.value)


def test_a_box_may_reach_over_its_image_by_a_pixel(voc: Path) -> None:
    write_voc(voc, "b", voc_object("dog", (0, 1, 41, 20)))
    assert read_voc(voc).targets[1, 0, 1:5].tolist() == [0, 0, 1, 1]


def test_missing_files_and_splits_of_voc_are_named(voc: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no split all; allowed: train, trainval, val$"):
        read_voc(voc, train_split="all")
    with pytest.raises(UserError, match=r"no split test; allowed: train, trainval, val$"):
        read_voc(voc, test_split="test")
    with pytest.raises(UserError, match=r"1 images are to train on and to test on, such as .*c.jpg; allowed: another"):
        read_voc(voc, train_split="trainval")
    (voc / "JPEGImages/b.jpg").unlink()
    with pytest.raises(UserError, match=r"b.jpg is not an image that can be read .*No such file"):
        read_voc(voc)
    (voc / "Annotations/a.xml").unlink()
    with pytest.raises(UserError, match=r"a.xml cannot be read"):
        read_voc(voc)
    with pytest.raises(UserError, match="no VOC folder; allowed: one with JPEGImages"):
        read_voc(tmp_path / "nowhere")


def test_a_cut_image_is_refused(voc: Path) -> None:
    path = voc / "JPEGImages/b.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"b.jpg is not an image that can be read \(.*truncated"):
        read_voc(voc)


def test_grey_images_and_large_ones_are_read(voc: Path) -> None:
    pixels = np.full((600, 800), BACK, np.uint8)
    pixels[150:450, 200:600] = FRONT
    Image.fromarray(pixels).save(voc / "JPEGImages/a.jpg")
    (voc / "Annotations/a.xml").write_text(f"<annotation>{voc_object('dog', (201, 151, 600, 450))}</annotation>")
    source = read_voc(voc, image_size=32)
    assert source.targets[0, 0, 1:5].tolist() == [0.25, 0.25, 0.75, 0.75]
    assert (source.inputs[0, :, 9:23, 9:23] > 200).all()
    assert (source.inputs[0, :, :7] < 60).all()


CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}, {"id": 90, "name": "toothbrush"}]


def write_coco(
    root: Path, split: str, images: int, annotations: list[dict[str, Any]], folder: str | None = None, **facts: Any
) -> None:
    names = [f"{split}{k:03d}.jpg" for k in range(images)]
    for name in names:
        write_image(root / (folder or split) / name, (40, 20), (10, 5, 30, 15))
    listed = [{"id": 100 + k, "file_name": name, "width": 40, "height": 20} for k, name in enumerate(names)]
    (root / "annotations").mkdir(exist_ok=True)
    whole = {"images": listed, "annotations": annotations, "categories": CATEGORIES, **facts}
    (root / f"annotations/instances_{split}.json").write_text(json.dumps(whole))


def noted(image: int, category: int, box: Sequence[float], crowd: int = 0) -> dict[str, Any]:
    return {"image_id": 100 + image, "category_id": category, "bbox": list(box), "iscrowd": crowd, "segmentation": []}


def read_coco(folder: Path, **options: Any) -> Source:
    return load_source(f"coco:{folder}", None, SourceOptions(image_size=20, **options))


NOTES = [
    noted(2, 90, [0, 0, 8, 4]),
    noted(0, 18, [10, 5, 20, 10]),
    noted(0, 3, [0, 0, 40, 20], crowd=1),
    noted(3, 3, [0, 0, 40, 20], crowd=1),
    noted(0, 3, [5, 5, 0, 10]),  # the official files have boxes of no area
]


@pytest.mark.parametrize(
    ("year", "folder"), [("2017", None), ("", None), ("2017", "train"), ("2017", "images/train2017")]
)
def test_a_coco_folder_is_read(tmp_path: Path, year: str, folder: str | None) -> None:
    write_coco(tmp_path, f"train{year}", 4, NOTES, folder)
    write_coco(tmp_path, f"val{year}", 2, [noted(1, 3, [0, 0, 10, 10])])
    source = read_coco(tmp_path)
    assert source.classes == ("car", "dog", "toothbrush")
    assert (source.train_size, source.test_size) == (2, 2), "training images without an object that counts are left out"
    assert source.targets.shape == (4, 2, 6)
    assert source.targets[0].tolist() == [[1, 0.25, 0.25, 0.75, 0.75, 0], [0, 0, 0, 1, 1, 1]]
    assert source.targets[1, 0].tolist() == pytest.approx([2, 0, 0, 0.2, 0.2, 0])
    assert source.targets[2, 0].tolist() == [-1, 0, 0, 0, 0, 0]
    assert source.targets[3, 0].tolist() == pytest.approx([0, 0, 0, 0.25, 0.5, 0])
    assert (source.inputs[0, :, 6:14, 6:14] > 200).all()


def test_coco_splits_are_taken_as_named_and_a_missing_test_split_is_left_out(tmp_path: Path) -> None:
    write_coco(tmp_path, "train2017", 4, NOTES)
    assert read_coco(tmp_path).test_size == 0
    write_coco(tmp_path, "extra", 1, [noted(0, 3, [0, 0, 10, 10])])
    assert read_coco(tmp_path, train_split="train2017", test_split="extra").test_size == 1
    with pytest.raises(UserError, match="has no split val2014; allowed: extra, train2017"):
        read_coco(tmp_path, test_split="val2014")
    with pytest.raises(UserError, match="2 images are to train on and to test on"):
        read_coco(tmp_path, test_split="train")
    with pytest.raises(UserError, match="has no split train; allowed: none"):
        read_coco(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"annotations": [noted(0, 4, [0, 0, 1, 1])]}, "instances_train.json: 4 is named and not there"),
        ({"annotations": [noted(9, 3, [0, 0, 1, 1])]}, "instances_train.json: 109 is named and not there"),
        ({"annotations": [noted(0, 3, [0, 0, 50, 1])]}, r"the car at \(0, 0, 50, 1\) in train000.jpg reaches over"),
        ({"annotations": [noted(0, 3, [9, 0, -5, 1])]}, "train000.jpg is inside out"),
        ({"annotations": [noted(0, 3, [0, 0, 1])]}, "instances_train.json cannot be read: not enough values"),
        ({"annotations": [noted(0, 3, [0, 0, 9, 9], crowd=1)]}, "has no image with an object to train on"),
        ({"categories": [{"id": 3, "name": "car"}, {"id": 4, "name": "car"}]}, "two categories of one name"),
        ({"annotations": 5}, "instances_train.json cannot be read"),
    ],
)
def test_bad_coco_annotations_are_refused_in_a_line(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    write_coco(tmp_path, "train", 2, **{"annotations": [noted(0, 3, [0, 0, 9, 9])], **change})
    with pytest.raises(UserError, match=line) as caught:
        read_coco(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_cut_coco_file_and_splits_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write_coco(tmp_path, "train", 4, NOTES)
    write_coco(tmp_path, "val", 1, [], categories=CATEGORIES[:2])
    with pytest.raises(UserError, match="the splits train and val have other categories; allowed: the same"):
        read_coco(tmp_path)
    path = tmp_path / "annotations/instances_train.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=r"instances_train.json cannot be read: Unterminated"):
        read_coco(tmp_path)


def test_without_pillow_the_line_says_what_to_install(voc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r"install tailorfl\[image\]"):
        read_voc(voc)


def real(**options: Any) -> Source:
    folder = Path(os.environ.get("TAILOR_DATA", "nowhere")) / "voc2012_mini"
    if not folder.is_dir():
        pytest.skip("TAILOR_DATA does not name a folder with the real data")
    return read_voc(folder, **options)


def test_the_small_real_voc_has_its_counts(tmp_path: Path) -> None:
    source = real(image_size=64)
    assert (source.train_size, source.test_size) == (300, 100)
    assert source.inputs.shape == (400, 3, 64, 64)
    labels, ignored = source.targets[..., 0], source.targets[..., 5] == 1
    train, test = labels[:300], labels[300:]
    assert ((train >= 0).sum(), (test >= 0).sum()) == (861, 286)
    assert (ignored[:300].sum(), ignored[300:].sum()) == (122, 27)
    for name, number, tests in (("person", 232, 72), ("dog", 23, 7), ("tvmonitor", 24, 12)):
        label = source.classes.index(name)
        assert ((train == label).sum(), (test == label).sum()) == (number, tests)
    # The first image of each list: 320 pixels wide, 213 and 240 high.
    assert source.targets[0, 0].tolist() == pytest.approx([12, 69 / 320, 47 / 213, 316 / 320, 1, 0])
    assert source.targets[300, 1].tolist() == pytest.approx([13, 157 / 320, 118 / 240, 285 / 320, 1, 0])
    save_source(source, tmp_path / "voc.safetensors")
    again = load_source(f"file:{tmp_path / 'voc.safetensors'}")
    assert torch.equal(again.targets, source.targets)
    data = federate(again, PartitionOptions(partition="iid", clients=4), 0)
    assert data.train.counts.tolist() == [75] * 4
    assert data.test.counts.min() > 0

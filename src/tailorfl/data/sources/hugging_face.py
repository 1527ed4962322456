"""Reads any dataset of the Hugging Face hub: images, text or numeric columns."""

from pathlib import Path
from typing import Any

from tailorfl.data.extras import import_extra
from tailorfl.data.reason import reason
from tailorfl.data.source import Source, SourceOptions
from tailorfl.data.sources.images import GREY_MODES, stack_images, to_pixels
from tailorfl.data.sources.table import column_named, read_owners, read_targets, table_source
from tailorfl.errors import UserError

LABEL_NAMES = ("label", "labels", "target", "class")


def load_hugging_face(argument: str, folder: Path | None, options: SourceOptions) -> Source:
    """hf:NAME or hf:NAME:CONFIGURATION; the package keeps what it downloads in a cache of its own."""
    name = f"hf:{argument}"
    datasets = import_extra("datasets", "data", f"data={name}")
    try:
        splits = _load_splits(datasets, argument, options)
    except UserError:
        raise
    except Exception as error:  # the package raises whatever its network, cache and file readers raise
        raise UserError(f"data={name} cannot be loaded: {reason(error)}") from error
    return _source(name, splits, options)


def _load_splits(datasets: Any, argument: str, options: SourceOptions) -> list[Any]:
    """The training split and, where there is one, the test split."""
    path, _, configuration = argument.partition(":")
    there = datasets.get_dataset_split_names(path, configuration or None)
    wanted = [options.train_split, options.test_split or ("test" if "test" in there else None)]
    for split in wanted:
        if split is not None and split not in there:
            raise UserError(f"data=hf:{argument} has no split {split}; allowed: {', '.join(there)}")
    return [datasets.load_dataset(path, configuration or None, split=split) for split in wanted if split is not None]


def _source(name: str, splits: list[Any], options: SourceOptions) -> Source:
    features: dict[str, Any] = dict(splits[0].features)
    label = _label_column(name, features, options)
    classes = tuple(getattr(features[label], "names", None) or ()) or None
    images = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    if images and not options.text_column:
        return _image_source(name, splits, images[0], label, classes, options)
    options = options.model_copy(update={"label_column": label, "text_column": _text_column(features, label, options)})
    text = column_named(name, features, "text_column", options.text_column)
    client = column_named(name, features, "client_column", options.client_column)
    kept = dict.fromkeys([text, client, label] if text else features)
    columns = {column: _values(splits, column) for column in kept if column}
    return table_source(name, columns, len(splits[0]), options, classes)


def _label_column(name: str, features: dict[str, Any], options: SourceOptions) -> str:
    """The one that is asked for, else the only column of class labels, else one with the usual name."""
    if options.label_column:
        return column_named(name, features, "label_column", options.label_column)
    labelled = [column for column, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    usual = labelled if len(labelled) == 1 else [column for column in LABEL_NAMES if column in features]
    if not usual:
        raise UserError(f"data={name} has no clear label: set label_column to one of {', '.join(features)}")
    return usual[0]


def _text_column(features: dict[str, Any], label: str, options: SourceOptions) -> str | None:
    """The one that is asked for, else the only column of strings."""
    if options.text_column:
        return options.text_column
    taken = (label, options.client_column)
    strings = [c for c, f in features.items() if getattr(f, "dtype", "") == "string" and c not in taken]
    return strings[0] if len(strings) == 1 else None


def _values(splits: list[Any], column: str) -> list[Any]:
    return [value for split in splits for value in split[column]]


def _image_source(
    name: str, splits: list[Any], image: str, label: str, classes: tuple[str, ...] | None, options: SourceOptions
) -> Source:
    """Images are decoded row by row: a whole column of Pillow images would not fit in memory."""
    mode = "L" if splits[0][0][image].mode in GREY_MODES else "RGB"
    pixels = [
        to_pixels(row[image], mode, options.image_size) for split in splits for row in split.select_columns([image])
    ]
    targets, found = read_targets(name, label, _values(splits, label), options, classes)
    client = column_named(name, splits[0].features, "client_column", options.client_column)
    owner, owners = read_owners(_values(splits, client)) if client else (None, ())
    return Source(
        name=name,
        kind="image",
        inputs=stack_images(pixels, name),
        targets=targets,
        train_size=len(splits[0]),
        classes=found,
        owner=owner,
        owners=owners,
    )

"""Writes a source as one safetensors file, and reads it again without the files it came from."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tailorfl.data.atomic import whole_file
from tailorfl.data.reason import reason
from tailorfl.data.source import AS_IT_IS, Column, Kind, Reading, Source, SourceOptions
from tailorfl.errors import UserError

FORMAT = "tailorfl source 1"
TEXTS = ("classes", "owners", "vocabulary")


def save_source(source: Source, path: Path, limit: int | None = None) -> None:
    """Write the source; with a limit at most so many training rows, evenly taken, and test rows in proportion."""
    source = source if limit is None else thin(source, limit)
    tensors = {"inputs": source.inputs, "targets": source.targets, "owner": source.owner, "vectors": source.vectors}
    texts = {field: json.dumps(getattr(source, field)) for field in TEXTS}
    texts["reading"] = json.dumps(asdict(source.reading))
    facts = {"format": FORMAT, "name": source.name, "kind": source.kind, "train_size": str(source.train_size)}
    with whole_file(path) as temporary:
        save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, temporary, {**facts, **texts})


def thin(source: Source, limit: int) -> Source:
    """Fewer rows, evenly taken over the source's own order, so that classes and owners keep their shares."""
    if limit < 1:
        raise UserError(f"limit={limit}, allowed: at least 1")
    train = min(limit, source.train_size)
    test = round(source.test_size * train / source.train_size)
    rows = torch.cat([_even(source.train_size, train), source.train_size + _even(source.test_size, test)])
    owner = None if source.owner is None else source.owner[rows]
    return replace(source, inputs=source.inputs[rows], targets=source.targets[rows], owner=owner, train_size=train)


def _even(rows: int, wanted: int) -> Tensor:
    return torch.from_numpy(np.arange(wanted, dtype=np.int64) * rows // max(wanted, 1))


def load_prepared(path: str, folder: Path | None, options: SourceOptions) -> Source:
    """file:PATH.safetensors"""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (the file is no dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"data=file:{path} cannot be read: {reason(error)}") from error
    if facts.get("format") != FORMAT:
        raise UserError(f"data=file:{path} is not a prepared source; allowed: a file that `tailor data prepare` wrote")
    return Source(
        name=facts["name"],
        kind=cast(Kind, facts["kind"]),
        inputs=tensors["inputs"],
        targets=tensors["targets"],
        train_size=int(facts["train_size"]),
        classes=tuple(json.loads(facts["classes"])),
        owner=tensors.get("owner"),
        owners=tuple(json.loads(facts["owners"])),
        vectors=tensors.get("vectors"),
        vocabulary=tuple(json.loads(facts["vocabulary"])),
        reading=_reading(path, facts),
    )


def _reading(path: str, facts: dict[str, str]) -> Reading:
    """Older files say nothing of it. Without it no other table could be read in the same way."""
    if "reading" not in facts and facts["kind"] == "image":
        return AS_IT_IS
    if "reading" not in facts:
        raise UserError(f"data=file:{path} lacks its columns; allowed: write it again by `tailor data prepare`")
    found = json.loads(facts["reading"])
    return Reading(tuple(Column(*column) for column in found["columns"]), found["inverted"])

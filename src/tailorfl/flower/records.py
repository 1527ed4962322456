"""Our messages as Flower's records: arrays for tensors, metrics for numbers, a line of JSON for what to do."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from tailorfl.models.network import Values

FACTS = "facts"  # the config record of every message, with one entry of the same name


def arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors under their names."""
    found = {name: Array(tensor.detach().cpu().contiguous().numpy()) for name, tensor in tensors.items()}
    return ArrayRecord(found)


def tensors(record: ArrayRecord) -> Values:
    """The inverse; what is not an array of plain numbers is refused by a ValueError."""
    return {name: _plain(name, array) for name, array in record.items()}


def _plain(name: str, array: Array) -> Tensor:
    try:
        found = array.numpy()
    except Exception as error:
        raise ValueError(f"{name} is no array ({type(error).__name__})") from error
    if found.dtype.kind not in "fiub" or found.dtype.itemsize > 8:
        raise ValueError(f"{name} is of type {found.dtype}")
    # A copy in the order of this machine: the bytes of a message cannot be written to.
    return torch.from_numpy(np.array(found, dtype=found.dtype.newbyteorder("=")))


def pack(facts: Mapping[str, Any], **records: ArrayRecord | MetricRecord) -> RecordDict:
    """A message: what it is about, and its arrays and metrics by name."""
    return RecordDict({FACTS: ConfigRecord({FACTS: json.dumps(facts)}), **records})


def facts_of(content: RecordDict) -> dict[str, Any]:
    """What a message is about."""
    found = content.config_records.get(FACTS)
    try:
        read = json.loads(str(found[FACTS])) if found is not None and FACTS in found else None
    except RecursionError:  # lists in lists in lists
        read = None
    if not isinstance(read, dict):
        raise ValueError("the message does not say what it is about")
    return read


def tensors_of(content: RecordDict, name: str) -> Values:
    """The tensors of a message under a name; none where there is no such record."""
    record = content.array_records.get(name)
    return {} if record is None else tensors(record)


def metrics_of(content: RecordDict, name: str) -> dict[str, float]:
    """The numbers of a message under a name; none where there is no such record."""
    record = content.metric_records.get(name)
    return {} if record is None else {key: _number(key, value) for key, value in record.items()}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    return value


def metrics(numbers: Mapping[str, float]) -> MetricRecord:
    return MetricRecord(dict(numbers))

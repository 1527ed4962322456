"""A source divided among clients: each client's training, validation and test rows, and the tensors they point into."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tailorfl.data.atomic import whole_file
from tailorfl.data.holdout import class_counts, draw_tests, fraction_sizes, hold_out
from tailorfl.data.partition import Lists, PartitionOptions, Rows, divide, settle
from tailorfl.data.ragged import Ragged
from tailorfl.data.reason import reason
from tailorfl.data.source import AS_IT_IS, Kind, Reading, Source, labels_of
from tailorfl.errors import UserError
from tailorfl.seeding import generator

Split = Literal["train", "validation", "test"]
Metric = Literal["voc07", "coco"]
FORMAT = "tailorfl partition 1"
CHOSEN = ("new_clients", "joining_clients")  # lists of clients in a partition's file
CHUNK = 256  # images whose mean and deviation are computed at once: they should fit in the processor's cache


@dataclass(frozen=True)
class Partition:
    """Who has which rows of a source; without the rows themselves."""

    source: str
    rows: int  # of the source
    names: tuple[str, ...]
    train: Ragged
    validation: Ragged
    test: Ragged
    new_clients: tuple[int, ...] = ()
    joining_clients: tuple[int, ...] = ()


@dataclass(frozen=True)
class FederatedData:
    """The data of a federation: one copy of all inputs, and for each client and purpose the rows it may use."""

    source: str
    kind: Kind
    inputs: Tensor
    targets: Tensor
    classes: tuple[str, ...]
    names: tuple[str, ...]  # of the clients: the owners' names, else "0" to "N-1"
    train: Ragged  # indices into inputs; these stay on the CPU
    validation: Ragged
    test: Ragged
    new_clients: tuple[int, ...] = ()  # held out of training altogether
    joining_clients: tuple[int, ...] = ()  # there from a later round on
    mean: Tensor | None = None  # of images, a channel, in units of 0 to 1, over the source's training rows
    std: Tensor | None = None
    vectors: Tensor | None = None
    vocabulary: tuple[str, ...] = ()
    reading: Reading = AS_IT_IS
    metric: Metric = "voc07"  # of detectors: which mean average precision
    # A federation of groups: the data of each, with all clients, of whom only the group's own have rows. The whole has
    # the classes of the largest group and one of its inputs, for the form; a client's rows are rows of its own group's.
    groups: tuple["FederatedData", ...] = ()
    group_of: tuple[int, ...] = ()

    def of(self, client: int) -> "FederatedData":
        """The data that a client's rows are rows of."""
        return self.groups[self.group_of[client]] if self.groups else self

    @property
    def clients(self) -> int:
        return len(self.names)

    @property
    def regression(self) -> bool:
        return not self.classes

    @property
    def detection(self) -> bool:
        """Whether the targets are objects, [M, N, 6], see ``tailorfl.data.objects``."""
        return self.targets.ndim == 3

    @cached_property
    def labels(self) -> Tensor:
        """int64 [M], one class a row: of an image with objects that of the largest; a regression has one class."""
        return labels_of(self.targets, self.classes)

    @property
    def num_classes(self) -> int:
        """0 for a regression."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    def rows(self, split: Split) -> Ragged:
        return {"train": self.train, "validation": self.validation, "test": self.test}[split]

    def with_rows(self, rows: Callable[[Split], Ragged]) -> "FederatedData":
        """The same with other rows for each purpose."""
        return replace(self, train=rows("train"), validation=rows("validation"), test=rows("test"))

    def label_counts(self, split: Split = "train") -> Tensor:
        """int64 [clients, classes]; a single column for a regression."""
        if self.groups:
            wide = [group.label_counts(split) for group in self.groups]
            most = max(counts.shape[1] for counts in wide)
            return torch.stack([F.pad(counts, (0, most - counts.shape[1])) for counts in wide]).sum(0)
        labels = self.labels.cpu().numpy()
        return torch.from_numpy(class_counts(self.rows(split), labels, max(self.num_classes, 1)))

    def decode(self, rows: Tensor) -> Tensor:
        """Gathered inputs as a network takes them: uint8 images become normalized floats, all else stays."""
        if self.mean is None or self.std is None:
            return rows
        scale, shift = self._pixels
        return torch.addcmul(shift, rows.to(scale.dtype), scale)

    def same_rows(self, other: "FederatedData") -> bool:
        """Whether a row of the one is the same, as a network takes it, in the other, whoever may use it."""
        mine, theirs = ((one.inputs, one.targets, one.mean, one.std) for one in (self, other))
        return (self.kind, self.classes) == (other.kind, other.classes) and all(map(_same, mine, theirs))

    def in_unit_pixels(self) -> "FederatedData":
        """The same with pixels from 0 to 1 as they are, not standardized."""
        if self.mean is None or self.std is None:
            raise UserError(f"pixels=unit: {self.source} has no images; allowed: standard")
        groups = tuple(group.in_unit_pixels() for group in self.groups)
        return replace(self, mean=torch.zeros_like(self.mean), std=torch.ones_like(self.std), groups=groups)

    @cached_property
    def _pixels(self) -> tuple[Tensor, Tensor]:
        """(pixel / 255 - mean) / std as pixel * scale + shift."""
        assert self.mean is not None
        assert self.std is not None
        return (1 / (255 * self.std)).view(-1, 1, 1), (-self.mean / self.std).view(-1, 1, 1)

    def to(self, device: torch.device | str) -> "FederatedData":
        """With inputs, targets, mean and deviation on the device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            mean=None if self.mean is None else self.mean.to(device),
            std=None if self.std is None else self.std.to(device),
            groups=tuple(group.to(device) for group in self.groups),
        )

    def partition(self) -> Partition:
        """Who has which rows, to be saved."""
        rows = sum(len(part.inputs) for part in self.groups or (self,))
        lists = (self.train, self.validation, self.test)
        return Partition(self.source, rows, self.names, *lists, self.new_clients, self.joining_clients)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and (one.data_ptr() == other.data_ptr() or torch.equal(one, other))


def federate(source: Source, options: PartitionOptions, seed: int) -> FederatedData:
    """Divide a source among clients. Only its training rows are divided; all is determined by the seed."""
    _check_fractions(options)
    labels = source.labels.numpy()
    rows = _training_rows(source, labels)
    division = settle(rows, options)
    lists = divide(rows, division, generator(seed, "partition"))
    train, test = _tests(source, labels, Ragged.from_lists(lists), options, division.partition, seed)
    sizes = fraction_sizes(train.counts.numpy(), options.validation_fraction)
    classes = max(len(source.classes), 1)
    train, validation = hold_out(train, labels, classes, sizes, generator(seed, "validation"))
    names = _names(source, division.partition == "natural", lists)
    new = _choose_new_clients(options.new_clients, len(lists), seed)
    late = _choose_joining_clients(options.joining_clients, new, len(lists), seed)
    return assemble(source, Partition(source.name, len(labels), names, train, validation, test, new, late))


def assemble(source: Source, partition: Partition) -> FederatedData:
    """The data of a federation from a source and a partition of it, new or loaded."""
    if (partition.source, partition.rows) != (source.name, len(source.inputs)):
        raise UserError(
            f"the partition is of data={partition.source} with {partition.rows} rows, "
            f"not of data={source.name} with {len(source.inputs)}"
        )
    mean, std = _pixel_statistics(source.inputs[: source.train_size]) if source.kind == "image" else (None, None)
    return FederatedData(
        source=source.name,
        kind=source.kind,
        inputs=source.inputs,
        targets=source.targets,
        classes=source.classes,
        names=partition.names,
        train=partition.train,
        validation=partition.validation,
        test=partition.test,
        new_clients=partition.new_clients,
        joining_clients=partition.joining_clients,
        mean=mean,
        std=std,
        vectors=source.vectors,
        vocabulary=source.vocabulary,
        reading=source.reading,
        metric="coco" if source.name.startswith("coco:") else "voc07",
    )


def save_partition(data: FederatedData | Partition, path: Path) -> None:
    """Write who has which rows as a safetensors file."""
    partition = data.partition() if isinstance(data, FederatedData) else data
    tensors = {name: torch.tensor(getattr(partition, name), dtype=torch.int64) for name in CHOSEN}
    for split in ("train", "validation", "test"):
        ragged: Ragged = getattr(partition, split)
        tensors |= {f"{split}.index": ragged.index.contiguous(), f"{split}.offsets": ragged.offsets}
    # One entry of metadata: safetensors writes several in no fixed order, and equal partitions should be equal files.
    facts = {"format": FORMAT, "source": partition.source, "rows": partition.rows, "names": partition.names}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, {"partition": json.dumps(facts)})


def load_partition(path: Path) -> Partition:
    """Read what ``save_partition`` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("partition", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (the file is no dict)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"the partition {path} cannot be read: {reason(error)}") from error
    if facts.get("format") != FORMAT:
        raise UserError(f"{path} is not a partition; allowed: a file that save_partition wrote")
    splits = {s: Ragged(tensors[f"{s}.index"], tensors[f"{s}.offsets"]) for s in ("train", "validation", "test")}
    new, late = (tuple(tensors[name].tolist()) if name in tensors else () for name in CHOSEN)  # older files lack some
    names = tuple(facts["names"])
    return Partition(facts["source"], facts["rows"], names, **splits, new_clients=new, joining_clients=late)


def _check_fractions(options: PartitionOptions) -> None:
    if not 0 < options.test_fraction < 1:
        raise UserError(f"test_fraction={options.test_fraction:g}, allowed: above 0 and below 1")
    if not 0 <= options.validation_fraction < 1:
        raise UserError(f"validation_fraction={options.validation_fraction:g}, allowed: 0 or more and below 1")
    if options.test_samples_per_client is not None and options.test_samples_per_client < 1:
        raise UserError(f"test_samples_per_client={options.test_samples_per_client}, allowed: at least 1")


def _training_rows(source: Source, labels: np.ndarray) -> Rows:
    """What the partition may look at."""
    owner = None if source.owner is None else source.owner[: source.train_size].numpy()
    known = None if source.regression else labels[: source.train_size]
    return Rows(source.train_size, known, owner, source.detection)


def _names(source: Source, natural: bool, lists: Lists) -> tuple[str, ...]:
    if natural and source.owner is not None:
        return tuple(source.owners[int(source.owner[int(own[0])])] for own in lists)
    return tuple(map(str, range(len(lists))))


def _tests(
    source: Source, labels: np.ndarray, train: Ragged, options: PartitionOptions, partition: str, seed: int
) -> tuple[Ragged, Ragged]:
    """What stays for training, and the test rows: from the source's own test set, else from each client's rows."""
    rng, wanted, classes = generator(seed, "test"), options.test_samples_per_client, max(len(source.classes), 1)
    if source.test_size and source.detection and partition == "iid" and not wanted:
        # All of them: in proportion to the labels, a rare one would cut off most, and an image is of many classes.
        everything = np.arange(source.train_size, len(labels))
        return train, Ragged.from_lists([everything] * len(train.counts))
    if source.test_size and partition != "natural":
        test = draw_tests(class_counts(train, labels, classes), labels[source.train_size :], wanted, rng)
        return train, Ragged(test.index + source.train_size, test.offsets)
    counts = train.counts.numpy()
    sizes = np.minimum(wanted, np.maximum(counts - 1, 0)) if wanted else fraction_sizes(counts, options.test_fraction)
    return hold_out(train, labels, classes, sizes, rng)


def _choose_new_clients(number: int, clients: int, seed: int) -> tuple[int, ...]:
    if not 0 <= number < clients:
        raise UserError(f"new_clients={number} of {clients} clients, allowed: 0 to {clients - 1}")
    chosen = generator(seed, "new-clients").permutation(clients)[:number]
    return tuple(sorted(map(int, chosen)))


def _choose_joining_clients(number: int, new: tuple[int, ...], clients: int, seed: int) -> tuple[int, ...]:
    others = sorted(set(range(clients)) - set(new))
    if not 0 <= number < len(others):
        beside = f", {len(new)} of them new clients" if new else ""
        allowed = f"0 to {len(others) - 1}, so that somebody trains from the first round on"
        raise UserError(f"joining_clients={number} of {clients} clients{beside}; allowed: {allowed}")
    chosen = generator(seed, "joining-clients").permutation(others)[:number]
    return tuple(sorted(map(int, chosen)))


def _pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel in units of 0 to 1; a constant channel has deviation 1."""
    total = torch.zeros(images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for chunk in images.split(CHUNK):
        values = chunk.flatten(2).float()
        total += values.sum(2).sum(0, dtype=torch.float64)
        squares += values.square().sum(2).sum(0, dtype=torch.float64)
    number = images[:, 0].numel()
    mean = total / number
    std = (squares / number - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std > 0, std, torch.full_like(std, 255.0))
    return (mean / 255).float(), (std / 255).float()

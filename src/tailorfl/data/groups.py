"""Federations of groups: clients whose images differ in size, and who have other classes, or data of other sources."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from tailorfl.data.federated import FederatedData, Partition, Split, assemble, federate
from tailorfl.data.objects import counting, renumbered
from tailorfl.data.partition import PartitionOptions
from tailorfl.data.ragged import Ragged
from tailorfl.data.resizing import resized
from tailorfl.data.source import Source
from tailorfl.errors import UserError
from tailorfl.seeding import derive, generator


class Group(BaseModel):
    """Clients that are alike. What is not set is as for the whole experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clients: int = Field(ge=1)
    name: str | None = None  # its data, pixels and classes by default
    data: str | None = None
    image_size: int | None = Field(None, ge=1, le=4096)
    classes: int | tuple[int, ...] | None = None  # the first so many of the source, or their numbers; all by default
    partition: str | None = None
    classes_per_client: int | None = None
    alpha: float | None = None
    samples_per_client: int | None = None
    stages: int | None = Field(None, ge=1)  # of its network, where these do not follow from its image size

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict | Group):
            raise ValueError("allowed: groups such as {clients: 4, image_size: 16, classes: 10}")
        unknown = [key for key in given if key not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(f"a group has no {unknown[0]!r}; allowed: {', '.join(cls.model_fields)}")
        return given

    def options(self, common: PartitionOptions) -> PartitionOptions:
        """How the group's rows are divided among its clients."""
        own = {name: getattr(self, name) for name in PartitionOptions.model_fields if hasattr(self, name)}
        return common.model_copy(update={name: value for name, value in own.items() if value is not None})


def federate_groups(
    groups: Sequence[Group],
    read: Callable[[str], Source],
    options: PartitionOptions,
    seed: int,
    partition: Partition | None = None,
) -> FederatedData:
    """The federation of these groups; groups with the same source have training rows of their own.

    Each group names its source, which is given to ``read`` once for all of them. ``partition`` says who has which rows,
    where that was decided before.
    """
    sources = sources_of(groups, read, seed)
    names = _names(groups, sources)
    if partition is None:
        seeds = [derive(seed, "group", number) for number in range(len(groups))]
        parts = [
            federate(source, group.options(options), group_seed)
            for group, source, group_seed in zip(groups, sources, seeds, strict=True)
        ]
        partition = _joined(names, parts)
    group_of = tuple(number for number, group in enumerate(groups) for _ in range(group.clients))
    found = (" + ".join(names), len(group_of), sum(len(source.inputs) for source in sources))
    if found != (partition.source, len(partition.names), partition.rows):
        raise UserError(f"the partition is of {partition.source}, with other clients or rows than the groups have")
    views = [
        replace(assemble(source, _own_part(partition, source, number, group_of)), source=name)
        for number, (source, name) in enumerate(zip(sources, names, strict=True))
    ]
    largest = max(views, key=lambda view: (view.input_shape[-1], view.num_classes))
    return replace(
        largest,
        source=partition.source,
        inputs=largest.inputs[:1],
        targets=largest.targets[:1],
        train=partition.train,
        validation=partition.validation,
        test=partition.test,
        groups=tuple(views),
        group_of=group_of,
    )


def sources_of(groups: Sequence[Group], read: Callable[[str], Source], seed: int) -> list[Source]:
    """What each group's rows are taken from: its images at its size, of its classes, that no other group trains on."""
    known = {name: read(str(name)) for name in dict.fromkeys(group.data for group in groups)}
    found = [known[group.data] for group in groups]
    if len({source.detection for source in found}) > 1:
        raise UserError("groups: some have objects in images and some have classes; allowed: one of the two")
    for group, source in zip(groups, found, strict=True):
        _check(group, source)
    taken = _dealt(groups, found, seed)
    return [
        resized(_restricted(source, rows, _classes(group, source)), group.image_size)
        for group, source, rows in zip(groups, found, taken, strict=True)
    ]


def _check(group: Group, source: Source) -> None:
    chosen = _classes(group, source)
    if source.kind != "image" or source.regression:
        raise UserError(f"groups: {source.name} has no images with classes; allowed: sources of images")
    if len(chosen) < 2 and not (source.detection and chosen):  # one class can be told from the background
        raise UserError(f"groups: classes={group.classes}: a client needs something to tell apart; allowed: 2 or more")
    if len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) >= len(source.classes):
        allowed = f"2 to {len(source.classes)}, or different numbers from 0 to {len(source.classes) - 1}"
        raise UserError(f"groups: classes={group.classes} of {source.name}; allowed: {allowed}")


def _classes(group: Group, source: Source) -> tuple[int, ...]:
    if group.classes is None:
        return tuple(range(len(source.classes)))
    return tuple(range(group.classes)) if isinstance(group.classes, int) else group.classes


def _dealt(groups: Sequence[Group], sources: Sequence[Source], seed: int) -> list[np.ndarray]:
    """The training rows of each group: those of a class are dealt to the groups that have it, by their clients.

    An image with objects is of the class of the largest, and goes to a group that has the class of any of them.
    """
    rows: list[list[np.ndarray]] = [[] for _ in groups]
    for name in dict.fromkeys(group.data for group in groups):
        alike = [number for number, group in enumerate(groups) if group.data == name]
        source = sources[alike[0]]
        useful = np.stack([_useful(source, _classes(groups[number], source)) for number in alike])
        labelled = np.concatenate([source.labels.numpy()[None], useful])[:, : source.train_size]
        kinds, kind = np.unique(labelled, axis=1, return_inverse=True)
        rng = generator(seed, "groups", str(name))
        for which, (_, *takers) in enumerate(kinds.T.tolist()):
            having = [number for number, takes in zip(alike, takers, strict=True) if takes]
            shares = np.cumsum([groups[number].clients for number in having])
            members = rng.permutation(np.flatnonzero(kind.reshape(-1) == which))
            if having:
                cuts = np.rint(len(members) * shares[:-1] / shares[-1]).astype(int)
                for number, own in zip(having, np.split(members, cuts), strict=True):
                    rows[number].append(own)
    return [np.sort(np.concatenate([np.empty(0, np.int64), *own])) for own in rows]


def _numbers(source: Source, classes: tuple[int, ...]) -> Tensor:
    """The new number of each class, -1 for those that are left out."""
    number = torch.full((len(source.classes),), -1)
    number[list(classes)] = torch.arange(len(classes))
    return number


def _useful(source: Source, classes: tuple[int, ...]) -> np.ndarray:
    """Which rows have something of these classes: booleans [rows]."""
    number = _numbers(source, classes)
    if source.detection:
        return counting(renumbered(source.targets, number)).any(-1).numpy()
    return number[source.targets].ge(0).numpy()


def _restricted(source: Source, train: np.ndarray, classes: tuple[int, ...]) -> Source:
    """Some training rows, and the test rows of some classes, with these classes numbered anew."""
    number = _numbers(source, classes)
    tests = np.arange(source.train_size, len(source.inputs))
    if len(classes) < len(source.classes):  # else images without an object stay: in them nothing should be found
        tests = tests[_useful(source, classes)[source.train_size :]]
    rows = torch.from_numpy(np.concatenate([train, tests]))
    return replace(
        source,
        inputs=source.inputs[rows],
        targets=renumbered(source.targets[rows], number) if source.detection else number[source.targets[rows]],
        train_size=len(train),
        classes=tuple(source.classes[label] for label in classes),
        owner=None,
        owners=(),
    )


def _names(groups: Sequence[Group], sources: Sequence[Source]) -> list[str]:
    """Short, and different: the source, the pixels and the classes of each group."""
    names = [
        group.name or f"{source.name}-{source.inputs.shape[-1]}px-{len(source.classes)}"
        for group, source in zip(groups, sources, strict=True)
    ]
    if len(set(names)) < len(names):
        numbered = enumerate(zip(groups, names, strict=True))
        names = [group.name or f"{name}-{number}" for number, (group, name) in numbered]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"groups: two are called {twice[0]!r}; allowed: different names")
    return names


def _joined(names: Sequence[str], parts: Sequence[FederatedData]) -> Partition:
    """All clients, one group after the other; a client's rows are those of its group's source."""
    starts = np.cumsum([0, *(part.clients for part in parts)])
    everyone = [(name, part, client) for name, part in zip(names, parts, strict=True) for client in range(part.clients)]

    def rows(split: Split) -> Ragged:
        return Ragged.from_lists([part.rows(split).of(client).numpy() for _, part, client in everyone])

    def numbered(chosen: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(int(start) + client for start, own in zip(starts, chosen, strict=False) for client in own)

    return Partition(
        source=" + ".join(names),
        rows=sum(len(part.inputs) for part in parts),
        names=tuple(f"{name}/{client}" for name, _, client in everyone),
        train=rows("train"),
        validation=rows("validation"),
        test=rows("test"),
        new_clients=numbered([part.new_clients for part in parts]),
        joining_clients=numbered([part.joining_clients for part in parts]),
    )


def _own_part(partition: Partition, source: Source, number: int, group_of: Sequence[int]) -> Partition:
    """The same clients, of whom only those of one group have rows."""
    there = torch.tensor(group_of) == number

    def own(ragged: Ragged) -> Ragged:
        return ragged.select(there[ragged.client])

    return replace(
        partition,
        source=source.name,
        rows=len(source.inputs),
        train=own(partition.train),
        validation=own(partition.validation),
        test=own(partition.test),
    )

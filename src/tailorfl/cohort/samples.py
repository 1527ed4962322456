"""The samples of a cohort as padded tables, and the batches that are looked up in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from tailorfl.cohort.objective import Batch
from tailorfl.cohort.schedule import Schedule
from tailorfl.data.augment import Augmentation
from tailorfl.data.federated import FederatedData
from tailorfl.models.network import Values


@dataclass(frozen=True)
class Samples:
    """Samples of a cohort: for each client its rows of the pool, padded to the longest."""

    data: FederatedData
    rows: Tensor  # int64 [clients, longest]
    counts: Tensor  # int64 [clients]
    weights: Tensor | None = None  # [clients, longest], one weight a sample
    inputs: Tensor | None = None  # [clients, longest, ...], instead of the pool's inputs (cached features)
    augmentation: Augmentation | None = None  # of the samples in order, by ``draws``
    draws: Values = field(default_factory=dict)  # [clients, longest], the numbers of one augmentation of each sample

    @property
    def real(self) -> Tensor:
        """Which places of the table hold a sample, not padding: booleans [clients, longest]."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.counts[:, None]

    def lay_out(self, schedule: Schedule, dtype: torch.dtype) -> "Batches":
        """Everything about the schedule's batches but their inputs, looked up once for all steps."""
        at = schedule.positions.clamp(min=0)
        rows = self.rows.expand(len(at), *self.rows.shape).gather(2, at)
        valid = (schedule.positions >= 0).to(dtype)
        weight = valid
        if self.weights is not None:
            weight = valid * self.weights.to(dtype).expand(len(at), *self.weights.shape).gather(2, at)
        found = rows if self.inputs is None else at
        own = {name: numbers.expand(len(at), *numbers.shape).gather(2, at) for name, numbers in self.draws.items()}
        draws = schedule.draws or own
        return Batches(found, self.data.targets[rows], valid, weight, valid.sum(2).clamp(min=1), draws)

    def in_order(self, size: int) -> Iterator[Batch]:
        """All samples in their own order, ``size`` of each client at a time."""
        for start in range(0, self.rows.shape[1], size):
            rows = self.rows[:, start : start + size]
            draws = {name: numbers[:, start : start + size] for name, numbers in self.draws.items()}
            raw, targets = self.data.inputs[rows], self.data.targets[rows]
            inputs, targets = decoded(self.data, raw, targets, self.augmentation, draws)
            valid = self.real[:, start : start + size].to(_floating(inputs))
            weight = valid if self.weights is None else valid * self.weights[:, start : start + size]
            yield Batch(inputs, targets, valid, weight, valid.sum(1).clamp(min=1))

    def subset(self, chosen: Tensor) -> "Samples":
        """The samples of each client that are chosen, booleans [clients, longest], in their own order."""
        chosen = chosen & self.real
        order = chosen.logical_not().to(torch.int8).argsort(dim=1, stable=True)
        clients = torch.arange(len(order), device=order.device)[:, None]
        return replace(
            self,
            rows=self.rows[clients, order],
            counts=chosen.sum(1),
            weights=None if self.weights is None else self.weights[clients, order],
            inputs=None if self.inputs is None else self.inputs[clients, order],
            draws={name: numbers[clients, order] for name, numbers in self.draws.items()},
        )

    def of(self, clients: slice) -> "Samples":
        """The same for some of the clients."""
        return replace(
            self,
            rows=self.rows[clients],
            counts=self.counts[clients],
            weights=None if self.weights is None else self.weights[clients],
            inputs=None if self.inputs is None else self.inputs[clients],
            draws={name: numbers[clients] for name, numbers in self.draws.items()},
        )

    def first(self, number: int) -> "Samples":
        """Not more than so many samples of each client: the table without what is padding for all."""
        return replace(
            self,
            rows=self.rows[:, :number],
            weights=None if self.weights is None else self.weights[:, :number],
            inputs=None if self.inputs is None else self.inputs[:, :number],
            draws={name: numbers[:, :number] for name, numbers in self.draws.items()},
        )


@dataclass(frozen=True)
class Batches:
    """The batches of a cohort, step by step, [steps, clients, size]; the inputs are looked up when a step runs."""

    found: Tensor  # int64: rows of the pool, or positions in the cached inputs
    targets: Tensor
    valid: Tensor
    weight: Tensor
    size: Tensor  # [steps, clients]
    draws: Values  # numbers for the augmentation

    def tensors(self) -> Values:
        named = {name: getattr(self, name) for name in ("found", "targets", "valid", "weight", "size")}
        return named | {f"draw {name}": numbers for name, numbers in self.draws.items()}

    def at(self, step: Tensor, width: int) -> "Batches":
        """One step of the first clients, [width, size]; the step is a tensor, so that a CUDA graph can advance it."""

        at = None if step.device.type == "cuda" else int(step)
        if len(self.found) == 1:  # the batch that is everything is laid out once, for all steps
            at = 0

        def pick(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, step)[0, :width] if at is None else tensor[at, :width]

        draws = {name: pick(numbers) for name, numbers in self.draws.items()}
        valid = pick(self.valid)
        weight = valid if self.weight is self.valid else pick(self.weight)
        return Batches(pick(self.found), pick(self.targets), valid, weight, pick(self.size), draws)


def decoded(
    data: FederatedData, raw: Tensor, targets: Tensor, augmentation: Augmentation | None, draws: Values
) -> tuple[Tensor, Tensor]:
    """Inputs as a network takes them, augmented before, and their targets: boxes follow their images."""
    if augmentation and data.detection:
        raw, targets = augmentation.apply_with_boxes(raw, targets, draws)
    elif augmentation:
        raw = augmentation.apply(raw, draws)
    return data.decode(raw), targets


def pad_rows(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index lists as one table, [clients, longest], and their lengths."""
    counts = torch.tensor([len(row) for row in rows])
    table = torch.zeros(len(rows), max(1, int(counts.max())), dtype=torch.int64)
    for client, row in enumerate(rows):
        table[client, : len(row)] = row
    return table.to(device), counts.to(device)


def like_sizes(counts: Sequence[int], times: int) -> list[slice]:
    """Clients, from large to small, in parts in which none has more than so many times as much data as another."""
    starts = [0]
    for row, count in enumerate(counts):
        if times * count < counts[starts[-1]]:
            starts.append(row)
    return [slice(*ends) for ends in pairwise([*starts, len(counts)])]


def _floating(inputs: Tensor) -> torch.dtype:
    return inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()

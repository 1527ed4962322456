"""Which samples of which client make up which batch: drawn for each client alone, laid out for the stack."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tailorfl.data.augment import Augmentation
from tailorfl.seeding import derive, generator

Stream = tuple[int, *tuple[str | int, ...]]
"""A random stream's name: the run's seed, then the purpose."""


@dataclass(frozen=True)
class Schedule:
    """Batches of a cohort, step by step. Positions count within a client's own samples; -1 is padding."""

    positions: Tensor  # int64 [steps, clients, batch]
    draws: dict[str, Tensor]  # numbers for the augmentation, [steps, clients, batch]; empty where samples have theirs
    steps: Tensor  # int64 [clients], how many steps each client takes; never increasing along the cohort
    seeds: tuple[int, ...] = ()  # one for each client, for layers that draw numbers themselves (dropout)
    whole: bool = False  # every batch is all that a client has, in its own order: laid out once, for all steps

    def to(self, device: torch.device) -> "Schedule":
        draws = {name: numbers.to(device) for name, numbers in self.draws.items()}
        return Schedule(self.positions.to(device), draws, self.steps.to(device), self.seeds, self.whole)


def mini_batches(
    counts: Sequence[int],
    batch_size: int,
    epochs: int | None,
    steps: int | None,
    streams: Sequence[Stream],
    augmentation: Augmentation | None,
) -> Schedule:
    """Shuffled epochs (or a fixed number of steps) for clients with these sample counts, largest first.

    ``batch_size`` 0 means the full batch. ``streams`` names each client's random stream: what a client draws does not
    depend on who else is in the cohort.
    """
    if any(small < large for small, large in pairwise(counts)):
        raise ValueError(f"a cohort runs from large to small clients, not {list(counts)}")
    size = min(batch_size or max(counts), max(counts))
    seeds = tuple(derive(*stream, "layers") for stream in streams)
    if not batch_size and not augmentation:
        passes = epochs if steps is None else steps
        taken = torch.tensor([passes if count else 0 for count in counts])
        return Schedule(_in_order(counts, size), {}, taken, seeds, whole=True)
    rngs = [generator(*stream) for stream in streams]
    orders = [_order(count, size, epochs, steps, rng) for count, rng in zip(counts, rngs, strict=True)]
    taken = torch.tensor([len(order) for order in orders])
    positions = np.full((int(taken.max()), len(counts), size), -1, dtype=np.int64)
    for client, order in enumerate(orders):
        positions[: len(order), client] = order
    draws = _draws(augmentation, orders, positions.shape, rngs) if augmentation else {}
    return Schedule(torch.from_numpy(positions), draws, taken, seeds)


def _in_order(counts: Sequence[int], size: int) -> Tensor:
    """The one batch that is everything, [1, clients, size]."""
    positions = torch.arange(size).expand(1, len(counts), size)
    return positions.where(positions < torch.tensor(counts)[:, None], -1)


def _order(count: int, size: int, epochs: int | None, steps: int | None, rng: np.random.Generator) -> np.ndarray:
    """One client's batches, [steps, size]: every epoch a new permutation, the last short batch padded with -1."""
    if count == 0:
        return np.empty((0, size), dtype=np.int64)
    each = -(-count // size)
    passes = epochs if steps is None else -(-steps // each)
    assert passes is not None
    order = np.full((passes, each * size), -1, dtype=np.int64)
    order[:, :count] = rng.permuted(np.tile(np.arange(count), (passes, 1)), axis=1)
    return order.reshape(passes * each, size)[:steps]


def _draws(
    augmentation: Augmentation,
    orders: Sequence[np.ndarray],
    shape: tuple[int, ...],
    rngs: Sequence[np.random.Generator],
) -> dict[str, Tensor]:
    laid: dict[str, np.ndarray] = {}
    for client, (order, rng) in enumerate(zip(orders, rngs, strict=True)):
        real = order >= 0  # draw for real samples only: how far a batch is padded depends on the cohort
        for name, numbers in augmentation.draw(rng, int(real.sum())).items():
            laid.setdefault(name, np.zeros(shape, dtype=numbers.dtype))
            laid[name][: len(order), client][real] = numbers
    return {name: torch.from_numpy(numbers) for name, numbers in laid.items()}

"""Validation and test sets: held out of a client's rows, or drawn from a test set in the client's class proportions."""

import numpy as np
import torch

from tailorfl.data.ragged import Ragged


def class_counts(rows: Ragged, labels: np.ndarray, classes: int) -> np.ndarray:
    """int64 [clients, classes]: how many of a client's rows are of a class."""
    cell = rows.client.numpy() * classes + labels[rows.index.numpy()]
    return np.bincount(cell, minlength=len(rows) * classes).reshape(len(rows), classes)


def apportion(weights: np.ndarray, totals: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each row's total divided over its columns in proportion to its integer weights.

    Largest remainders, ties at random. No column gets more than its share rounded up, nor anything for weight 0.
    """
    weighed = totals[:, None] * weights
    whole = np.maximum(weights.sum(axis=1, keepdims=True), 1)
    counts, remainders = weighed // whole, weighed % whole
    order = np.lexsort((rng.random(weights.shape), -remainders), axis=1)
    place = order.argsort(axis=1)
    return counts + (place < (totals - counts.sum(axis=1))[:, None])


def fraction_sizes(counts: np.ndarray, fraction: float) -> np.ndarray:
    """How many of each client's rows are held out: at least one, and one is left; none of a single row."""
    if fraction == 0:
        return np.zeros_like(counts)
    sizes = np.floor(counts * fraction + 0.5).astype(np.int64)
    return np.where(counts < 2, 0, sizes.clip(1, np.maximum(counts - 1, 1)))


def hold_out(
    rows: Ragged, labels: np.ndarray, classes: int, sizes: np.ndarray, rng: np.random.Generator
) -> tuple[Ragged, Ragged]:
    """The rows that stay and the sizes[i] rows of each client that are held out, stratified by class."""
    taken = apportion(class_counts(rows, labels, classes), sizes, rng)
    cell = rows.client.numpy() * classes + labels[rows.index.numpy()]
    order = np.lexsort((rng.random(len(cell)), cell))
    first = np.searchsorted(cell[order], cell[order])
    place = np.empty(len(cell), np.int64)
    place[order] = np.arange(len(cell)) - first
    held = torch.from_numpy(place < taken.reshape(-1)[cell])
    return rows.select(~held), rows.select(held)


def draw_tests(counts: np.ndarray, test_labels: np.ndarray, wanted: int | None, rng: np.random.Generator) -> Ragged:
    """Rows of the test set for every client, with the class proportions of its training ``counts``.

    ``wanted`` rows a client, else the test set shared out by the clients' sizes. Where a class has too few rows the
    client gets fewer of all. The rows of a class are dealt in a circle: no client has one twice, all are used evenly.
    """
    supply = np.bincount(test_labels, minlength=counts.shape[1])
    weights = np.where(supply > 0, counts, 0)
    taken = apportion(weights, _test_sizes(counts, weights, supply, wanted), rng)
    order = rng.permutation(len(test_labels))
    order = order[np.argsort(test_labels[order], kind="stable")]
    starts = supply.cumsum() - supply
    index, client = [], []
    for label in np.flatnonzero(supply):
        total = taken[:, label].sum()
        index.append(order[starts[label] + np.arange(total) % supply[label]])
        client.append(np.repeat(np.arange(len(counts)), taken[:, label]))
    return Ragged.from_clients(
        torch.from_numpy(np.concatenate(index)), torch.from_numpy(np.concatenate(client)), len(counts)
    )


def _test_sizes(counts: np.ndarray, weights: np.ndarray, supply: np.ndarray, wanted: int | None) -> np.ndarray:
    own = counts.sum(axis=1)
    sizes = np.full(len(own), wanted) if wanted else np.floor(supply.sum() * own / own.sum() + 0.5).astype(np.int64)
    total = weights.sum(axis=1, keepdims=True)
    # The most that each class allows without changing the proportions.
    limits = np.where(weights > 0, supply * total // np.maximum(weights, 1), np.iinfo(np.int64).max)
    return np.where(total[:, 0] > 0, np.minimum(np.maximum(sizes, 1), limits.min(axis=1)), 0)

"""Divides the training rows of a source among clients: functions from labels to one list of rows a client."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailorfl.errors import UserError

log = logging.getLogger(__name__)

Lists = list[np.ndarray]  # for each client the numbers of its rows, ascending; no row is in two lists
DIRICHLET_TRIES = 20
DEFAULT_CLIENTS = 20


class PartitionOptions(BaseModel):
    """How rows are divided among clients, and each client's rows into training, validation and test."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: str = Field(
        "auto", description="auto: natural where the source names clients, else classes; iid for objects and regression"
    )
    clients: int | None = Field(None, description="number of clients; default 20, natural: all that there are")
    classes_per_client: int = Field(2, description="partitions classes and round-robin")
    shards_per_client: int = Field(2, description="partition shards")
    alpha: float = Field(0.5, description="partition dirichlet: near 0 one class a client, large like iid")
    min_samples: int = Field(10, description="dirichlet: every client has so many; natural: who has fewer is out")
    samples_per_client: int | None = Field(
        None, description="classes: exactly so many rows; else at most; before test rows are split off"
    )
    test_fraction: float = Field(
        0.25, description="of a client's own rows, where the source has no test set of its own"
    )
    test_samples_per_client: int | None = Field(None, description="a fixed number of test rows instead")
    validation_fraction: float = Field(0.0, description="of a client's training rows")
    new_clients: int = Field(0, description="clients that are held out of training altogether")
    joining_clients: int = Field(0, description="clients that join late, in round joining_round")


@dataclass(frozen=True)
class Rows:
    """What a partition may look at."""

    size: int
    labels: np.ndarray | None  # int64 [size] class numbers; None for regression
    owner: np.ndarray | None = None  # int64 [size] natural client numbers
    objects: bool = False  # whether a row has objects of several classes, of which its label is one


@dataclass(frozen=True)
class Division:
    """The options of a partition, settled for one source."""

    partition: str
    clients: int
    classes_per_client: int
    shards_per_client: int
    alpha: float
    min_samples: int
    samples_per_client: int | None


def settle(rows: Rows, options: PartitionOptions) -> Division:
    """Which partition, and how many clients, where the options leave it open."""
    partition = options.partition
    if partition == "auto":
        nameless = "iid" if rows.labels is None or rows.objects else "classes"
        partition = nameless if rows.owner is None else "natural"
    clients = options.clients
    if clients is None and partition == "natural" and rows.owner is not None:
        clients = len(np.unique(rows.owner))
    shared = ("classes_per_client", "shards_per_client", "alpha", "min_samples", "samples_per_client")
    return Division(
        partition, DEFAULT_CLIENTS if clients is None else clients, **{name: getattr(options, name) for name in shared}
    )


def divide(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """Each client's rows, by the partition that the options name."""
    if options.partition not in PARTITIONS:
        raise UserError(f"partition={options.partition} is not known; allowed: auto, {', '.join(PARTITIONS)}")
    for option in ("clients", "classes_per_client", "shards_per_client", "min_samples", "samples_per_client"):
        _at_least(option, getattr(options, option), 1)
    if options.partition != "natural" and options.clients > rows.size:
        raise UserError(
            f"clients={options.clients}: there are {rows.size} training rows; allowed: at most one client each"
        )
    lists = PARTITIONS[options.partition](rows, options, rng)
    most = options.samples_per_client
    return lists if most is None else [np.sort(rng.permutation(own)[:most]) for own in lists]


def by_classes(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """The same number of classes for every client, and of samples of each; all classes are used equally often.

    Without samples_per_client every client gets the largest number of samples a class that the rarest one allows.
    """
    labels, supply = _dense_labels(rows, options)
    dealt = _deal_classes(options.clients, options.classes_per_client, len(supply), rng)
    return _hand_out(labels, _class_counts(dealt, supply, options, rng), rng)


def by_shards(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """Rows in the order of their labels, cut into equal shards; every client gets shards_per_client of them."""
    labels, _ = _dense_labels(rows)
    shards = options.clients * options.shards_per_client
    length = rows.size // shards
    if length == 0:
        most = rows.size // options.clients
        raise UserError(f"shards_per_client={options.shards_per_client}: {rows.size} rows allow at most {most}")
    # The rows that do not fill a shard are left out at random, not always those of the last class.
    kept = rng.permutation(rows.size)[: shards * length]
    kept = kept[np.argsort(labels[kept], kind="stable")]
    client = rng.permutation(np.repeat(np.arange(options.clients), options.shards_per_client))
    assigned = np.full(rows.size, -1)
    assigned[kept] = np.repeat(client, length)
    return _lists(assigned, options.clients)


def by_dirichlet(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """The samples of each class go to the clients in proportions drawn from a symmetric Dirichlet distribution.

    Drawn again while a client has fewer than min_samples; after some tries the largest clients give to the smallest.
    """
    labels, supply = _dense_labels(rows)
    clients, least = options.clients, options.min_samples
    if not 0 < options.alpha < np.inf:
        raise UserError(f"alpha={options.alpha:g}, allowed: a number above 0")
    if rows.size < clients * least:
        raise UserError(
            f"min_samples={least} for clients={clients} needs {clients * least} samples, there are {rows.size}; "
            f"allowed: min_samples up to {rows.size // clients}"
        )
    for _ in range(DIRICHLET_TRIES):
        counts = _dirichlet_counts(supply, clients, options.alpha, rng)
        if counts.sum(axis=1).min() >= least:
            break
    assigned = _assign(labels, counts, rng)
    return _lists(_top_up(assigned, clients, least, rng), clients)


def by_round_robin(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """Random classes for every client; each class's shuffled samples are dealt one by one to the clients that have it.

    PFLEGO, appendix A.2. A class that no client drew takes the place of one that several drew.
    """
    labels, supply = _dense_labels(rows, options)
    clients = options.clients
    order = np.argsort(rng.random((clients, len(supply))), axis=1)
    held = order.argsort(axis=1) < options.classes_per_client
    _cover_classes(held, rng)
    holders = np.maximum(held.sum(axis=0), 1)
    turn = held.cumsum(axis=0) - 1  # a client's place in the round of each class
    counts = np.where(held, supply // holders + (turn < supply % holders), 0)
    if counts.sum(axis=1).min() == 0:
        raise UserError(
            f"clients={clients}: a class of {supply.min()} samples is not enough for the {holders.max()} clients that "
            "have it; allowed: fewer clients or more classes_per_client"
        )
    return _hand_out(labels, counts, rng)


def iid(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """Shuffled and dealt: every client has the same distribution, sizes differ by one at most."""
    assigned = np.empty(rows.size, np.int64)
    assigned[rng.permutation(rows.size)] = np.arange(rows.size) % options.clients
    return _lists(assigned, options.clients)


def natural(rows: Rows, options: Division, rng: np.random.Generator) -> Lists:
    """The clients that the source names, in its order, without those that have fewer than min_samples.

    At most ``clients`` of them: a random choice if there are more, all if there are fewer.
    """
    if rows.owner is None:
        others = ", ".join(name for name in PARTITIONS if name != "natural")
        raise UserError(f"partition=natural: the source names no clients (tables: client_column); allowed: {others}")
    sizes = np.bincount(rows.owner)
    eligible = np.flatnonzero(sizes >= options.min_samples)
    if not len(eligible):
        raise UserError(
            f"min_samples={options.min_samples}: the largest natural client has {sizes.max()} samples; "
            f"allowed: min_samples up to {sizes.max()}, or another partition"
        )
    chosen = np.sort(rng.permutation(eligible)[: options.clients])
    there = np.count_nonzero(sizes)
    if len(chosen) < there:
        few = f"{there - len(eligible)} have fewer than min_samples={options.min_samples} samples"
        log.info("%d of %d natural clients take part: %s, clients=%d", len(chosen), there, few, options.clients)
    client = np.full(len(sizes), -1)
    client[chosen] = np.arange(len(chosen))
    return _lists(client[rows.owner], len(chosen))


PARTITIONS: dict[str, Callable[[Rows, Division, np.random.Generator], Lists]] = {
    "classes": by_classes,
    "shards": by_shards,
    "dirichlet": by_dirichlet,
    "round-robin": by_round_robin,
    "iid": iid,
    "natural": natural,
}


def _at_least(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{option}={value}, allowed: at least {least}")


def _dense_labels(rows: Rows, options: Division | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Labels numbered over the classes that have rows, and the supply of each; checks classes_per_client if given."""
    if rows.labels is None:
        raise UserError("this partition needs class labels and the source is a regression; allowed: iid, natural")
    _, labels, supply = np.unique(rows.labels, return_inverse=True, return_counts=True)
    if options and options.classes_per_client > len(supply):
        raise UserError(f"classes_per_client={options.classes_per_client}: the source has {len(supply)} classes")
    return labels, supply


def _lists(assigned: np.ndarray, clients: int) -> Lists:
    """Each client's rows from the client of each row (-1: nobody's)."""
    order = np.argsort(assigned, kind="stable")
    return np.split(order, np.searchsorted(assigned[order], np.arange(clients + 1)))[1:-1]


def _assign(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The client of each row, where client i gets counts[i, k] random rows of class k."""
    assigned = np.full(len(labels), -1)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    starts = np.searchsorted(labels[order], np.arange(counts.shape[1]))
    for label, start in enumerate(starts):
        takers = np.repeat(np.arange(len(counts)), counts[:, label])
        assigned[order[start : start + len(takers)]] = takers
    return assigned


def _hand_out(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Lists:
    return _lists(_assign(labels, counts, rng), len(counts))


def _deal_classes(clients: int, each: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """bool [clients, classes]: ``each`` distinct classes a client, all classes equally often (give or take one).

    Client after client draws among the classes by how often they are still to be dealt. A class that is still to be
    dealt as often as there are clients left must be taken now; then the dealing always works out.
    """
    left = np.full(classes, clients * each // classes)
    left[rng.permutation(classes)[: clients * each % classes]] += 1
    luck = rng.gumbel(size=(clients, classes))  # log weight plus Gumbel noise: drawing by weight without replacement
    dealt = np.zeros((clients, classes), bool)
    for client in range(clients):
        with np.errstate(divide="ignore"):
            preference = np.where(left == clients - client, np.inf, np.log(left) + luck[client])
        taken = np.argpartition(-preference, each - 1)[:each]
        dealt[client, taken] = True
        left[taken] -= 1
    return dealt


def _class_counts(dealt: np.ndarray, supply: np.ndarray, options: Division, rng: np.random.Generator) -> np.ndarray:
    """Samples a client and class: equal, with what does not divide evenly spread over the client's classes."""
    slots, each, wanted = dealt.sum(axis=0), options.classes_per_client, options.samples_per_client
    most = int((supply[slots > 0] // slots[slots > 0]).min())
    if most == 0:
        raise UserError(
            f"clients={options.clients} with classes_per_client={each} need {slots.max()} samples of a class, "
            f"the rarest has {supply.min()}; allowed: fewer clients or fewer classes_per_client"
        )
    if wanted is None:
        return dealt * most
    quota, rest = divmod(wanted, each)
    if quota == 0:
        raise UserError(f"samples_per_client={wanted} is less than classes_per_client={each}; allowed: at least {each}")
    extra = _spread(dealt, supply - quota * slots, rest, rng) if quota <= most else None
    if extra is None:
        rests = range(1, each)
        fits = bisect_left(rests, True, key=lambda rest: _spread(dealt, supply - most * slots, rest, rng) is None)
        raise UserError(
            f"samples_per_client={wanted} is too many for clients={options.clients} with classes_per_client={each}; "
            f"allowed: at most {most * each + fits}"
        )
    return dealt * quota + extra


def _spread(dealt: np.ndarray, spare: np.ndarray, rest: int, rng: np.random.Generator) -> np.ndarray | None:
    """bool [clients, classes]: one more sample from ``rest`` classes of each client, or None if there is no way."""
    if (spare >= dealt.sum(axis=0)).all():  # any choice will do
        luck = np.where(dealt, rng.random(dealt.shape), -1)
        return (-luck).argsort(axis=1).argsort(axis=1) < rest
    return _flow(dealt, spare, rest)


def _flow(dealt: np.ndarray, spare: np.ndarray, rest: int) -> np.ndarray | None:
    """The same where classes run out: a flow from clients to classes, exact where dealing greedily may get stuck."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = dealt.shape
    client, label = np.nonzero(dealt)
    start, end = 0, clients + classes + 1
    tails = np.concatenate([np.full(clients, start), 1 + client, 1 + clients + np.arange(classes)])
    heads = np.concatenate([1 + np.arange(clients), 1 + clients + label, np.full(classes, end)])
    limits = np.concatenate([np.full(clients, rest), np.ones(len(client), int), spare]).astype(np.int32)
    graph = csr_array((limits, (tails, heads)), shape=(end + 1, end + 1))
    result = maximum_flow(graph, start, end)
    if result.flow_value < clients * rest:
        return None
    return result.flow[1 : clients + 1, clients + 1 : end].toarray() > 0


def _dirichlet_counts(supply: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Samples a client and class, all of the supply."""
    shares = rng.dirichlet(np.full(clients, alpha), size=len(supply))
    cuts = np.rint(shares.cumsum(axis=1) * supply[:, None]).astype(np.int64)
    cuts[:, -1] = supply
    return np.diff(cuts, axis=1, prepend=0).T


def _top_up(assigned: np.ndarray, clients: int, least: int, rng: np.random.Generator) -> np.ndarray:
    """Move random samples from the largest clients until everyone has ``least``."""
    sizes = np.bincount(assigned, minlength=clients)
    short = np.maximum(least - sizes, 0)
    needed = int(short.sum())
    if needed == 0:
        return assigned
    # The highest level to which the large clients can be cut so that what is cut off is enough.
    levels = range(least, int(sizes.max()) + 1)
    level = least - 1 + bisect_left(levels, True, key=lambda level: np.maximum(sizes - level, 0).sum() < needed)
    order = rng.permutation(len(assigned))
    order = order[np.argsort(assigned[order], kind="stable")]
    place = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes, sizes)
    surplus = rng.permutation(order[place >= level])[:needed]
    moved = assigned.copy()
    moved[surplus] = np.repeat(np.arange(clients), short)
    return moved


def _cover_classes(held: np.ndarray, rng: np.random.Generator) -> None:
    """Give each class that nobody has to a client that has one which others have too, while there is such a client."""
    for label in np.flatnonzero(~held.any(axis=0)):
        client, crowded = np.nonzero(held & (held.sum(axis=0) > 1))
        if len(client) == 0:
            return
        chosen = rng.integers(len(client))
        held[client[chosen], crowded[chosen]] = False
        held[client[chosen], label] = True

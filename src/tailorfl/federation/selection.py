"""Who takes part in a round."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailorfl.seeding import generator

Selection = Literal["uniform", "binomial", "per-group"]


@dataclass(frozen=True)
class Latecomers:
    """Clients that join in a later round, and take part in nothing before it."""

    clients: frozenset[int] = frozenset()
    first: int = 1  # the round from which on they are like all others

    def joined(self, clients: Sequence[int], number: int) -> tuple[int, ...]:
        """Those of the clients who are there in a round; it follows from its number alone."""
        absent = self.clients if number < self.first else frozenset()
        return tuple(client for client in clients if client not in absent)


NOBODY_LATE = Latecomers()


def how_many(wanted: int | float, clients: int) -> int:
    """A number of clients from a number or a fraction (rounded up, at least one)."""
    if isinstance(wanted, float) and wanted <= 1:
        return max(1, math.ceil(round(wanted * clients, 9)))
    return min(int(wanted), clients)


def share(wanted: int | float, clients: int) -> float:
    """A fraction of clients from a number or a fraction."""
    return wanted if isinstance(wanted, float) and wanted <= 1 else min(1.0, wanted / clients)


def expected(selection: Selection, wanted: int | float, clients: int, groups: Sequence[Hashable] = ()) -> float:
    """How many clients a round has, on average; without drawing any."""
    part = share(wanted, clients)
    if selection == "binomial":
        return part * clients
    if selection == "per-group":
        return sum(how_many(part, size) for size in Counter(groups or [0] * clients).values())
    return how_many(wanted, clients)


def select(
    selection: Selection,
    wanted: int | float,
    clients: Sequence[int],
    round: int,
    seed: int,
    groups: Sequence[Hashable] = (),
) -> list[int]:
    """The clients of a round, in ascending order; the same for every method with this seed.

    ``uniform`` draws a fixed number without replacement; ``binomial`` lets each client take part on its own with
    the same probability (so a round may be empty); ``per-group`` draws the same fraction of every group, and
    at least one client of each.
    """
    rng = generator(seed, "selection", round)
    if selection == "binomial":
        chance = share(wanted, len(clients))
        return [client for client, draw in zip(clients, rng.random(len(clients)), strict=True) if draw < chance]
    if selection == "per-group":
        part = share(wanted, len(clients))
        members: dict[Hashable, list[int]] = {}
        for client, group in zip(clients, groups or [0] * len(clients), strict=True):
            members.setdefault(group, []).append(client)
        return sorted(client for group in members.values() for client in _draw(group, how_many(part, len(group)), rng))
    return _draw(clients, how_many(wanted, len(clients)), rng)


def _draw(clients: Sequence[int], number: int, rng: np.random.Generator) -> list[int]:
    return sorted(int(client) for client in rng.choice(np.asarray(clients), size=number, replace=False))

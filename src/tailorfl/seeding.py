"""Randomness belongs to (seed, purpose, round, client): equal keys draw equal numbers wherever they are drawn."""

import hashlib

import numpy as np


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, for example ``derive(7, "batches", round, client)``."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A random generator for one purpose; independent of every other purpose's."""
    return np.random.Generator(np.random.PCG64(derive(seed, *purpose)))

"""A shuffled order that is computed where it is asked for, with no array of the length of what is shuffled."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int, UInt64

ROUNDS = 6


def round_keys(*entropy: int) -> UInt64[np.ndarray, " rounds"]:
    """What makes one shuffled order differ from another: numbers for `shuffled`, drawn from integers at least 0."""
    return np.random.SeedSequence(entropy).generate_state(ROUNDS, np.uint64)


def shuffled(places: Int[np.ndarray, " b"], n: int, keys: UInt64[np.ndarray, " rounds"]) -> Int[np.ndarray, " b"]:
    """What stands at places of a shuffled range(n): for all places, each of the n numbers once.

    A Feistel network: a number below width * height is written as (high, low), and in turn a hash of one is added to
    the other, each of which can be undone. width * height is the least that reaches n with sides nearly the same, so
    a result of n or above is rare; it is sent through the network again until it falls below n (cycle walking), which
    keeps the map one to one.

    Args:
        places: from 0 to n - 1.
        n: how many numbers are shuffled, at most 2^62.
        keys: of this order, from `round_keys`.
    """
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)
    values = _network(places.astype(np.uint64), width, height, keys)
    while (outside := np.flatnonzero(values >= n)).size:
        values[outside] = _network(values[outside], width, height, keys)
    return values.astype(np.int64)


def _network(values: np.ndarray, width: int, height: int, keys: np.ndarray) -> np.ndarray:
    # Unsigned arithmetic on arrays wraps around, as a hash wants it.
    columns, rows = np.uint64(width), np.uint64(height)
    high, low = values // columns, values % columns
    for one, other in zip(keys[::2], keys[1::2], strict=True):
        low = (low + _hash(high, one)) % columns
        high = (high + _hash(low, other)) % rows
    return high * columns + low


def _hash(x: np.ndarray, key: np.uint64) -> np.ndarray:
    # The finaliser of splitmix64, whose top bits every bit of x reaches.
    x = (x ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return x >> np.uint64(32)

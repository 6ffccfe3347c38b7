"""A shuffled order that is computed where it is asked for, with no array of the length of what is shuffled."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int

# Four make a long order look random (Luby and Rackoff 1988). With six, one of 30 numbers does too: which pair comes
# first is uniform over 4000 seeds, where with four its chi-square is 15 standard deviations off.
ROUNDS = 6

_HALF, _FACTOR = np.uint64(32), np.uint64(0x94D049BB133111EB)


def round_keys(*entropy: int) -> tuple[np.uint64, ...]:
    """What makes one shuffled order differ from another: numbers for `shuffled`, drawn from integers at least 0."""
    return tuple(np.random.SeedSequence(entropy).generate_state(2 * ROUNDS, np.uint64) | np.uint64(1))


def shuffled(places: Int[np.ndarray, " b"], n: int, keys: tuple[np.uint64, ...]) -> Int[np.ndarray, " b"]:
    """What stands at places of a shuffled range(n): over all places, each of the n numbers once.

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
    sides = np.uint64(width), np.uint64(-(-n // width))
    values = _network(places.astype(np.uint64), *sides, keys)
    while (outside := values >= n).any():
        values[outside] = _network(values[outside], *sides, keys)
    return values.astype(np.int64)


def _network(values: np.ndarray, width: np.uint64, height: np.uint64, keys: tuple[np.uint64, ...]) -> np.ndarray:
    high, low = np.divmod(values, width)
    for first in range(0, len(keys), 4):
        low += _hash(high, *keys[first : first + 2])
        low %= width
        high += _hash(low, *keys[first + 2 : first + 4])
        high %= height
    return high * width + low


def _hash(x: np.ndarray, key: np.uint64, factor: np.uint64) -> np.ndarray:
    # Arrays of unsigned integers wrap around. One product alone leaves differences of neighbours that recur.
    x = (x ^ key) * factor
    x ^= x >> _HALF
    x *= _FACTOR
    x >>= _HALF
    return x

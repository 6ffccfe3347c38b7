"""A shuffled order that is computed where it is asked for, with no array of the length of what is shuffled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Four make a long order look random (Luby and Rackoff 1988). With six, one of 30 numbers does too: which pair comes
# first is uniform over 4000 seeds, where with four its chi-square is 16 standard deviations off.
ROUNDS = 6


def round_keys(*entropy: int) -> tuple[int, ...]:
    """What makes one shuffled order differ from another: numbers for `shuffled`, drawn from integers at least 0."""
    return tuple(np.random.SeedSequence(entropy).generate_state(ROUNDS, np.uint64).tolist())


def shuffled(place: int, n: int, keys: Sequence[int]) -> int:
    """What stands at a place of a shuffled range(n): over all places, each of the n numbers once.

    A Feistel network: a number below width * height is written as (high, low), and in turn a hash of one is added to
    the other, each of which can be undone. width * height is the least that reaches n with sides nearly the same, so
    a result of n or above is rare; it is sent through the network again until it falls below n (cycle walking), which
    keeps the map one to one.

    In plain integers: for the few places of a batch that is several times as fast as NumPy's arrays are.

    Args:
        place: from 0 to n - 1.
        n: how many numbers are shuffled.
        keys: of this order, from `round_keys`.
    """
    width = math.isqrt(n - 1) + 1
    height = -(-n // width)
    while True:
        high, low = divmod(place, width)
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            low = (low + _hash(high ^ one)) % width
            high = (high + _hash(low ^ other)) % height
        place = high * width + low
        if place < n:
            return place


def _hash(x: int) -> int:
    # After the finaliser of splitmix64: every bit of x reaches the upper half, which is what is taken.
    x = x * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return ((x ^ x >> 31) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF) >> 32

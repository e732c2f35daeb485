"""Sequence packing: assign samples to bins by their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

LOOK_AHEAD = 64  # candidate samples for a bin


def permutation(num_samples: int, *key: int) -> np.ndarray:
    """Return a permutation that depends only on `key` (seed, epoch, ...), int64 [num_samples]."""
    return np.random.default_rng(key).permutation(num_samples)


def pack(lengths: np.ndarray, order: np.ndarray, capacity: int) -> Iterator[list[int]]:
    """Yield bins of at most `capacity` tokens, each filled from the next LOOK_AHEAD samples of `order`.

    A bin gets the first of these candidates, then the subset of the others that leaves the least free space.
    Packing is lazy; a million samples need one to four seconds. `lengths`: int64 [samples], 1 to `capacity`.
    """
    assert len(order) == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    samples, sizes = map(int, order), map(int, lengths[order])
    ahead, ahead_sizes = list(islice(samples, LOOK_AHEAD)), list(islice(sizes, LOOK_AHEAD))
    while ahead:
        members: list[int] = []
        free = capacity
        # While all candidates fit into the bin, no choice is needed: add the first.
        while ahead and (not members or sum(ahead_sizes) < free):
            members.append(ahead.pop(0))
            free -= ahead_sizes.pop(0)
            ahead += islice(samples, 1)
            ahead_sizes += islice(sizes, 1)
        for index in reversed(best_fit_subset(ahead_sizes, free)):
            members.append(ahead.pop(index))
            del ahead_sizes[index]
        ahead += islice(samples, LOOK_AHEAD - len(ahead))
        ahead_sizes += islice(sizes, LOOK_AHEAD - len(ahead_sizes))
        yield members


def best_fit_subset(lengths: list[int], capacity: int) -> list[int]:
    """Return ascending indices of the lengths whose sum is closest to `capacity`, without exceeding it.

    Ties prefer early samples. Subset sum by dynamic programming: bit t of `sums[i]` is set if a subset of the
    first i lengths sums to t.
    """
    full, within = 1 << capacity, (2 << capacity) - 1
    reachable, sums = 1, [1]
    for length in lengths:
        if length <= capacity:
            reachable = (reachable | reachable << length) & within
        sums.append(reachable)
        if reachable >= full:
            break
    total = reachable.bit_length() - 1
    chosen = []
    for i in range(len(sums) - 2, -1, -1):
        if total and not sums[i] >> total & 1:
            chosen.append(i)
            total -= lengths[i]
    return chosen[::-1]


def split_lengths(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split documents into consecutive pieces of at most `limit` (at least 2) tokens.

    Returns the document, start and length of each piece. All pieces of a document but the last are full. A
    last piece of one token would have no label, so it gets one more token from the piece before.
    """
    pieces = -(-lengths // limit)
    document = np.repeat(np.arange(len(lengths)), pieces)
    first = np.concatenate([[0], np.cumsum(pieces)[:-1]]).astype(np.int64)
    start = (np.arange(len(document)) - first[document]) * limit
    length = np.minimum(limit, lengths[document] - start)
    single = np.flatnonzero((length == 1) & (start > 0))
    start[single] -= 1
    length[single] += 1
    length[single - 1] -= 1
    return document, start, length

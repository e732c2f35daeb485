"""Which samples share a sequence: pure planning over lengths, no tokens touched."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

LOOK_AHEAD = 64  # samples to choose from


class Bins(NamedTuple):
    """Bin i holds samples `order[offsets[i]:offsets[i + 1]]`."""

    order: np.ndarray  # int64 [samples]
    offsets: np.ndarray  # int64 [bins + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members(self, index: int) -> list[int]:
        return self.order[self.offsets[index] : self.offsets[index + 1]].tolist()


def shuffled(num_samples: int, *key: int) -> np.ndarray:
    """A permutation that depends on `key` (seed, epoch, ...) alone, int64 [num_samples]."""
    return np.random.default_rng(key).permutation(num_samples)


def one_each(order: np.ndarray) -> Bins:
    """No packing: every sample is a bin of its own."""
    return Bins(order, np.arange(len(order) + 1))


def fill(lengths: np.ndarray, order: np.ndarray, capacity: int) -> Bins:
    """Fill bins of `capacity` tokens one after the other from the next LOOK_AHEAD samples in this order.

    A bin takes the sample that has waited longest, then those that leave the least room. `lengths` int64
    [samples], each from 1 to `capacity`. A few seconds for a million samples.
    """
    assert len(order) == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    upcoming = zip(order.tolist(), lengths[order].tolist(), strict=True)
    ahead = list(islice(upcoming, LOOK_AHEAD))  # (sample, length)
    placed: list[int] = []
    offsets = [0]

    def take(index: int) -> int:
        sample, length = ahead.pop(index)
        placed.append(sample)
        ahead.extend(islice(upcoming, 1))
        return length

    while ahead:
        free = capacity - take(0)
        # Short samples in a long bin: nothing to choose as long as all that is in sight fits.
        while ahead and sum(length for _, length in ahead) < free:
            free -= take(0)
        for index in reversed(fullest([length for _, length in ahead], free)):
            take(index)
        offsets.append(len(placed))
    return Bins(np.array(placed, dtype=np.int64), np.array(offsets))


def fullest(lengths: list[int], capacity: int) -> list[int]:
    """Indices, rising, of lengths with the largest sum up to `capacity`; of several choices, early ones.

    Subset sum by dynamic programming: bit t of `sums[i]` says whether some of the first i lengths sum to t.
    """
    within = (2 << capacity) - 1
    sums = [1]
    for length in lengths:
        sums.append((sums[-1] | sums[-1] << length) & within)
        if sums[-1] >> capacity:
            break
    total = sums[-1].bit_length() - 1
    chosen = []
    for i in range(len(sums) - 1, 0, -1):
        if not sums[i - 1] >> total & 1:
            chosen.append(i - 1)
            total -= lengths[i - 1]
    return chosen[::-1]


def split_lengths(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into consecutive pieces of at most `limit` (2 or more) tokens: (document, start, length).

    Pieces are full but for a document's last. Where that would be one token, which has no predictor of its
    own, the piece before gives it one more.
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

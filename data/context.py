"""Each rank's part of every sequence under context parallelism.

N ranks share a sequence. It is padded to a multiple of 2N tokens and cut into 2N chunks. Rank r holds chunks
r and 2N - 1 - r, which balances the work of causal attention. The padding follows all of the sequence's
tokens, so none of them attends to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Context(NamedTuple):
    """Number of ranks that share each sequence, and the number of this one."""

    size: int = 1
    rank: int = 0

    @property
    def multiple(self) -> int:
        """Sequences are padded to a multiple of this many tokens."""
        return 2 * self.size if self.size > 1 else 1

    def row_multiple(self, tokens: int) -> int:
        """Return the multiple for rows, of which each rank gets a multiple of `tokens`."""
        return self.size * math.lcm(2, tokens) if self.size > 1 else tokens

    def places(self, boundaries: Sequence[int]) -> np.ndarray:
        """Return the places of this rank's tokens among all, int64 [tokens / size], in order.

        `boundaries` [N+1] are where the N sequences start, and where the last one ends.
        """
        starts, lengths = np.asarray(boundaries, dtype=np.int64)[:-1], np.diff(boundaries)
        if self.size == 1:
            return np.arange(lengths.sum())
        chunks = lengths // self.multiple
        sizes = np.repeat(chunks, 2)  # of this rank's two chunks of each sequence
        first = np.stack(
            [starts + self.rank * chunks, starts + (self.multiple - 1 - self.rank) * chunks], axis=1
        ).flatten()
        return np.arange(sizes.sum()) + np.repeat(first - np.cumsum(sizes) + sizes, sizes)


WHOLE = Context()  # whole sequences on every rank

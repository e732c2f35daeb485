"""Collate samples into the tensors of one micro-batch.

Shapes: B rows, S tokens per row, N sequences in a packed batch. Each row's padding counts as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from fp8_suite.data.context import WHOLE, Context
from torch import Tensor

IGNORE = -100  # label of a token without loss


class Sample(NamedTuple):
    ids: np.ndarray  # int32 [length]
    loss: np.ndarray  # bool [length], True for tokens that contribute to the loss
    row: int  # number of its row in the data set


Row = Sequence[Sample]  # of a batch


@dataclass
class Batch:
    """One micro-batch of this rank: model inputs, and token counts computed on the host."""

    # input_ids, labels, position_ids: int64 [B, S]. labels[:, t] is the token to predict at t, or IGNORE.
    # Packed batches also have cu_seqlens, int32 [N + 1]: sequence starts in the B * S flattened tokens; and
    # max_seqlen, an int: an upper bound on sequence length, constant during a run. Under context parallelism
    # these two describe whole sequences; all else is of this rank's tokens, and S is its share of a row.
    inputs: dict[str, Tensor | int]
    label_tokens: int  # labels that are not IGNORE
    real_tokens: int  # tokens that are not padding
    padded_tokens: int  # B * S
    sum_squared_lengths: int  # sum over samples; attention FLOPs are proportional to it
    sample_ids: list[int]  # row numbers in the data set, of all samples in these rows

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Pin all tensors; called by torch's DataLoader."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        mapped = {k: function(v) if isinstance(v, Tensor) else v for k, v in self.inputs.items()}
        return replace(self, inputs=mapped)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def build_batch(
    rows: Sequence[Row], width: int, pad_id: int, max_seqlen: int | None = None, context: Context = WHOLE
) -> Batch:
    """Build a batch [len(rows), width]: samples of a row are concatenated and padded on the right.

    With `max_seqlen` the batch is packed, and each row's padding is a separate sequence: as part of the last
    sample it would distort that sample's attention and statistics. An unpacked row has one sample; causal
    attention needs no mask for its padding. Empty `rows` give one row of padding.

    With a `context`, samples of a packed row are padded to its multiple, and the batch keeps its tokens.
    """
    B = max(len(rows), 1)
    ids, labels = np.full((B, width), pad_id), np.full((B, width), IGNORE)  # [B, S]
    positions, real = np.tile(np.arange(width), (B, 1)), np.zeros((B, width), dtype=bool)  # [B, S]
    starts: list[int] = []
    for b, samples in enumerate(rows or [[]]):
        t = 0
        for sample in samples:
            start, end = t, t + len(sample.ids)
            t = start + round_up(len(sample.ids), context.multiple)
            starts.append(b * width + start)
            ids[b, start:end] = sample.ids
            # Labels are shifted here, so the model must not shift them. The last token has no label.
            labels[b, start : end - 1] = np.where(sample.loss[1:], sample.ids[1:], IGNORE)
            positions[b, start:t] = np.arange(t - start)
            real[b, start:end] = True
        if max_seqlen is not None:
            for start in range(t, width, max_seqlen):  # padding
                starts.append(b * width + start)
                positions[b, start:] = np.arange(width - start)
    boundaries = [*starts, B * width] if max_seqlen is not None else [*range(0, B * width + 1, width)]
    if context.size > 1:
        places = context.places(boundaries)
        ids, labels, positions, real = (x.take(places).reshape(B, -1) for x in (ids, labels, positions, real))
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    inputs: dict[str, Tensor | int] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if max_seqlen is not None:
        inputs["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32)
        inputs["max_seqlen"] = max_seqlen
    return Batch(
        inputs,
        label_tokens=int((labels != IGNORE).sum()),
        real_tokens=int(real.sum()),
        padded_tokens=ids.size,
        # n^2 = 1 + 3 + ... + (2n - 1): the share of each token of a sample.
        sum_squared_lengths=int((2 * positions[real] + 1).sum()),
        sample_ids=[sample.row for samples in rows for sample in samples],
    )

"""Collate samples into the tensors of one micro-batch.

Shapes: B rows, S tokens per row, N sequences in a packed batch. Each row's padding counts as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # label of a token without loss


class Sample(NamedTuple):
    ids: np.ndarray  # int32 [length]
    loss: np.ndarray  # bool [length], True for tokens that contribute to the loss
    row: int  # number of its row in the data set


@dataclass
class Batch:
    """One micro-batch of this rank: model inputs, and token counts computed on the host."""

    # input_ids, labels, position_ids: int64 [B, S]. labels[:, t] is the token to predict at t, or IGNORE.
    # Packed batches also have cu_seqlens, int32 [N + 1]: sequence starts in the B * S flattened tokens; and
    # max_seqlen, an int: an upper bound on sequence length, constant during a run.
    inputs: dict[str, Tensor | int]
    label_tokens: int  # labels that are not IGNORE
    real_tokens: int  # tokens that are not padding
    padded_tokens: int  # B * S
    sum_squared_lengths: int  # sum over samples; attention FLOPs are proportional to it
    sample_ids: list[int]  # row numbers in the data set

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
    rows: Sequence[Sequence[Sample]], width: int, pad_id: int, max_seqlen: int | None = None
) -> Batch:
    """Build a batch [len(rows), width]: samples of a row are concatenated and padded on the right.

    With `max_seqlen` the batch is packed, and each row's padding is a separate sequence: as part of the last
    sample it would distort that sample's attention and statistics. An unpacked row has one sample; causal
    attention needs no mask for its padding. Empty `rows` give one row of padding.
    """
    B = max(len(rows), 1)
    ids, labels = np.full((B, width), pad_id), np.full((B, width), IGNORE)  # [B, S]
    positions = np.tile(np.arange(width), (B, 1))  # [B, S]
    starts: list[int] = []
    for b, samples in enumerate(rows or [[]]):
        t = 0
        for sample in samples:
            start, t = t, t + len(sample.ids)
            starts.append(b * width + start)
            ids[b, start:t] = sample.ids
            # Labels are shifted here, so the model must not shift them. The last token has no label.
            labels[b, start : t - 1] = np.where(sample.loss[1:], sample.ids[1:], IGNORE)
            positions[b, start:t] = np.arange(t - start)
        if t < width and max_seqlen is not None:
            starts.append(b * width + t)
            positions[b, t:] = np.arange(width - t)
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    inputs: dict[str, Tensor | int] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if max_seqlen is not None:
        inputs["cu_seqlens"] = torch.tensor([*starts, B * width], dtype=torch.int32)
        inputs["max_seqlen"] = max_seqlen
    flat = [sample for samples in rows for sample in samples]
    lengths = [len(sample.ids) for sample in flat]
    return Batch(
        inputs,
        label_tokens=int((labels != IGNORE).sum()),
        real_tokens=sum(lengths),
        padded_tokens=ids.size,
        sum_squared_lengths=sum(n * n for n in lengths),
        sample_ids=[sample.row for sample in flat],
    )

"""Samples -> the tensors of one micro-batch, packed or padded.

B rows, S tokens per row, N sequences in a packed batch (padding counts as sequences of its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # the label of a token without loss


class Sample(NamedTuple):
    """Tokens of one sample; `loss` marks those that are worth predicting."""

    ids: np.ndarray  # int32 [length]
    loss: np.ndarray  # bool [length]
    row: int  # number of its row in the data set


@dataclass
class Batch:
    """One micro-batch of this rank: the model's inputs, and counts so that no one has to look into them."""

    # input_ids, labels, position_ids: int64 [B, S]. labels[:, t] is the token to predict at t, or IGNORE.
    # When packed also cu_seqlens: int32 [N + 1], where sequences start in the B * S flattened tokens, and
    # max_seqlen: an int no sequence exceeds, the same for the whole run.
    inputs: dict[str, Tensor | int]
    label_tokens: int  # labels that are not IGNORE
    real_tokens: int  # tokens that are not padding
    padded_tokens: int  # B * S
    sum_squared_lengths: int  # of the samples, what attention's FLOPs grow with
    sample_ids: list[int]  # row numbers in the data set

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader."""
        return self._map(Tensor.pin_memory)

    def _map(self, function) -> Batch:
        mapped = {k: function(v) if isinstance(v, Tensor) else v for k, v in self.inputs.items()}
        return replace(self, inputs=mapped)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pack_rows(rows: Sequence[Sequence[Sample]], width: int, pad_id: int, max_seqlen: int) -> Batch:
    """Batch [len(rows), width] with each row's samples back to back; no rows give one row of padding.

    Positions restart at every sample. What a row has left over is a sequence of its own: stretching the last
    sample instead would let it attend to padding and shift its statistics.
    """
    B = max(len(rows), 1)
    ids, labels, positions = empty(B, width, pad_id)
    starts: list[int] = []
    for b, samples in enumerate(rows or [[]]):
        t = 0
        for sample in samples:
            starts.append(b * width + t)
            t = place(sample, ids[b], labels[b], positions[b], t)
        if t < width:
            starts.append(b * width + t)
            positions[b, t:] = np.arange(width - t)
    cu_seqlens = torch.tensor([*starts, B * width], dtype=torch.int32)
    flat = [sample for samples in rows for sample in samples]
    return finish(ids, labels, positions, flat, {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen})


def pad_rows(samples: Sequence[Sample], multiple: int, pad_id: int) -> Batch:
    """Batch [len(samples), longest rounded up to `multiple`], padded at the right; no samples give one row of
    padding, `multiple` wide. Causal attention needs no mask: no sample token sees the padding after it."""
    width = round_up(max((len(s.ids) for s in samples), default=1), multiple)
    ids, labels, positions = empty(max(len(samples), 1), width, pad_id)
    positions[:] = np.arange(width)
    for b, sample in enumerate(samples):
        place(sample, ids[b], labels[b], positions[b], 0)
    return finish(ids, labels, positions, samples, {})


def empty(B: int, width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (B, width)
    return np.full(shape, pad_id), np.full(shape, IGNORE), np.zeros(shape, dtype=np.int64)


def place(sample: Sample, ids: np.ndarray, labels: np.ndarray, positions: np.ndarray, t: int) -> int:
    """Write a sample into one row from column `t` on; returns the column after it."""
    end = t + len(sample.ids)
    ids[t:end] = sample.ids
    # Shifted by one here, once: column t holds what t predicts. The last token predicts nothing.
    labels[t : end - 1] = np.where(sample.loss[1:], sample.ids[1:], IGNORE)
    positions[t:end] = np.arange(end - t)
    return end


def finish(
    ids: np.ndarray,
    labels: np.ndarray,
    positions: np.ndarray,
    samples: Sequence[Sample],
    packed: dict[str, Tensor | int],
) -> Batch:
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    lengths = [len(sample.ids) for sample in samples]
    return Batch(
        inputs={**{name: torch.from_numpy(array) for name, array in arrays.items()}, **packed},
        label_tokens=int((labels != IGNORE).sum()),
        real_tokens=sum(lengths),
        padded_tokens=ids.size,
        sum_squared_lengths=sum(n * n for n in lengths),
        sample_ids=[sample.row for sample in samples],
    )

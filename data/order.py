"""Global order of bins, and each rank's share of it.

A bin is the samples of one batch row. With batch size B and W ranks, a global micro-batch is the next B * W
bins, and rank r gets bins r * B to (r + 1) * B - 1 of them. The order does not depend on W, so a loader's
state is only its epoch and the next bin. Ranks that share sequences (`context`) get the same bins. Their
padding of samples widens rows, so bins do not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby, islice
from typing import Any, NamedTuple

import numpy as np
from fp8_suite.core.errors import UserError, bad_setting, counted
from fp8_suite.data.collate import Batch, Sample, build_batch, round_up
from fp8_suite.data.context import WHOLE, Context
from fp8_suite.data.packing import pack, permutation
from fp8_suite.data.reading.rows import DROPPED
from fp8_suite.data.reading.sources import explaining_read_errors
from fp8_suite.data.samples import Samples, Selection, Split
from fp8_suite.data.settings import DataConfig
from torch.utils.data import IterableDataset, get_worker_info

WINDOW = 1000  # rows of a stream that are shuffled and packed together
Position = int | list[int]  # next bin; for a stream [first row of the window, next bin in the window]
PositionedBatch = tuple[Position, Batch]  # (position after the micro-batch, micro-batch)

logger = logging.getLogger(__name__)


class Bin(NamedTuple):
    """Samples of one batch row."""

    after: Position  # position after this bin
    samples: Samples
    members: list[int]  # indices into `samples`


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of this rank's batches, and the rank's place in the data-parallel group."""

    batch_size: int  # sequences per micro-batch and rank
    eval_batch_size: int
    pad_multiple: int = 1  # rows are padded to a multiple of this many tokens; FP8 recipes need it
    micro_batches_per_step: int = 1  # prefetched by the workers
    rank: int = 0
    world_size: int = 1
    context: Context = WHOLE  # this rank's part of each sequence
    pin_memory: bool = False


@dataclass(frozen=True)
class BatchLayout:
    """Layout of this rank's batches: the bins of a batch, and their padding."""

    cfg: DataConfig
    shape: BatchShape
    pad_id: int

    @property
    def pad_multiple(self) -> int:
        """Rows, of which each rank may hold a part, are padded to a multiple of this many tokens."""
        return self.shape.context.row_multiple(self.shape.pad_multiple)

    @property
    def width(self) -> int:
        """Tokens per packed row."""
        return round_up(self.cfg.max_seq_length, self.pad_multiple)

    @property
    def stride(self) -> int:
        """Bins per global micro-batch."""
        return self.shape.batch_size * self.shape.world_size

    def bins(self, lengths: np.ndarray, key: tuple[int, ...] | None) -> Iterator[list[int]]:
        """Yield bins as lists of sample indices, shuffled by `key`, in order if it is None."""
        order = np.arange(len(lengths)) if key is None else permutation(len(lengths), *key)
        limit, packed = self.cfg.max_seq_length, self.cfg.packing
        return pack(lengths, order, limit) if packed else ([int(i)] for i in order)

    def collate(self, bins: list[Bin]) -> Batch:
        """Build this rank's batch of a global micro-batch; a rank without bins gets one row of padding."""
        first, context = self.shape.rank * self.shape.batch_size, self.shape.context
        rows = list(fetch(bins[first : first + self.shape.batch_size]))
        if self.cfg.packing:
            width = max(self.width, *map(self._padded, rows)) if rows else self.pad_multiple
            batch = build_batch(rows, width, self.pad_id, max_seqlen=self.width, context=context)
        else:
            longest = max((len(sample.ids) for row in rows for sample in row), default=1)
            width = round_up(longest, self.pad_multiple)
            batch = build_batch(rows, width, self.pad_id, context=context)
        # The model may have no more positions than max_seq_length, also for padding.
        batch.inputs["position_ids"].clamp_(max=self.cfg.max_seq_length - 1)
        return batch

    def _padded(self, row: list[Sample]) -> int:
        """Return the tokens of a packed row, with the padding of its samples and its own."""
        lengths = (round_up(len(sample.ids), self.shape.context.multiple) for sample in row)
        return round_up(sum(lengths), self.pad_multiple)

    def measure(self, lengths: np.ndarray, bins: Iterator[list[int]]) -> tuple[int, int]:
        """Return the number of bins, and their token count including padding."""
        if self.cfg.packing:
            num_bins = sum(1 for _ in bins)
            return num_bins, num_bins * self.width
        lengths = lengths[[index for (index,) in bins]]
        groups = np.arange(0, len(lengths), self.shape.batch_size)
        widest = round_up(np.maximum.reduceat(lengths, groups), self.pad_multiple)
        return len(lengths), int((widest * np.diff([*groups, len(lengths)])).sum())


def fetch(bins: list[Bin]) -> Iterator[list[Sample]]:
    """Yield the samples of each bin; consecutive bins of the same `Samples` share one read."""
    for samples, group in groupby(bins, key=lambda bin: bin.samples):
        members = [bin.members for bin in group]
        read = iter(samples.fetch([index for indices in members for index in indices]))
        yield from (list(islice(read, len(indices))) for indices in members)


class Stored:
    """Bins over stored samples. `num_bins` is epoch 0's and determines a run's length."""

    start = 0
    max_workers = None

    def __init__(self, samples: Samples, layout: BatchLayout, *, seed: int | None):
        self.samples, self.layout, self.seed = samples, layout, seed
        self.num_bins, self.padded_tokens = layout.measure(samples.length, self._bins(0))

    def _bins(self, epoch: int) -> Iterator[list[int]]:
        return self.layout.bins(self.samples.length, None if self.seed is None else (self.seed, epoch))

    def micro_batches(self, position: int) -> int:
        """Return the number of global micro-batches from a position to the end of epoch 0."""
        return max(0, -(-(self.num_bins - position) // self.layout.stride))

    def bins(self, epoch: int, position: int) -> Iterator[Bin]:
        """Yield the bins of an epoch, starting at a position."""
        planned = islice(self._bins(epoch), position, None)
        return (Bin(after, self.samples, members) for after, members in enumerate(planned, position + 1))


class Stream:
    """Bins over a stream, shuffled and packed in windows of WINDOW rows.

    Every rank reads the whole stream, in at most one worker process, and keeps its share. A resumed run
    reads the current window again.
    """

    max_workers = 1

    def __init__(self, split: Split, layout: BatchLayout, *, seed: int, held_out: int):
        self.split, self.layout, self.seed = split, layout, seed
        self.start = [held_out, 0]
        limit = split.cfg.num_of_samples
        self.end = None if limit is None else held_out + limit
        window = next(self._read(held_out), None)
        if window is None:
            reason = f"the stream has no rows after the {counted(held_out, 'held-out row')}"
            way_out = "lower --eval_samples, or choose another --split_name"
            raise bad_setting(f"{reason}; {way_out}", dataset_name=split.cfg.dataset_name)
        self.selection = window[1]
        self.num_bins, self.padded_tokens = layout.measure(window[1].samples.length, self._bins(0, *window))
        num_rows = int(self.selection.counts.sum())
        self.is_one_window = num_rows < WINDOW or num_rows == limit

    def micro_batches(self, position: list[int]) -> None:
        """Return None: the length of a stream is unknown."""

    def bins(self, epoch: int, position: list[int]) -> Iterator[Bin]:
        """Yield the bins of an epoch, starting at a position."""
        for row, selection in self._windows(position[0]):
            # The data report covers the first window; rank 0 logs the others.
            if row != self.start[0] and self.layout.shape.rank == 0:
                log_losses(row, selection)
            skip = position[1] if row == position[0] else 0
            planned = islice(self._bins(epoch, row, selection), skip, None)
            for after, members in enumerate(planned, skip + 1):
                yield Bin([row, after], selection.samples, members)

    def _bins(self, epoch: int, row: int, selection: Selection) -> Iterator[list[int]]:
        return self.layout.bins(selection.samples.length, (self.seed, epoch, row))

    def _windows(self, row: int) -> Iterator[tuple[int, Selection]]:
        """Yield (first row, selection) of each window, starting at `row`."""
        if row == self.start[0]:
            yield row, self.selection
            row += int(self.selection.counts.sum())
        yield from self._read(row)

    def _read(self, row: int) -> Iterator[tuple[int, Selection]]:
        rows = iter(self.split.source.rows.skip(row))
        while True:
            with explaining_read_errors(self.split.cfg):
                window = list(islice(rows, WINDOW if self.end is None else min(WINDOW, self.end - row)))
            if not window:
                return
            yield row, self.split.encode(window, row)
            row += len(window)


def log_losses(row: int, selection: Selection) -> None:
    """Log what a window of a stream, starting at `row`, loses: rows, and parts of answers."""
    dropped = int(selection.counts[[*DROPPED]].sum())
    losses = [f"{counted(dropped, 'row')} dropped"] * bool(dropped)
    losses += [f"{part} left out in {counted(rows, 'row')}" for part, rows in selection.left_out.items()]
    if losses:
        logger.warning("stream window starting at row %d: %s", row + 1, ", ".join(losses))


class MicroBatches(IterableDataset):
    """Endless micro-batches starting at a position, with None after each epoch.

    Worker w of n builds items w, w + n, w + 2n, ... A read error is yielded as the last item: DataLoader
    does not preserve the type of an exception raised in a worker.
    """

    def __init__(self, source: Stored | Stream, epoch: int, position: Position):
        self.source, self.epoch, self.position = source, epoch, position

    def __iter__(self) -> Iterator[PositionedBatch | UserError | None]:
        groups, worker = self.groups(), get_worker_info()
        if worker is not None:
            groups = islice(groups, worker.id, None, worker.num_workers)
        while True:
            try:
                bins = next(groups)
            except UserError as error:
                yield UserError(f"{error}; the same command with this run's --output_dir resumes it")
                return
            yield (bins[-1].after, self.source.layout.collate(bins)) if bins else None

    def groups(self) -> Iterator[list[Bin]]:
        """Yield the bins of each global micro-batch, and [] after each epoch."""
        position: Any = self.position
        for epoch in count(self.epoch):
            bins = self.source.bins(epoch, position)
            while group := list(islice(bins, self.source.layout.stride)):
                yield group
            yield []
            position = self.source.start

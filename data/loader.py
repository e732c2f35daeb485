"""The resumable loader: a global order of bins, of which each rank takes its share.

A bin is what fills one row of a batch. Global micro-batch m holds the B * W bins from the position on (B the
batch size, W the ranks), rank r the r-th B of them. So the order of bins does not depend on W, and a state is
no more than an epoch and the next bin.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset

from data.cache import NotStored
from data.chat import Status
from data.collate import Batch, Sample, pack_rows, pad_rows, round_up
from data.packing import Bins, fill, shuffled
from data.samples import Samples, Selection, Split
from data.sources import Unreadable, reading

WINDOW = 1000  # rows of a stream that are shuffled and packed together
Position = int | list[int]
Item = tuple[Position, Batch]  # a micro-batch, and where the next one starts
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """How bins become this rank's batches."""

    max_seq_length: int  # tokens of samples in a bin at most
    pad_multiple: int
    packing: bool
    batch_size: int
    pad_id: int
    rank: int = 0
    world_size: int = 1

    @property
    def width(self) -> int:
        """Tokens per packed row."""
        return round_up(self.max_seq_length, self.pad_multiple)

    @property
    def stride(self) -> int:
        """Bins per global micro-batch."""
        return self.batch_size * self.world_size

    def plan(self, lengths: np.ndarray, key: tuple[int, ...] | None) -> Bins:
        """Bins over samples of these lengths, shuffled by `key`, or in order without one."""
        return Bins.collect(self.plan_along(lengths, key))

    def plan_along(self, lengths: np.ndarray, key: tuple[int, ...] | None) -> Iterator[list[int]]:
        """The samples of each bin of `plan`, which is packed no further than it is read."""
        order = np.arange(len(lengths)) if key is None else shuffled(len(lengths), *key)
        return fill(lengths, order, self.max_seq_length) if self.packing else ([int(i)] for i in order)

    def share(self, bins: list[Any]) -> list[Any]:
        """This rank's part of a global micro-batch."""
        return bins[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]

    def collate(self, bins: list[list[Sample]]) -> Batch:
        if not self.packing:
            return pad_rows(
                [sample for samples in bins for sample in samples], self.pad_multiple, self.pad_id
            )
        # A rank left without bins at the end gets the smallest batch there is.
        width = self.width if bins else self.pad_multiple
        return pack_rows(bins, width, self.pad_id, max_seqlen=self.width)

    def padded_tokens(self, lengths: np.ndarray, bins: Bins) -> int:
        """Tokens and padding of all bins, filler batches aside."""
        if self.packing:
            return len(bins) * self.width
        groups = np.arange(0, len(bins), self.batch_size)
        widest = np.maximum.reduceat(lengths[bins.order], groups)
        sizes = np.diff([*groups, len(bins)])
        return int((-(-widest // self.pad_multiple) * self.pad_multiple * sizes).sum())


class Stored:
    """Bins over samples on disk; `bins` are those of epoch 0, by which a run's length is known."""

    start = 0
    workers = None

    def __init__(self, samples: Samples, layout: Layout, *, seed: int | None):
        self.samples, self.layout, self.seed = samples, layout, seed
        self.bins = layout.plan(samples.length, self.key(0))

    def key(self, epoch: int) -> tuple[int, int] | None:
        return None if self.seed is None else (self.seed, epoch)

    def micro_batches(self, position: int | None = None) -> int:
        return max(0, -(-(len(self.bins) - (position or 0)) // self.layout.stride))

    def items(self, epoch: int, position: int) -> TorchDataset:
        return StoredItems(self, epoch, position)

    def members(self, epoch: int, position: int) -> Iterator[list[int]]:
        """The samples of each bin of an epoch from a position on."""
        if epoch == 0:
            return map(self.bins.members, range(position, len(self.bins)))
        return islice(self.layout.plan_along(self.samples.length, self.key(epoch)), position, None)


class StoredItems(TorchDataset):
    """Micro-batches by number, which rises from call to call, as it does for each of a DataLoader's workers.

    Epochs are packed while they are read: nobody waits for the plan of a whole one.
    """

    def __init__(self, source: Stored, epoch: int, position: int):
        self.source, self.epoch, self.position = source, epoch, position
        self.steps: Iterator[tuple[int, list[list[int]]] | None] | None = None
        self.passed = 0  # steps

    def __getitem__(self, number: int) -> Item | None:
        if self.steps is None:  # made by the process that reads it
            self.steps = self.plan()
        step = next(islice(self.steps, number - self.passed, None))
        self.passed = number + 1
        if step is None:
            return None
        after, bins = step
        layout, mine = self.source.layout, self.source.layout.share(bins)
        samples = iter(self.source.samples.fetch([index for members in mine for index in members]))
        return after, layout.collate([list(islice(samples, len(members))) for members in mine])

    def plan(self) -> Iterator[tuple[int, list[list[int]]] | None]:
        """(position after it, bins) of each global micro-batch, and None after each epoch."""
        position = self.position
        for epoch in count(self.epoch):
            bins = self.source.members(epoch, position)
            while chunk := list(islice(bins, self.source.layout.stride)):
                position += len(chunk)
                yield position, chunk
            yield None
            position = self.source.start


class Stream:
    """Bins over a stream, shuffled and packed window by window of WINDOW rows.

    A position is [first row of the window, next bin in it]: a resumed run reads that window again. Every rank
    reads the whole stream and keeps its share, in one worker process at most.
    """

    workers = 1

    def __init__(self, split: Split, layout: Layout, *, seed: int, held_out: int):
        self.split, self.layout, self.seed = split, layout, seed
        self.start = [held_out, 0]
        wanted = split.cfg.num_of_samples
        self.end = None if wanted is None else held_out + wanted
        first = next(self.read(held_out), None)
        if first is None:
            raise ValueError(
                f"--dataset_name {split.cfg.dataset_name}: its stream has no rows after the {held_out} held "
                f"out for evaluation; lower --eval_samples, or name another --split_name"
            )
        self.first = first[1]
        self.bins = self.plan(0, *first)
        rows = int(self.first.counts.sum())
        self.is_one_window = rows < WINDOW or rows == wanted

    def windows(self, row: int) -> Iterator[tuple[int, Selection]]:
        """(first row, usable samples) of each window from `row` on, one read ahead."""
        known = []
        if row == self.start[0]:
            known = [(row, self.first)]
            row += int(self.first.counts.sum())
        return ahead(chain(known, self.read(row)))

    def read(self, row: int) -> Iterator[tuple[int, Selection]]:
        rows = iter(self.split.source.rows.skip(row))
        while True:
            with reading(self.split.cfg):
                window = list(islice(rows, WINDOW if self.end is None else min(WINDOW, self.end - row)))
            if not window:
                return
            yield row, self.split.encode(window, row)
            row += len(window)

    def plan(self, epoch: int, row: int, selection: Selection) -> Bins:
        return self.layout.plan(selection.samples.length, (self.seed, epoch, row))

    def micro_batches(self, position: list[int] | None = None) -> None:
        return None

    def items(self, epoch: int, position: list[int]) -> TorchIterableDataset:
        return StreamItems(self, epoch, position)

    def members(self, epoch: int, position: list[int]) -> Iterator[tuple[list[int], Samples, list[int]]]:
        """(position after it, samples, members) of each bin of an epoch from a position on."""
        row, skip = position
        for first, selection in self.windows(row):
            unusable = int(selection.counts[Status.OVERLONG :].sum())
            told = first == self.start[0] or self.layout.rank > 0  # by the report, or by rank 0
            if unusable and not told:
                logger.warning("%d of the stream's rows from row %d on are left out", unusable, first + 1)
            bins = self.plan(epoch, first, selection)
            for index in range(skip if first == row else 0, len(bins)):
                yield [first, index + 1], selection.samples, bins.members(index)


class StreamItems(TorchIterableDataset):
    """Micro-batches from a position on, epoch after epoch; None stands after each.

    What cannot be read is told by an item, which comes through a worker's queue as it is.
    """

    def __init__(self, stream: Stream, epoch: int, position: list[int]):
        self.stream, self.epoch, self.position = stream, epoch, position

    def __iter__(self) -> Iterator[Item | RuntimeError | None]:
        if torch.utils.data.get_worker_info():
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
        epochs = self.epochs()
        while True:
            try:
                item = next(epochs)
            except (Unreadable, NotStored) as error:
                yield RuntimeError(
                    f"{error}; the same command with this run's --output_dir goes on from the last checkpoint"
                )
                return
            yield item

    def epochs(self) -> Iterator[Item | None]:
        layout, position = self.stream.layout, self.position
        for epoch in count(self.epoch):
            bins = self.stream.members(epoch, position)
            while chunk := list(islice(bins, layout.stride)):
                mine = [samples.fetch(members) for _, samples, members in layout.share(chunk)]
                yield chunk[-1][0], layout.collate(mine)
            yield None
            position = self.stream.start


def ahead(items: Iterator[T]) -> Iterator[T]:
    """`items`, each made in a thread while the one before is used; nobody waits for one that is stuck."""
    asked: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        while asked.get():
            try:
                made.put((next(items, None), None))
            except BaseException as error:
                made.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        asked.put(True)
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is None:
                return
            asked.put(True)
            yield item
    finally:
        asked.put(False)


def outlive_the_stop_signal(_: int) -> None:
    """Schedulers and `timeout` send SIGTERM to the whole process group; the run that saves still needs its
    workers, which end with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


READERS: WeakSet[Iterator] = WeakSet()  # DataLoader iterators with workers
WORKERS: list[BaseProcess] = []  # all of theirs


@atexit.register
def end_workers() -> None:
    """At exit, before multiprocessing sends them the SIGTERM that they outlive and waits for their end.

    An iterator that is still there may be held by a Loader, or by the traceback of an error. One that the
    garbage collector took had lost its queues by then, and could not tell its workers.
    """
    for reader in READERS:
        reader._shutdown_workers()
    for worker in (*WORKERS, *multiprocessing.active_children()):  # those of a reader that a signal cut short
        worker.kill()


# What a changed part of `identity` means for the user.
CULPRITS = {
    "samples": "--dataset_name, --dataset_*_field, --split_name, --num_of_samples, --eval_split, "
    "--eval_samples, --tokenizer_name, --system_prompt, --overlong or the data itself"
}


class Loader:
    """One split, this rank's share: micro-batches from the current position to the end of the epoch.

    `state_dict` counts what was yielded, whatever the workers have read ahead. With `restart`, as for
    evaluation, each pass starts at the first bin of epoch 0. At the end of a pass the workers go on with the
    next one, so that its first batch is there when it is asked for; a pass that is given up ends them.
    `per_step` micro-batches are asked for at once.
    """

    def __init__(
        self,
        source: Stored | Stream,
        *,
        identity: dict[str, Any],
        num_workers: int = 0,
        pin_memory: bool = False,
        restart: bool = False,
        per_step: int = 1,
    ):
        self.source, self.pin_memory, self.restart = source, pin_memory, restart
        self.identity = identity  # JSON-able; what a position is relative to
        self.num_workers = num_workers if source.workers is None else min(num_workers, source.workers)
        # Micro-batches that each worker makes ahead.
        self.ahead = max(2, -(-per_step // self.num_workers)) if self.num_workers else None
        self.epoch = 0
        self.position: Position = source.start
        self.running: Iterator[Item | None] | None = None  # stands where the next pass starts
        # Epoch 0's number throughout, so that a schedule made from it is the same after a resume; the packing
        # of another epoch may need a micro-batch more or less.
        self.micro_batches_per_epoch = source.micro_batches()

    def __iter__(self) -> Iterator[Batch]:
        if self.restart:
            self.position = self.source.start
        items = self.start() if self.running is None else self.running
        self.running = None
        for item in items:
            if item is None:
                break
            if isinstance(item, RuntimeError):
                raise item
            self.position, batch = item
            yield batch
        self.running = items
        self.position = self.source.start
        if not self.restart:
            self.epoch += 1

    def start(self) -> Iterator[Item | None]:
        """The source's items from the current position on, made by workers."""
        items = self.source.items(self.epoch, self.position)
        loader = DataLoader(
            items,
            batch_size=None,
            sampler=None if isinstance(items, TorchIterableDataset) else count(),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            prefetch_factor=self.ahead,
            worker_init_fn=outlive_the_stop_signal,
            # Its own, or the DataLoader would draw from the global one, which belongs to the training state.
            generator=torch.Generator(),
        )
        reader = iter(loader)
        if self.num_workers:
            READERS.add(reader)
            WORKERS[:] = [*(worker for worker in WORKERS if worker.is_alive()), *reader._workers]
        return reader

    def micro_batches_left(self) -> int | None:
        """Global micro-batches to the end of this epoch, as if it were packed like epoch 0."""
        return self.source.micro_batches(self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on any number of ranks; ValueError if it belongs to other data."""
        old, new = state["identity"], self.identity
        changed = [key for key in new if old.get(key) != new[key]]
        if changed:
            flags = ", ".join(
                CULPRITS.get(key, f"--{key} ({old.get(key)}, now {new[key]})") for key in changed
            )
            raise ValueError(
                f"the checkpoint's place in the data does not fit this run: changed {flags}; "
                "set it back, or start afresh with --resume none and another --output_dir"
            )
        self.epoch, self.position, self.running = state["epoch"], state["position"], None

"""Resumable loader of this rank's micro-batches, built in worker processes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.data.collate import Batch
from fp8_suite.data.order import MicroBatches, Position, PositionedBatch, Stored, Stream
from torch.utils.data import DataLoader

DATA_FLAGS = (
    "the data or its tokenizer (or --dataset_name, --dataset_text_field, --split_name, --num_of_samples, "
    "--eval_split, --eval_samples, --tokenizer_name, --system_prompt, --overlong)"
)


@dataclass
class LoaderState:
    """What changes in a loader: its place in the data. Batches count once yielded, not when prefetched."""

    epoch: int
    position: Position


class Loader:
    """Iterable over this rank's micro-batches from the position of its `state` to the end of the epoch.

    Workers continue into the next epoch; abandoning an epoch early ends them. With `restart` (evaluation),
    every iteration starts at the first bin of epoch 0. `identity` (JSON-serializable) identifies the data: a
    saved position is valid only for the same identity.
    """

    def __init__(self, source: Stored | Stream, *, identity: dict[str, Any], restart: bool = False):
        self.source, self.identity, self.restart = source, identity, restart
        workers, shape = source.layout.cfg.num_workers, source.layout.shape
        workers = workers if source.max_workers is None else min(workers, source.max_workers)
        self.options: dict[str, Any] = {"num_workers": workers, "pin_memory": shape.pin_memory}
        if workers:  # prefetch all micro-batches of a step
            self.options["prefetch_factor"] = max(2, -(-shape.micro_batches_per_step // workers))
        self.state = LoaderState(0, source.start)
        self.next_epoch: Iterator[PositionedBatch | UserError | None] | None = None
        # Other epochs may pack into slightly more or fewer micro-batches. Schedules use the count of epoch 0,
        # which is the same after a resume.
        self.micro_batches_per_epoch = source.micro_batches(source.start)

    def __iter__(self) -> Iterator[Batch]:
        if self.restart:
            self.state.position = self.source.start
        items = self._start() if self.next_epoch is None else self.next_epoch
        self.next_epoch = None
        for item in items:
            if item is None:
                break
            if isinstance(item, UserError):
                # Close the workers here, in order: the garbage collector would close their queues first.
                del items
                raise item
            self.state.position, batch = item
            yield batch
        self.next_epoch = items
        self.state = LoaderState(self.state.epoch + (not self.restart), self.source.start)

    def _start(self) -> Iterator[PositionedBatch | UserError | None]:
        reader = iter(
            DataLoader(
                MicroBatches(self.source, self.state.epoch, self.state.position),
                batch_size=None,
                worker_init_fn=init_worker,
                generator=torch.Generator(),  # the global one is part of the training state
                **self.options,
            )
        )
        if self.options["num_workers"]:
            readers.add(reader)
            WORKERS[:] = [*(worker for worker in WORKERS if worker.is_alive()), *reader._workers]
        return reader

    def micro_batches_left(self) -> int | None:
        """Return how many global micro-batches are left, as if this epoch packed like epoch 0.

        None for a stream.
        """
        return self.source.micro_batches(self.state.position)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state) | {"identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state saved with any number of ranks. UserError if it belongs to other data."""
        old, new = state["identity"], self.identity
        changed = {
            key: f"--{key} ({old.get(key)}, now {new[key]})" for key in new if old.get(key) != new[key]
        }
        if "samples" in changed:
            changed["samples"] = DATA_FLAGS
        if changed:
            reason = "the checkpoint's data position is not valid for this run, because of changes in "
            way_out = "undo them, or start a new run with --resume none and another --output_dir"
            message, flags = f"{reason}{', '.join(changed.values())}; {way_out}", ["resume", *changed]
            raise UserError(message, flags=flags, exit_code=EXIT_BAD_SETTING)
        self.state, self.next_epoch = LoaderState(state["epoch"], state["position"]), None


readers: WeakSet[Iterator] = WeakSet()  # DataLoader iterators with workers
WORKERS: list[BaseProcess] = []  # workers of all readers; their exit codes show which were killed


def init_worker(_: int) -> None:
    # Schedulers send SIGTERM to every process of a job. The run still needs data until it has saved.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer do not survive a fork
    # A stop signal may interrupt the run while it takes a batch from a thread of the worker. Errors of the
    # worker's own code reach the run as exceptions, not by this hook.
    sys.excepthook = lambda *error: None


@atexit.register
def end_workers() -> None:
    """Kill workers at exit: multiprocessing would send SIGTERM, which they ignore, then wait for them."""
    for reader in list(readers):
        reader._shutdown_workers()
    for worker in (*WORKERS, *multiprocessing.active_children()):  # includes workers of collected readers
        worker.kill()

"""Saves of the training loop, in the background where host memory has room for a copy of the state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fp8_suite.training.checkpoint.progress import WallTime
from fp8_suite.training.checkpoint.settings import parse_save_interval
from fp8_suite.training.checkpoint.staging import Stager, Unstaged
from fp8_suite.training.checkpoint.state import RunState, saved_state
from fp8_suite.training.checkpoint.store import Checkpoints, PendingSave
from fp8_suite.training.estimate.memory import host_capacity, offloaded_bytes, staging_bytes
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.strategies import Strategy


def choose_stager(setup: TrainingSetup, strategy: Strategy, done: int, last: int) -> Stager | Unstaged | None:
    """Return what copies the state for saves in the background; None for synchronous saves. Collective.

    A launch of steps `done` + 1 to `last` that saves only at its end would gain nothing from a copy.
    """
    cfg = setup.cfg.checkpoint
    steps, seconds = parse_save_interval(cfg.save_interval)
    saves_before_end = seconds or (steps and (done // steps + 1) * steps < last)
    if not (cfg.save_checkpoints and cfg.async_save and saves_before_end):
        return None
    if strategy.owns_masters:
        return Unstaged()
    free = host_capacity(setup) - offloaded_bytes(setup)
    needed = {copies_host: staging_bytes(setup, copies_host=copies_host) for copies_host in (True, False)}
    # Nodes may differ: all ranks do what the smallest can.
    fitting = ranks.gather([copies_host for copies_host, size in needed.items() if size <= free])
    if all(True in choices for choices in fitting):
        return Stager(strategy.device)
    reason = f"a copy takes {needed[True] / 1e9:.0f} GB of host memory per node, {free / 1e9:.0f} GB are left"
    if all(False in choices for choices in fitting):
        print_rank0(f"saves write offloaded state from where it is, and the next update waits: {reason}")
        return Stager(strategy.device, copies_host=False)
    print_rank0(f"WARNING: training waits for every save: {reason}; save less often (--save_interval)")
    return None


class CheckpointSaver:
    """Saves checkpoints for the training loop, one at a time.

    `checkpoints` is None with --no_save_checkpoints. `stager` is None if saves are synchronous. `saved_step`
    is the step of the run's newest checkpoint, -1 if it has none; `restored_unevaluated` is True if the step
    of the restored one has no eval loss yet.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        run: RunState,
        scaling: Any,
        wall_time: WallTime,
        *,
        stager: Stager | Unstaged | None,
        saved_step: int,
        restored_unevaluated: bool,
        heartbeat: Callable[[], None],
    ):
        self.checkpoints, self.run, self.scaling, self.wall_time = checkpoints, run, scaling, wall_time
        self.stager, self.heartbeat = stager, heartbeat
        self.saved_step, self.restored_unevaluated = saved_step, restored_unevaluated
        self.pending: PendingSave | None = None
        self.unstaged = False  # the state of the pending save is not yet copied
        if checkpoints:
            checkpoints.on_progress = self._progressed
        self._blocking = True  # this thread waits for a save

    def reserve(self) -> None:
        """Allocate the memory of saves in the background. Call when the optimizer state exists."""
        if isinstance(self.stager, Stager):
            tensors, _ = saved_state(self.run, self.scaling.state())
            self.stager.reserve(tensors)

    def save(self, step: int) -> None:
        """Save this step. With a stager only begin to: `before_update` must precede the next update."""
        self.saved_step = step
        if self.checkpoints is None:
            return
        self.finish()
        self.wall_time.count()
        tensors, meta = saved_state(self.run, self.scaling.state())
        if self.stager is None:
            self.checkpoints.save(step, tensors, meta)
            return
        self.pending = self.checkpoints.start_save(step, tensors, meta, self.stager)
        self.unstaged, self._blocking = True, False

    def before_update(self) -> None:
        """Let the update of the state wait until the pending save has copied it."""
        if self.unstaged:
            self.unstaged, self._blocking = False, True
            with self.wall_time.phase("saving"):
                self.stager.finish_copies()
            self._blocking = False

    def check(self) -> None:
        """Raise the error of a save that has failed in the background, or of memory for the next one."""
        if isinstance(self.stager, Stager):
            self.stager.check_reserved()
        if self.pending and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the pending save is published. Raises its error."""
        if self.pending is None:
            return
        self._blocking = True
        self.heartbeat()
        try:
            self.pending.finish()
        finally:
            self.pending = None
            self.before_update()
            self.wall_time.move(self.stager.gpu_waited(), "steps", "saving")

    def saving(self) -> bool:
        """True while a save is being written in the background. Called by the watchdog's thread."""
        pending = self.pending  # `finish` may set it to None meanwhile
        return pending is not None and not pending.done()

    def give_up(self) -> None:
        """Let the pending save end before the process does, after an error of training."""
        if self.saving():
            print_rank0("training has failed; its last checkpoint is still being written")
        with suppress(Exception):  # the error of training is reported; a dead rank fails the save too
            self.finish()

    def record_eval_loss(self, step: int, eval_loss: float) -> None:
        """Add the eval loss to a checkpoint, which may still be written."""
        if self.checkpoints is not None:
            self.checkpoints.record_eval_loss(step, eval_loss)

    def _progressed(self) -> None:
        if self._blocking:
            self.heartbeat()

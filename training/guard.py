"""Check step outcomes one step late: warn about gradient-norm spikes and stop diverged runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from fp8_suite.core.errors import EXIT_FAILED, UserError
from fp8_suite.training.checkpoint.progress import Progress
from fp8_suite.training.optim.loss_scale import MINIMUM_SCALE
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.step import Stack, StepResult

GRAD_NORM_SPIKE_FACTOR = 10  # warn above this multiple of the running median
MIN_STEPS_FOR_MEDIAN = 20
MAX_SKIPPED_STEPS = 5  # in a row
RETRY = (
    "lower --learning_rate or lengthen the warm-up, from the start or from an earlier checkpoint "
    "(--resume RUN/checkpoints/step_000500 with another --output_dir), or try a more precise recipe"
)


class StepGuard:
    """Queue of step outcomes that the host has not read yet.

    A step's outcome is read after the next step is launched, so the GPU never waits for the host.
    """

    def __init__(self, cfg: OptimConfig, stack: Stack, progress: Progress, *, warn: Callable[[str], Any]):
        self.cfg, self.stack, self.progress, self.warn = cfg, stack, progress, warn
        self._unread: list[tuple[int, StepResult]] = []
        self._norms: deque[float] = deque(maxlen=100)  # gradient norms of the last applied steps

    def add(self, step: int, result: StepResult) -> None:
        self._unread.append((step, result))

    def read(self, *, all_steps: bool) -> tuple[bool, bool]:
        """Read the outcomes of all steps, or all but the newest.

        Return whether any rank received a stop signal, and whether a save was due on any by time.
        UserError after MAX_SKIPPED_STEPS skipped steps in a row. Those that lower the loss scale of
        FP16 do not raise it.
        """
        stop = save = False
        while len(self._unread) > (0 if all_steps else 1):
            step, result = self._unread.pop(0)
            self.stack.heartbeat(f"waiting for step {step}")
            applied, stop_requested, save_due, norm = result.read_flags()
            stop, save = stop or stop_requested > 0, save or save_due > 0
            if applied:
                self.progress.skipped_in_a_row = self.progress.overflows_in_a_row = 0
                self._warn_of_spike(step, norm)
            else:
                self._skip(step, result)
        return stop, save

    def _warn_of_spike(self, step: int, norm: float) -> None:
        """Warn about a gradient-norm spike. The step is still applied, with clipped gradients."""
        typical = median(self._norms) if len(self._norms) >= MIN_STEPS_FOR_MEDIAN else math.inf
        if 0 < GRAD_NORM_SPIKE_FACTOR * typical < norm:
            spike = f"gradient norm {norm:.3g} is {norm / typical:.0f} times the median"
            self.warn(f"WARNING: step {step}: {spike} of the last {len(self._norms)} steps")
        self._norms.append(norm)

    def _skip(self, step: int, result: StepResult) -> None:
        progress = self.progress
        progress.skipped_in_a_row += 1
        progress.skipped_steps += 1
        self.stack.scaling.scrub()
        loss, norm = result.loss.item(), result.grad_norm.item()
        scale = MINIMUM_SCALE if result.loss_scale is None else result.loss_scale.item()
        if math.isfinite(loss) and not math.isfinite(norm) and scale > MINIMUM_SCALE:
            progress.overflow_steps += 1
            progress.overflows_in_a_row += 1
            self.warn(f"step {step} skipped: FP16 overflow at loss scale {scale:,.0f}, which is halved")
            return
        # Steps without label tokens are skipped too; their loss and norm are finite.
        finite = math.isfinite(loss) and math.isfinite(norm)
        reason = "no label tokens" if finite else "non-finite"
        self.warn(f"step {step} skipped: {reason} (loss {loss}, gradient norm {norm})")
        failed_in_a_row = progress.skipped_in_a_row - progress.overflows_in_a_row
        if failed_in_a_row >= MAX_SKIPPED_STEPS:
            raise self._too_many_skipped(step, failed_in_a_row, without_labels=finite)

    def _too_many_skipped(self, step: int, in_a_row: int, *, without_labels: bool) -> UserError:
        lack, advice = "finite loss and gradient", RETRY
        if without_labels:
            lack, advice = "label tokens", "give other data"
        elif self.stack.strategy.loss_scale:
            reason = "values exceed FP16's 65,504 even without a loss scale"
            advice = f"{reason}: lower --learning_rate, or use --mixed_precision bf16"
        elif self.progress.skipped_steps == step:
            advice = "no step was applied: weights of --model_name may be damaged; try --mixed_precision bf16"
        where = f"or look at the data near step {step}"
        return self._error(f"{in_a_row} steps in a row had no {lack}; {advice}, {where}")

    def check_final(self, eval_loss: float) -> None:
        """Raise UserError if the evaluation of the final weights has no finite loss."""
        if not math.isfinite(eval_loss):
            raise self._error(f"the final weights have eval loss {eval_loss} and are not exported; {RETRY}")

    def _error(self, message: str) -> UserError:
        error = UserError(message, exit_code=EXIT_FAILED)
        # Raised on all ranks, so the report names none.
        error.ranks = dict.fromkeys(range(self.stack.strategy.topology.world_size))
        return error

"""FP8 scaling state of the loop: calibrated once, frozen in evaluation, scrubbed of NaN after a skip."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from training.precision import scaling_state


class Scaling:
    """Scaling state of a run without delayed scaling: there is none."""

    def prepare(self, batch: Any) -> None:
        """Create the state. Called with the first batch, before anything is computed. Collective."""

    def frozen(self) -> AbstractContextManager:
        """Return a context in which forward passes leave the state as it is."""
        return nullcontext()

    def scrub(self) -> None:
        """Remove non-finite values after a skipped step."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds, by name."""
        return {}


class DelayedScaling(Scaling):
    """Scales and amax histories of delayed scaling; `saved` is the checkpoint's state, if any."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Any,
        autocast: Callable[[], AbstractContextManager],
        *,
        micro_batches: int,
        saved: dict[str, Tensor],
    ):
        self.model, self.saved, self.prepared = model, saved, False
        self._calibrate = lambda batch: scaling_state.calibrate(
            model, wrapped, optimizer, strategy, autocast, batch, micro_batches
        )

    def prepare(self, batch: Any) -> None:
        if not self.prepared:
            self.prepared = True
            self._calibrate(batch)  # on a resume, too: it makes TE allocate the state
            scaling_state.restore_scaling(self.model, self.saved)

    def frozen(self) -> AbstractContextManager:
        return scaling_state.frozen_scaling(self.model)

    def scrub(self) -> None:
        scaling_state.scrub_scaling(self.model)

    def state(self) -> dict[str, Tensor]:
        # A launch without a step or an evaluation has created none.
        return scaling_state.scaling_state(self.model) or self.saved

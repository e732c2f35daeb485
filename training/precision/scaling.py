"""FP8 scaling state: scales and amax histories, which TE keeps outside parameters and buffers.

Only delayed scaling has such state. It is calibrated once, frozen during evaluation, cleared of non-finite
values after a skipped step, and saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fp8_suite.te_models.precision.scaling_state import (
    CALIBRATION_PASSES,
    first_tokens,
    frozen_scaling,
    restore_scaling,
    scale_gradients,
    scaling_state,
)
from fp8_suite.training.parallel.strategies import Strategy
from torch import Tensor, nn


class Scaling:
    """Empty scaling state, for runs without delayed scaling."""

    def prepare(self, batch: Any) -> None:
        """Calibrate, on the first call only. Call it before any other forward pass. Collective."""

    def frozen(self) -> AbstractContextManager:
        """Return a context in which forward passes leave the state unchanged."""
        return nullcontext()

    def scrub(self) -> None:
        """Clear non-finite values after a skipped step."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to checkpoint, by name."""
        return {}


@dataclass(kw_only=True)
class DelayedScalingState(Scaling):
    """Scales and amax histories of delayed scaling."""

    model: nn.Module
    wrapped: nn.Module  # the model in the strategy's wrapper
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    autocast: Callable[[], AbstractContextManager]
    micro_batches: int  # per step
    saved: dict[str, Tensor]  # state from the checkpoint, or empty
    prepared: bool = False

    def prepare(self, batch: Any) -> None:
        if not self.prepared:
            self.prepared = True
            self._calibrate(batch)  # also needed on resume: TE allocates the state in a forward pass
            restore_scaling(self.model, self.saved)

    def _calibrate(self, batch: Any) -> None:
        """Compute the initial scales from the beginning of one batch. Collective.

        No optimizer step is applied and the RNG state is restored. Backward runs on the summed loss, see
        `scale_gradients`.
        """
        strategy, wrapped, inputs = self.strategy, self.wrapped, first_tokens(batch.inputs)
        devices = [strategy.device] if strategy.device.type == "cuda" else []
        # Attention kernels advance the RNG even without dropout.
        with torch.random.fork_rng(devices):
            for _ in range(CALIBRATION_PASSES):
                with torch.enable_grad(), strategy.accumulating(wrapped, first=True, last=True):
                    with self.autocast():
                        loss, _ = wrapped(**inputs)
                    strategy.backward(wrapped, loss)
                strategy.discard(wrapped, self.optimizer)
        # Ranks share their scales, so all use the mean number of tokens.
        tokens = strategy.sum(torch.tensor(float(batch.label_tokens), device=strategy.device)).item()
        scale_gradients(self.model, 1 / max(1, tokens / strategy.world_size * self.micro_batches))

    def frozen(self) -> AbstractContextManager:
        return frozen_scaling(self.model)

    def scrub(self) -> None:
        # A non-finite amax would stay in the history.
        for name, tensor in scaling_state(self.model).items():
            if name.endswith("amax_history"):
                tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def state(self) -> dict[str, Tensor]:
        # TE has no state yet if this launch ran neither a step nor an evaluation.
        return scaling_state(self.model) or self.saved

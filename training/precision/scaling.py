"""FP8 scaling state: scales and amax histories, which TE keeps outside parameters and buffers.

Only delayed scaling has such state. It is calibrated once, frozen during evaluation, cleared of non-finite
values after a skipped step, and saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import EXIT_BAD_SETTING, UserError

CALIBRATION_PASSES = 2  # the second starts from the first one's scales, so nothing underflows on the way


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
        self._calibrate = lambda batch: calibrate(
            model, wrapped, optimizer, strategy, autocast, batch, micro_batches
        )

    def prepare(self, batch: Any) -> None:
        if not self.prepared:
            self.prepared = True
            self._calibrate(batch)  # on a resume, too: it makes TE allocate the state
            restore_scaling(self.model, self.saved)

    def frozen(self) -> AbstractContextManager:
        return frozen_scaling(self.model)

    def scrub(self) -> None:
        scrub_scaling(self.model)

    def state(self) -> dict[str, Tensor]:
        # A launch without a step or an evaluation has created none.
        return scaling_state(self.model) or self.saved


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return live references to every scale [N] and amax history [steps, N], float32, by name."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            tensors = getattr(module, "fp8_meta", {}).get(direction)
            for part in ("scale", "amax_history"):
                if isinstance(value := getattr(tensors, part, None), Tensor):
                    state[f"{name}.{direction}.{part}"] = value
    return state


def calibrate(
    model: nn.Module,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Any,
    autocast: Callable[[], AbstractContextManager],
    batch: Any,
    micro_batches: int,
) -> None:
    """Give delayed scaling its first scales from one of a step's `micro_batches`. Collective.

    Applies no step and leaves random numbers as they were. `scale_gradients` explains the summed loss.
    """
    devices = [strategy.device] if strategy.device.type == "cuda" else []
    # Attention kernels draw from the generator even without dropout.
    with torch.random.fork_rng(devices):
        for _ in range(CALIBRATION_PASSES):
            with torch.enable_grad(), strategy.accumulating(wrapped, first=True, last=True):
                with autocast():
                    loss, _ = wrapped(**batch.inputs)
                strategy.backward(wrapped, loss)
            strategy.discard(wrapped, optimizer)
    # Ranks share their scales, so they must share the factor: each rank's loss is divided by the mean.
    tokens = strategy.sum(torch.tensor(float(batch.label_tokens), device=strategy.device)).item()
    scale_gradients(model, 1 / max(1, tokens / strategy.world_size * micro_batches))


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float) -> None:
    """Turn the gradients' scales into those of a loss `factor` times as large; exact, as backward is linear.

    Delayed scaling starts from scales of 1. Gradients of a mean over 10,000 tokens are far below what E5M2
    holds at that scale: they underflow, one layer lower with every step, and the first gradients are wrong
    (1B Llama, first step: norm 2.73 instead of 11.4). So calibration uses the summed loss, whose gradients
    fit.
    """
    for name, tensor in scaling_state(model).items():
        if ".scaling_bwd." in name:
            tensor.mul_(factor if name.endswith("amax_history") else 1 / factor)


@torch.no_grad()
def restore_scaling(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy a checkpoint's scales and histories over those that TE allocated. UserError if names differ."""
    state = scaling_state(model)
    if saved and saved.keys() != state.keys():
        message = "--resume: the checkpoint's FP8 scaling state is of another model or TE version"
        raise UserError(message, flags=("resume",), exit_code=EXIT_BAD_SETTING)
    for name, tensor in saved.items():
        state[name].copy_(tensor)


@contextmanager
def frozen_scaling(model: nn.Module) -> Iterator[None]:
    """Undo what forward passes add to the amax histories: evaluation must not affect training."""
    saved = {name: tensor.clone() for name, tensor in scaling_state(model).items()}
    yield
    for name, tensor in scaling_state(model).items():
        if name in saved:
            tensor.copy_(saved[name])


def scrub_scaling(model: nn.Module) -> None:
    """Drop the non-finite amaxes of a skipped step; one would spoil its scale for a whole history."""
    for name, tensor in scaling_state(model).items():
        if name.endswith("amax_history"):
            tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

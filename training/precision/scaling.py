"""FP8 scaling state: scales and amax histories, which TE keeps outside parameters and buffers.

Only delayed scaling has such state. It is calibrated once, frozen during evaluation, cleared of non-finite
values after a skipped step, and saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.data.collate import IGNORE
from fp8_suite.training.parallel.strategies import Strategy
from torch import Tensor, nn

# The first pass runs with scales of 1, where gradients underflow; the second uses the scales of the first.
CALIBRATION_PASSES = 2
CALIBRATION_TOKENS = 16_384  # at most, per rank: a pass over a long micro-batch takes minutes
PER_TOKEN = ("input_ids", "labels", "position_ids")  # inputs of the model, [B, S]


class Scaling:
    """Empty scaling state, for runs without delayed scaling."""

    def prepare(self, batch: Any) -> None:
        """Calibrate, on the first call only. Call it before any other forward pass. Collective."""

    def frozen(self) -> AbstractContextManager:
        """Return a context in which forward passes leave the state unchanged."""
        return nullcontext()

    def scrub(self) -> None:
        """Clear non-finite values after a skipped step."""

    def scale_gradients(self, factor: float) -> None:
        """Follow a loss that is multiplied by `factor` from now on: a step divides by its label tokens."""

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
        strategy, wrapped = self.strategy, self.wrapped
        # Tensor parallelism needs equal parts of the tokens.
        multiple, cp = 128 * strategy.topology.tp, strategy.topology.cp
        part = beginning(batch.inputs, CALIBRATION_TOKENS // multiple * multiple, cp)
        labelled = _has_labels(part)
        if cp > 1:  # all ranks must take the same parts of the sequences that they share
            labelled = strategy.any(labelled)
        inputs = part if labelled else batch.inputs
        with strategy.keeping_rng():
            for _ in range(CALIBRATION_PASSES):
                with torch.enable_grad():
                    if strategy.topology.pp > 1:
                        strategy.run_pipeline(wrapped, [replace(batch, inputs=inputs)], self.autocast, 1.0)
                    else:
                        self._run(inputs)
                strategy.discard(wrapped, self.optimizer)
        # Ranks share their scales, so all use the mean number of tokens.
        tokens = strategy.sum(torch.tensor(float(batch.label_tokens), device=strategy.device)).item()
        self.scale_gradients(1 / max(1, tokens / strategy.topology.sum_size * self.micro_batches))

    def _run(self, inputs: dict[str, Any]) -> None:
        with self.strategy.accumulating(self.wrapped, first=True, last=True):
            with self.autocast():
                loss, _ = self.wrapped(**inputs)
            self.strategy.backward(self.wrapped, loss)

    def frozen(self) -> AbstractContextManager:
        return frozen_scaling(self.model)

    def scrub(self) -> None:
        # A non-finite amax would stay in the history.
        for name, tensor in scaling_state(self.model).items():
            if name.endswith("amax_history"):
                tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def scale_gradients(self, factor: float) -> None:
        scale_gradients(scaling_state(self.model), factor)

    def state(self) -> dict[str, Tensor]:
        """Collective under tensor parallelism.

        Under FSDP2, backward casts weights again. Each rank then knows the amaxes of its own parts only. TE
        reduces them in the next forward pass.
        """
        state = scaling_state(self.model)
        if state and (group := self.strategy.topology.tensor_group):
            histories = [tensor for name, tensor in state.items() if name.endswith("amax_history")]
            amaxes = torch.cat([tensor.flatten() for tensor in histories])
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
            parts = amaxes.split([tensor.numel() for tensor in histories])
            for tensor, part in zip(histories, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        # TE has no state yet if this launch ran neither a step nor an evaluation.
        return state or self.saved


def first_tokens(inputs: dict[str, Any], limit: int = CALIBRATION_TOKENS) -> dict[str, Any]:
    """Return the beginning of a micro-batch, or all of it if that has no labels. See `beginning`."""
    part = beginning(inputs, limit)
    return part if _has_labels(part) else inputs


def beginning(inputs: dict[str, Any], limit: int, context_size: int = 1) -> dict[str, Any]:
    """Return the first rows of a micro-batch, or the beginning of its first row, of at most `limit` tokens.

    `inputs`: see `data.collate.Batch`. If `context_size` ranks share each sequence, a sequence that is cut
    keeps the beginnings of this rank's two chunks, which are chunks of a shorter sequence (`data.context`).
    """
    rows, width = inputs["input_ids"].shape
    if rows * width <= limit:
        return inputs
    boundaries = inputs["cu_seqlens"] // context_size if "cu_seqlens" in inputs else torch.tensor([0, width])
    columns = torch.arange(min(limit, width))
    if width > limit and context_size > 1:
        start, end = boundaries[boundaries < limit].max().item(), boundaries[boundaries >= limit].min().item()
        columns[(start + limit) // 2 :] += (end - limit) // 2
    columns = columns.to(inputs["input_ids"].device)
    part = {name: inputs[name][: max(1, limit // width)][:, columns] for name in PER_TOKEN}
    if "cu_seqlens" in inputs:
        tokens = part["input_ids"].numel()
        starts = inputs["cu_seqlens"][boundaries < tokens]
        part["cu_seqlens"] = torch.cat([starts, starts.new_tensor([tokens * context_size])])
    return inputs | part


def _has_labels(inputs: dict[str, Any]) -> bool:
    return bool((inputs["labels"] != IGNORE).any())


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Return TE's live scales [n] and amax histories [steps, n] by name, float32, n tensors per module."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            tensors = getattr(module, "fp8_meta", {}).get(direction)
            for part in ("scale", "amax_history"):
                if isinstance(value := getattr(tensors, part, None), Tensor):
                    state[f"{name}.{direction}.{part}"] = value
    return state


@torch.no_grad()
def scale_gradients(state: dict[str, Tensor], factor: float) -> None:
    """Convert the gradients' scales and amaxes in place to those of a loss multiplied by `factor`.

    Exact, because backward is linear. Delayed scaling starts from scales of 1, where gradients of a loss
    averaged over 10,000 tokens underflow in E5M2, so the first gradients would be wrong (measured:
    docs/precision.md). Gradients of the summed loss do not underflow: calibration uses it.
    """
    for name, tensor in state.items():
        if ".scaling_bwd." in name:
            tensor.mul_(factor if name.endswith("amax_history") else 1 / factor)


@torch.no_grad()
def restore_scaling(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy a checkpoint's scales and amax histories into TE's. UserError if the names differ.

    Those that its run did not use, of FP8 weights, keep their calibrated values.
    """
    state = scaling_state(model)
    if saved and saved.keys() != state.keys():
        message = "--resume: the checkpoint's FP8 scaling state belongs to another model or TE version"
        raise UserError(message, flags=("resume",), exit_code=EXIT_BAD_SETTING)
    for name, tensor in saved.items():
        module, live = name.rpartition(".")[0], state[name]
        used = (saved[f"{module}.scale"] != 1) | saved[f"{module}.amax_history"].any(0)
        live.copy_(torch.where(used.to(live.device), tensor.to(live.device), live))


@contextmanager
def frozen_scaling(model: nn.Module) -> Iterator[None]:
    """Restore scales and amax histories on exit, so that evaluation does not affect training."""
    saved = {name: tensor.clone() for name, tensor in scaling_state(model).items()}
    yield
    for name, tensor in scaling_state(model).items():
        if name in saved:
            tensor.copy_(saved[name])

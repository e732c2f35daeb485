"""One optimizer step and one evaluation, for any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.precision.scaling import Scaling
from fp8_suite.training.tracking.metrics import perplexity
from torch import Tensor, nn

SIGNAL_CHECK_INTERVAL = 16  # evaluation batches between two all-reduces of the stop flag


@dataclass
class Stack:
    """Model, optimizer and what else a step computes with and changes.

    `wrapped(**batch.inputs)` returns (loss summed over label tokens, number of correct predictions).
    """

    wrapped: nn.Module  # the model in its strategy's wrapper
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    autocast: Callable[[], AbstractContextManager]
    learning_rate: Callable[[int], float]  # takes a 0-based step
    total_steps: int
    scaling: Scaling
    heartbeat: Callable[[str], None] = lambda doing: None  # sends this rank's next phase to the watchdog
    before_update: Callable[[], None] = lambda: None  # waits for a save that copies the state


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step. Reading the tensors waits for the GPU."""

    loss: Tensor  # mean over the global batch's label tokens, float32 scalar
    grad_norm: Tensor  # before clipping, float32 scalar
    learning_rate: float
    loss_scale: Tensor | None  # used in this step; None unless in FP16
    # Waits for this step only. Returns [applied, stop requested and save due on any rank, gradient norm].
    read_flags: Callable[[], list[float]]


def train_step(
    stack: Stack,
    micro_batches: list[Any],
    *,
    done: int,
    max_grad_norm: float,
    stop_requested: Callable[[], bool],
    save_due: Callable[[], bool],
) -> StepResult:
    """Run one optimizer step. The result does not depend on the split into micro-batches and ranks.

    `done` is the number of steps before this one. `save_due` is called before forward, `stop_requested` after
    backward, so that a signal during the step is not missed. The host waits for the GPU only with DeepSpeed.
    """
    strategy, optimizer = stack.strategy, stack.optimizer
    stack.heartbeat(f"computing step {done + 1}")
    learning_rate = stack.learning_rate(done)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    local_label_tokens = sum(batch.label_tokens for batch in micro_batches)
    counts = [torch.full((), float(n), device=strategy.device) for n in (local_label_tokens, save_due())]
    label_tokens, save = strategy.sum(torch.stack(counts)).unbind()
    divisor = label_tokens.clamp(min=1)
    factor = strategy.topology.sum_size / divisor  # ranks average gradients; sum_size undoes that
    loss_sum = torch.zeros((), device=strategy.device)
    if strategy.topology.pp > 1:
        loss_sum = strategy.run_pipeline(stack.wrapped, micro_batches, stack.autocast, factor)
    else:
        for i, batch in enumerate(micro_batches):
            with strategy.accumulating(stack.wrapped, first=i == 0, last=i == len(micro_batches) - 1):
                with stack.autocast():
                    micro_batch_loss, _ = stack.wrapped(**batch.inputs)  # summed over its label tokens
                strategy.backward(stack.wrapped, micro_batch_loss * factor)  # outside autocast
            loss_sum += micro_batch_loss.detach()
    stop = torch.full((), float(stop_requested()), device=strategy.device)
    total_loss, stop = strategy.sum(torch.stack([loss_sum, stop])).unbind()
    loss = total_loss / divisor
    stack.heartbeat(f"waiting for step {done + 1}")
    usable = loss.isfinite() & (label_tokens > 0)
    stack.before_update()
    loss_scale = strategy.loss_scale and strategy.loss_scale.value
    outcome = strategy.step(stack.wrapped, optimizer, usable=usable, max_norm=max_grad_norm)
    flags = outcome.applied, stop, save, outcome.grad_norm  # offloading strategies have them on the CPU
    read_flags = copy_to_host_async(torch.stack([flag.to(strategy.device, torch.float32) for flag in flags]))
    return StepResult(loss, outcome.grad_norm, learning_rate, loss_scale, read_flags)


def copy_to_host_async(values: Tensor) -> Callable[[], list[float]]:
    """Start a non-blocking device-to-host copy. The returned function waits for that copy only."""
    if values.device.type != "cuda":
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


@torch.no_grad()
def evaluate(
    stack: Stack, batches: Iterable[Any], *, stop_requested: Callable[[], bool]
) -> dict[str, float] | None:
    """Return loss, perplexity and token accuracy over all batches, weighted by label tokens.

    None if a stop signal arrived during the evaluation. Collective.
    """
    strategy, model = stack.strategy, stack.wrapped
    sums = torch.zeros(3, device=strategy.device, dtype=torch.float64)  # loss, correct, label tokens
    model.eval()
    on_device = (batch.to(strategy.device) for batch in batches)
    first = next(on_device)
    stack.scaling.prepare(first)  # allocates the FP8 state, which `frozen` saves
    # A resumed run does not repeat a finished evaluation.
    with strategy.keeping_rng(), stack.scaling.frozen():
        for i, batch in enumerate(chain([first], on_device)):
            stack.heartbeat("evaluating")
            check_stop = strategy.topology.world_size == 1 or i % SIGNAL_CHECK_INTERVAL == 0
            if check_stop and strategy.any(stop_requested()):
                break
            with stack.autocast():
                loss, correct = model(**batch.inputs)
            sums[0] += loss
            sums[1] += correct
            sums[2] += batch.label_tokens
    model.train()
    if strategy.any(stop_requested()):
        return None
    loss_sum, correct_sum, label_tokens = strategy.sum(sums).tolist()
    loss = loss_sum / max(label_tokens, 1)
    return {
        "eval/loss": loss,
        "eval/perplexity": perplexity(loss),
        "eval/token_accuracy": correct_sum / max(label_tokens, 1),
        "eval/label_tokens": label_tokens,
    }

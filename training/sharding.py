"""How the work is spread over devices: the few things that differ between one device and many.

A strategy shards the model, says when gradients are exchanged, and owns backward and the optimizer's step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: Tensor  # of all gradients together, before clipping; float32 scalar
    taken: bool  # False: something was not finite and neither weights nor optimizer changed


class SingleDevice:
    """Everything on one device."""

    rank, world_size, num_nodes = 0, 1, 1

    def __init__(self, device: torch.device):
        self.device = device

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager:
        """Around a micro-batch; all but the last may skip the exchange of gradients."""
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Clip to `max_norm` (0: do not) and step, if `usable` and the gradient is finite; zeroes gradients.

        Waits for the device once, since whether the step is taken must be known before it is.
        """
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = global_norm(gradients)
        taken, host_norm = torch.stack([(norm.isfinite() & usable).float(), norm]).tolist()
        if taken:
            if max_norm and host_norm > max_norm:
                torch._foreach_mul_(gradients, max_norm / host_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepOutcome(norm, bool(taken))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; every rank gets the same answer."""
        return flag


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all tensors, accumulated in float32 whatever their dtype."""
    if not gradients:
        raise RuntimeError("no parameter has a gradient: nothing of the model is trainable")
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
    )

"""AdamW over BF16 weights, with the 16 bits that they lack of FP32 kept beside them.

A step is one pass over memory: weight, remainder, gradient and moments are read once and written once (26
bytes a parameter with FP32 moments, 18 with BF16). Whether it is taken at all, and by how much gradients are
scaled, is read from the device, so that the host need not wait for the gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.optim.accumulation import gradient_of


class Hyper(NamedTuple):
    """What a step of one parameter group needs, as Python numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) over BF16 parameters, whole or sharded (DTensor).

    State of a parameter: `exp_avg`, `exp_avg_sq` in `moment_dtype`, and with `master_weights`
    `master_param`, int16: the low bits of the FP32 weight, see `split_master`. All arithmetic is FP32. A
    parameter that a model keeps in FP32 is its own master.
    """

    def __init__(
        self,
        groups: Iterable[dict],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        master_weights: bool,
        moment_dtype: torch.dtype,
    ):
        self.master_weights, self.moment_dtype = master_weights, moment_dtype
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        device = self.param_groups[0]["params"][0].device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)  # taken so far

    def initialize_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step, sharded as the parameter is."""
        state = self.state[parameter]
        state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
        if self.master_weights and parameter.dtype != torch.float32:
            state["master_param"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: Tensor | None = None,
        taken: Tensor | None = None,
    ) -> None:
        """Update from gradients times `scale`; nothing changes where `taken` is false. Both are scalars."""
        assert closure is None, "the loss is computed by the loop"
        device = self.steps.device
        taken = torch.ones((), device=device) if taken is None else taken.float()
        scale = torch.ones((), device=device) if scale is None else scale.float()
        self.steps += taken
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            # float64, and one more at least: before the first step taken the corrections would be 0.
            steps = self.steps.clamp(min=1)
            corrections = torch.stack([1 - beta1**steps, 1 - beta2**steps]).float()
            scalars = torch.cat([torch.stack([scale, taken]), corrections])
            hyper = Hyper(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                if (gradient := gradient_of(parameter)) is None:
                    continue
                state = self.state[parameter] or self.initialize_state(parameter)
                tensors = (parameter, gradient, *state.values())
                update_(*(local(t) for t in tensors), scalars=scalars, hyper=hyper)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; where torchao gathers a weight in FP8, the part that it is made from."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(part, "_tensor", part)


def update_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    remainder: Tensor | None = None,
    *,
    scalars: Tensor,
    hyper: Hyper,
) -> None:
    """One AdamW step in place, on contiguous tensors of one shape.

    `scalars` [4] float32: gradient scale, taken (0 or 1), 1 - beta1^t, 1 - beta2^t.
    """
    if weight.is_cuda:
        from training.optim.adamw_triton import adamw_

        return adamw_(weight, grad, exp_avg, exp_avg_sq, remainder, scalars=scalars, hyper=hyper)
    scale, taken, correction1, correction2 = scalars
    if not taken:
        return
    master = weight.float() if remainder is None else merge_master(weight, remainder)
    g = grad.float() * scale
    m = hyper.beta1 * exp_avg.float() + (1 - hyper.beta1) * g
    v = hyper.beta2 * exp_avg_sq.float() + (1 - hyper.beta2) * g * g
    step = (m / correction1) / ((v / correction2).sqrt() + hyper.eps)
    master = master - hyper.lr * (step + hyper.weight_decay * master)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if remainder is None:
        weight.copy_(master)
    else:
        high, low = split_master(master)
        weight.copy_(high)
        remainder.copy_(low)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 weights as BF16, rounded half up, and their low 16 bits as int16."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    high = (bits >> 16) + (remainder < 0).int()  # a remainder of a half and more has rounded up
    return high.to(torch.int16).view(torch.bfloat16), remainder


def merge_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Inverse of `split_master`, exact."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).int()
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)

"""AdamW on BF16 weights, with the low 16 bits of each FP32 master weight as a separate remainder.

A step is one pass over memory: 26 bytes per parameter with FP32 moments, 18 with BF16, 14 with FP8. The
kernel reads the gradient scale and the flag to apply the step from the device, so the host never waits for
the gradient norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.accumulation import gradient_of
from fp8_suite.training.optim.offload import WEIGHT, HostState, Update
from torch import Tensor
from torch.distributed.tensor import DTensor


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) on BF16 parameters, full or sharded (DTensor), with FP32 arithmetic.

    State per parameter: `exp_avg` and `exp_avg_sq` in the formats `moment_dtypes` (see `moments`); with
    `master_weights` also the int16 `master_param`, the low half of the FP32 weight (`split_master`). FP32
    parameters are their own masters. The state of TE's FP8 parameters has the BF16 `weight`, from which each
    step quantizes them; shards share a scale, so for them a step is a collective. With `offload` the state is
    in host memory (see `offload`).
    """

    def __init__(
        self,
        groups: Iterable[dict],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        master_weights: bool,
        moment_dtypes: tuple[str, str],
        offload: bool = False,
    ):
        self.master_weights, self.moment_dtypes = master_weights, moment_dtypes
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        device = self.param_groups[0]["params"][0].device
        self.steps = torch.zeros((), dtype=torch.float64, device=device)  # applied so far
        self.host = HostState(device) if offload else None

    def initialize_weight(self, parameter: Tensor) -> None:
        """Allocate the BF16 weight of an FP8 parameter, sharded like the parameter."""
        shard = local(parameter)
        device = torch.device("meta") if self.host else shard.device
        weight = torch.empty(shard.shape, dtype=torch.bfloat16, device=device)
        state = {WEIGHT: moments.with_layout(weight, parameter)}
        self.state[parameter] = self.host.place(state, beside={}) if self.host else state

    def initialize_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Allocate a parameter's state, sharded like the parameter; keep the weight of an FP8 one."""
        weight = self.state[parameter]
        like = weight.get(WEIGHT, parameter)
        if self.host:
            like = torch.empty_like(like, device="meta")
        state: dict[str, Tensor] = {}
        for moment, name in zip(moments.MOMENTS, self.moment_dtypes, strict=True):
            state |= moments.allocate(like, moment, name)
        if self.master_weights and parameter.dtype != torch.float32:
            state["master_param"] = torch.zeros_like(like, dtype=torch.int16)  # low half of the FP32 master
        self.state[parameter] = self.host.place(state, beside=weight) if self.host else weight | state
        return self.state[parameter]

    @torch.no_grad()
    def step(self, *, scale: Tensor | None = None, apply: Tensor | None = None) -> None:
        """Step with gradients times `scale` if `apply`. Both are scalars on the device."""
        device = self.steps.device
        apply = torch.ones((), device=device) if apply is None else apply.float()
        scale = torch.ones((), device=device) if scale is None else scale.float()
        self.steps += apply
        seeds = iter(self._seeds())
        with self._updating() as update:
            for group in self.param_groups:
                beta1, beta2 = group["betas"]
                steps = self.steps.clamp(min=1)  # at 0 steps the bias corrections would be 0
                corrections = torch.stack([1 - beta1**steps, 1 - beta2**steps]).float()
                scalars = torch.cat([torch.stack([scale, apply]), corrections])
                for parameter, seed in zip(group["params"], seeds, strict=False):
                    if (gradient := gradient_of(parameter)) is None:
                        continue
                    shard = {name: local(tensor) for name, tensor in self.state[parameter].items()}
                    weight = local(parameter)
                    updated = shard.get(WEIGHT, weight)
                    if self.host and WEIGHT in shard:
                        updated = torch.empty_like(updated, device=device)
                    update(updated, local(gradient), shard, scalars, seed, group)
                    if updated is not weight:
                        weight.quantize_(updated)  # after all chunks: the scale needs all values

    def _seeds(self) -> Tensor:
        """Return an int64 seed per parameter, in the order of the groups; different in every step.

        The seeds are 16 bytes apart, because Triton compiles a kernel again for other alignments.
        """
        count = sum(len(group["params"]) for group in self.param_groups)
        numbers = torch.arange(2 * count, device=self.steps.device) // 2
        # These are primes of xxHash; `moments.INDEX_FACTOR` would shift the bits by one.
        primes = 0x85EBCA77, 0xC2B2AE3D
        return (self.steps.long() * primes[0] + numbers * primes[1])[::2]

    def _updating(self) -> AbstractContextManager[Update]:
        """Return a context that yields the function to step a parameter; it streams offloaded state."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if gradient_of(parameter) is not None and moments.FIRST not in self.state[parameter]:
                self.initialize_state(parameter)
        return self.host.streaming(update_) if self.host else nullcontext(update_)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, without torchao's FP8 all-gather wrapper."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(part, "_tensor", part)


def update_(
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    scalars: Tensor,
    seed: Tensor,
    group: dict[str, Any],
) -> None:
    """Apply one AdamW step in place to contiguous shards of one parameter; the CPU path is the reference.

    `scalars` [4] float32: gradient scale, apply (0 or 1), 1 - beta1^t, 1 - beta2^t. `seed` [] int64: of the
    moments' stochastic rounding. `group` holds the other hyperparameters. Without a remainder
    (`master_param`) the weight is its own master.
    """
    if weight.is_cuda:
        from fp8_suite.training.optim.adamw_triton import adamw_

        return adamw_(weight, grad, state, scalars, seed, group)
    remainder = state.get("master_param")
    scale, apply, correction1, correction2 = scalars
    if not apply:
        return
    lr, (beta1, beta2), eps, weight_decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    master = weight.float() if remainder is None else merge_master(weight, remainder)
    g = grad.float() * scale
    m = beta1 * moments.read(state, moments.FIRST) + (1 - beta1) * g
    v = beta2 * moments.read(state, moments.SECOND) + (1 - beta2) * g * g
    step = (m / correction1) / ((v / correction2).sqrt() + eps)
    master = master - lr * (step + weight_decay * master)
    for moment, value, noise in zip(moments.MOMENTS, (m, v), _noise(state, seed), strict=True):
        moments.write_(state, moment, value, noise)
    if remainder is None:
        weight.copy_(master)
    else:
        high, low = split_master(master)
        weight.copy_(high)
        remainder.copy_(low)


def _noise(state: dict[str, Tensor], seed: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the random bits of both moments, or None if neither is stored in blocks."""
    if not any(name.endswith(moments.EXPONENTS) for name in state):
        return None, None
    shape = state[moments.FIRST].shape
    first, second = moments.random_bits(shape.numel(), seed)
    return first.view(shape), second.view(shape)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split FP32 weights into BF16, rounded half up, and their low 16 bits as int16."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    high = (bits >> 16) + (remainder < 0).int()  # round up if the low half is at least 0x8000
    return high.to(torch.int16).view(torch.bfloat16), remainder


def merge_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Invert `split_master` exactly."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).int()
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)

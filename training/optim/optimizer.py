"""AdamW with FP32 master weights, and the learning-rate schedule.

At a weight near 0.02 a BF16 step is 6e-5, so a learning rate of 1e-5 rounds to nothing: weights must be kept
in FP32 somewhere. On a GPU that is a 16-bit remainder beside each BF16 weight (the two together are the FP32
weight, bit by bit, in 4 bytes); elsewhere the parameters are FP32.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from training.optim.adamw import FusedAdamW
from training.optim.settings import OptimConfig
from training.precision.settings import PrecisionConfig


@dataclass(frozen=True)
class OptimizerPlan:
    """Which optimizer, over parameters of which dtype."""

    kind: Literal["fused_adamw", "te_fused_adam", "torch_adamw", "zero_adamw"]
    parameter_dtype: torch.dtype
    master_weights: bool
    moment_dtype: torch.dtype

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of weight, gradient and optimizer state."""
        masters = {"fused_adamw": 2, "zero_adamw": 4}.get(self.kind, 0) * self.master_weights
        return 2 * self.parameter_dtype.itemsize + masters + 2 * self.moment_dtype.itemsize

    def describe(self) -> str:
        name = {"fused_adamw": "fused AdamW", "te_fused_adam": "TE FusedAdam"}.get(self.kind, "torch AdamW")
        weights = {
            ("fused_adamw", True): "BF16 weights with FP32 masters",
            ("te_fused_adam", True): "FP8 weights with FP32 masters",
            ("torch_adamw", True): "FP32 weights",
            ("zero_adamw", True): "FP32 masters in ZeRO",
        }.get((self.kind, self.master_weights), "BF16 weights, no masters")
        return f"{name}, {weights}, {str(self.moment_dtype).removeprefix('torch.')} moments"


MASTER_NONE_WARNING = (
    "WARNING: --master_weights none keeps weights in BF16 alone: near 0.02 their step is 6e-5, so updates "
    "of a small learning rate round to nothing (1B from random weights, 250 steps at 1e-5: loss 6.64, "
    "against 3.38 with masters)"
)

BF16_MOMENTS_LONGEST_BETA2 = 0.99


def moment_warning(plan: OptimizerPlan, beta2: float) -> str | None:
    """What to say of a second moment that cannot follow `beta2`; None if it can."""
    if plan.moment_dtype != torch.bfloat16 or beta2 <= BF16_MOMENTS_LONGEST_BETA2:
        return None
    return (
        f"WARNING: --adam_beta2 {beta2:g} with BF16 moments: BF16 rounds a fall of less than 0.4 % a step "
        "away, so the second moment never falls, and once gradients are smaller updates stay too small; use "
        f"--adam_beta2 {BF16_MOMENTS_LONGEST_BETA2} or less, or FP32 moments"
    )


def plan_optimizer(
    cfg: PrecisionConfig, *, on_gpu: bool, master_home: Literal["device", "cpu", "zero"] = "device"
) -> OptimizerPlan:
    """Choose optimizer and parameter dtype. ValueError for a moment dtype that the optimizer cannot hold.

    `master_home`: FP32 weights on the device, on the CPU beside a GPU, or kept by ZeRO.
    """
    moments = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.moment_dtype]
    master = cfg.master_weights == "fp32"
    full = cfg.mixed_precision == "fp32"
    if on_gpu and not full and master_home == "device":
        return OptimizerPlan("fused_adamw", torch.bfloat16, master, moments)
    if master_home == "zero":
        if not master:
            raise ValueError(
                "--master_weights none: DeepSpeed always has FP32 masters; use another --sharding_mode"
            )
        kept, plan = torch.float32, ("zero_adamw", torch.float32 if full else torch.bfloat16, True)
    else:
        kept = torch.float32 if master or full else torch.bfloat16
        plan = ("torch_adamw", kept, kept == torch.float32)
    if moments != kept == torch.bfloat16:
        raise ValueError(
            f"--master_weights none --moment_dtype {cfg.moment_dtype}: torch AdamW, which steps here, keeps "
            "moments in the weights' BF16; add --moment_dtype bf16, or leave --master_weights at fp32"
        )
    if moments != kept:
        raise ValueError(
            f"--moment_dtype {cfg.moment_dtype}: torch AdamW keeps moments in the weights' {kept}; other "
            "moments need a GPU, --mixed_precision bf16 or fp8, and a --sharding_mode without offload or "
            "DeepSpeed"
        )
    return OptimizerPlan(*plan, moments)


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Weight decay on everything but norms and biases, which are the vectors among the parameters."""
    decayed, plain = [], []
    for parameter in parameters:
        (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, cfg: OptimConfig, plan: OptimizerPlan) -> torch.optim.Optimizer:
    groups = parameter_groups(model.parameters(), cfg.weight_decay)
    common = {"lr": cfg.learning_rate, "betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon}
    if plan.kind == "fused_adamw":
        return FusedAdamW(
            groups, **common, master_weights=plan.master_weights, moment_dtype=plan.moment_dtype
        )
    if plan.kind != "te_fused_adam":
        return torch.optim.AdamW(groups, **common, fused=True)
    # Only TE's own knows how to step weights that are in FP8.
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    return optimizers.FusedAdam(
        groups,
        **common,
        master_weights=plan.master_weights,
        exp_avg_dtype=plan.moment_dtype,
        exp_avg_sq_dtype=plan.moment_dtype,
    )


def step_if(
    optimizer: torch.optim.Optimizer, *, taken: Tensor, scale: Tensor, gradients: list[Tensor]
) -> None:
    """Step from gradients times `scale` where `taken`; both are scalars on the device."""
    if isinstance(optimizer, FusedAdamW):
        optimizer.step(scale=scale, taken=taken)
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        # How torch's fused optimizers take what a gradient scaler found.
        optimizer.grad_scale, optimizer.found_inf = 1 / scale, (~taken).float()
        optimizer.step()
    elif taken:
        torch._foreach_mul_(gradients, scale)
        optimizer.step()


def learning_rate(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Learning rate of 0-based `step`: linear warm-up to the peak, then the scheduler's shape to the end."""
    warmup = cfg.num_warmup_steps
    if warmup is None:
        warmup = math.ceil(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    if cfg.lr_scheduler == "constant":
        return cfg.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.lr_scheduler == "cosine" else 1 - progress
    return cfg.learning_rate * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Live references to every state tensor as `<parameter>.<state>`, in the dtypes the optimizer keeps.

    Allocates the state where no step has been taken yet, so that a checkpoint can be loaded into it. torch
    AdamW's step counts are left out, see `optimizer_steps`. (The state_dict of TE's FusedAdam would cast BF16
    moments to float32: 32 GB more for an 8B model.)
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        kept = state_of(optimizer, parameter)
        state.update({f"{name}.{key}": value for key, value in kept.items() if key != "step"})
    return state


def master_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The whole FP32 master of a parameter, if the optimizer keeps one."""
    master = optimizer.state.get(parameter, {}).get("master_param")
    return master if master is not None and master.dtype == torch.float32 else None


@torch.no_grad()
def set_masters(optimizer: torch.optim.Optimizer, model: nn.Module, shards: dict[str, Tensor]) -> None:
    """Start these parameters' whole masters from this rank's shards of the weights before quantization."""
    for name, parameter in model.named_parameters():
        state = state_of(optimizer, parameter)
        if name in shards:
            state["master_param"].to_local().copy_(shards[name])


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter's state; made here as the first step would, so that it can be read and filled before."""
    if optimizer.state[parameter]:
        return optimizer.state[parameter]
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    elif isinstance(optimizer, FusedAdamW):
        optimizer.initialize_state(parameter)
    else:
        optimizer.initialize_state(parameter, False)
    return optimizer.state[parameter]


def optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps taken, which Adam's bias correction needs; counted by group or by parameter."""
    if isinstance(optimizer, torch.optim.AdamW):
        return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    if isinstance(optimizer, FusedAdamW):
        return int(optimizer.steps)
    return int(optimizer.param_groups[0].get("step", 0))


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    if isinstance(optimizer, torch.optim.AdamW):
        for state in optimizer.state.values():
            state["step"].fill_(steps)
    elif isinstance(optimizer, FusedAdamW):
        optimizer.steps.fill_(steps)
    elif steps:
        for group in optimizer.param_groups:
            group["step"] = steps

"""AdamW with FP32 master weights, and the learning-rate schedule.

At a weight near 0.02 a BF16 step is 6e-5, so a learning rate of 1e-5 rounds to nothing: weights must be kept
in FP32 somewhere. On a GPU with Transformer Engine that is FusedAdam's 16-bit remainder beside each BF16
weight (the two together are the FP32 weight, bit by bit, in 4 bytes); otherwise the parameters are FP32.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from training.config import OptimConfig, PrecisionConfig


@dataclass(frozen=True)
class OptimizerPlan:
    """Which optimizer, over parameters of which dtype."""

    kind: Literal["te_fused_adam", "torch_adamw", "zero_adamw"]
    parameter_dtype: torch.dtype
    master_weights: bool
    moment_dtype: torch.dtype
    whole_masters: bool = False  # FP32 beside weights in FP8, instead of the bits that BF16 lacks

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of weight, gradient and optimizer state."""
        remainder = 2 if self.kind == "te_fused_adam" and self.master_weights else 0
        return 2 * self.parameter_dtype.itemsize + remainder + 2 * self.moment_dtype.itemsize

    def describe(self) -> str:
        name = {"te_fused_adam": "TE FusedAdam"}.get(self.kind, "torch AdamW")
        weights = {
            ("te_fused_adam", True): f"{'FP8' if self.whole_masters else 'BF16'} weights with FP32 masters",
            ("torch_adamw", True): "FP32 weights",
            ("zero_adamw", True): "FP32 masters in ZeRO",
        }.get((self.kind, self.master_weights), "BF16 weights, no masters")
        return f"{name}, {weights}, {str(self.moment_dtype).removeprefix('torch.')} moments"


MASTER_NONE_WARNING = (
    "WARNING: --master_weights none keeps weights in BF16 alone: near 0.02 their step is 6e-5, so updates "
    "of a small learning rate round to nothing (1B from random weights, 250 steps at 1e-5: loss 9.14, "
    "against 5.48 with masters)"
)


def plan_optimizer(
    cfg: PrecisionConfig, *, te_available: bool, master_home: Literal["device", "cpu", "zero"] = "device"
) -> OptimizerPlan:
    """Choose optimizer and parameter dtype. ValueError for a moment dtype that the optimizer cannot hold.

    `master_home`: FP32 weights on the GPU, on the CPU (where TE's optimizer cannot step), or kept by ZeRO.
    """
    moments = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.moment_dtype]
    master = cfg.master_weights == "fp32"
    full = cfg.mixed_precision == "fp32"
    if te_available and not full and master_home == "device":
        return OptimizerPlan("te_fused_adam", torch.bfloat16, master, moments)
    if master_home == "zero":
        if not master:
            raise ValueError(
                "--master_weights none: DeepSpeed always has FP32 masters; use another --sharding_mode"
            )
        kept, plan = torch.float32, ("zero_adamw", torch.float32 if full else torch.bfloat16, True)
    else:
        kept = torch.float32 if master or full else torch.bfloat16
        plan = ("torch_adamw", kept, kept == torch.float32)
    if moments != kept:
        raise ValueError(
            f"--moment_dtype {cfg.moment_dtype}: torch AdamW keeps moments in the weights' {kept}; other "
            "moments need Transformer Engine's FusedAdam: a CUDA GPU, TE, --mixed_precision bf16 or fp8, and "
            "a --sharding_mode without offload or DeepSpeed"
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
    if plan.kind != "te_fused_adam":
        return torch.optim.AdamW(groups, **common, fused=True)
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    return optimizers.FusedAdam(
        groups,
        **common,
        master_weights=plan.master_weights,
        store_param_remainders=plan.master_weights and not plan.whole_masters,
        exp_avg_dtype=plan.moment_dtype,
        exp_avg_sq_dtype=plan.moment_dtype,
    )


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


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 weights as TE's FusedAdam keeps them: BF16, rounded half up, and the low 16 bits as int16."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    high = (bits >> 16) + (remainder < 0).int()  # a remainder of a half and more has rounded up
    return high.to(torch.int16).view(torch.bfloat16), remainder


def merge_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Inverse of `split_master`, exact."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).int()
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Live references to every state tensor as `<parameter>.<state>`, in the dtypes the optimizer keeps.

    Allocates the state where no step has been taken yet, so that a checkpoint can be loaded into it. torch
    AdamW's step counts are left out, see `optimizer_steps`. (FusedAdam's own state_dict would cast BF16
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
    else:
        remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, remainders)
    return optimizer.state[parameter]


def optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps taken, which Adam's bias correction needs; counted by group or by parameter."""
    if isinstance(optimizer, torch.optim.AdamW):
        return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    return int(optimizer.param_groups[0].get("step", 0))


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    if isinstance(optimizer, torch.optim.AdamW):
        for state in optimizer.state.values():
            state["step"].fill_(steps)
    elif steps:
        for group in optimizer.param_groups:
            group["step"] = steps

"""Choice of the AdamW implementation, and access to its state.

BF16 spacing at a weight of 0.02 is 6e-5, so an update of 1e-5 is lost; training needs FP32 master weights. On
a GPU each BF16 weight has a 16-bit remainder, and both together are the exact FP32 weight (`adamw`).
Otherwise, and in FP16, the parameters are FP32; DeepSpeed has BF16 parameters and its own masters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.te_models.quantized.noise import seed_of
from fp8_suite.te_models.weights import first_row
from fp8_suite.training.config import Config
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.adamw import MasterAdamW, local
from fp8_suite.training.optim.offload import WEIGHT
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.parallel.settings import MODES
from fp8_suite.training.precision.settings import parse_moment_dtype
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Kind(NamedTuple):
    """An AdamW implementation."""

    name: str
    weights: str  # its weights and masters, for the log
    master_bytes: int  # per parameter, stored in addition to the parameters


KINDS = {
    "fused_adamw": Kind("fused AdamW", "BF16 weights with FP32 masters", 2),
    "torch_adamw": Kind("torch AdamW", "FP32 weights", 0),
    "plain_adamw": Kind("plain AdamW", "FP32 weights", 0),
    "zero_adamw": Kind("torch AdamW", "FP32 masters in ZeRO", 4),
}


@dataclass(frozen=True)
class OptimizerSpec:
    """Optimizer of a run and the dtypes of weights and moments."""

    kind: str  # a key of KINDS
    parameter_dtype: torch.dtype
    master_weights: bool
    moment_dtypes: tuple[str, str]  # keys of moments.FORMATS
    offload: bool = False  # masters and moments are in host memory
    holds_fp8_weights: bool = False  # in place of BF16: --fp8_weights, or TE's --fp8_all_gather
    adapters: bool = False  # only LoRA's adapters train; the weights are frozen

    @property
    def master_bytes(self) -> int:
        """Bytes per parameter of the master, in addition to the weight."""
        return KINDS[self.kind].master_bytes * self.master_weights

    @property
    def moment_bytes(self) -> float:
        """Bytes per parameter of both moments."""
        return sum(moments.FORMATS[name].bytes for name in self.moment_dtypes)

    def describe(self) -> str:
        """Summarize for the log: optimizer, weights and moments."""
        name, weights, _ = KINDS[self.kind]
        in_fp8 = self.holds_fp8_weights
        weights = "FP8 weights with FP32 masters" if in_fp8 and not self.adapters else weights
        weights = weights if self.master_weights else "BF16 weights, no masters"
        if self.adapters:
            weights = weights.replace("weights", "adapters") + " over frozen FP8 weights" * in_fp8
        formats = " and ".join(dict.fromkeys(map(str.upper, self.moment_dtypes)))
        return f"{name}, {weights}, {formats} moments{', offloaded' * self.offload}"


SPREAD_AT_ONCE = 2**21  # masters; each takes about 50 bytes meanwhile, beside gradients if offloaded
MASTER_NONE_WARNING = (
    "WARNING: --master_weights none keeps weights in BF16 only: BF16 spacing near 0.02 is 6e-5, so updates "
    "with a small learning rate are lost (1B from random weights, 250 steps at 1e-5: loss 6.64, with "
    "masters 3.38)"
)
LARGEST_BETA2_IN_BF16 = 0.99


def moment_warning(spec: OptimizerSpec, beta2: float) -> str | None:
    """Return a warning if BF16 moments cannot represent the decay of `beta2`, else None."""
    if spec.moment_dtypes[1] != "bf16" or beta2 <= LARGEST_BETA2_IN_BF16:
        return None
    return (
        f"WARNING: --adam_beta2 {beta2:g}: BF16 moments round away a decay of less than 0.4 % a step, so the "
        "second moment never shrinks and updates stay too small; use --moment_dtype fp8, fp16 or fp32"
    )


def choose_optimizer(cfg: Config, mode: str, *, on_gpu: bool) -> OptimizerSpec:
    """Choose the optimizer, and the dtypes of weights and moments, for a sharding mode.

    UserError for dtypes that the optimizer does not support.
    """
    settings, engine = cfg.precision, MODES[mode].engine
    stored = parse_moment_dtype(settings.moment_dtype)
    masters = settings.master_weights == "fp32"
    # FP16 is no half of FP32: its runs keep the FP32 weights, and cast them in each forward pass.
    full = settings.mixed_precision in ("fp16", "fp32")
    offload = cfg.sharding.offload_optimizer and engine != "zero"
    if on_gpu and not full and engine != "zero":
        in_shards = cfg.sharding.fp8_all_gather and cfg.model.use_te and engine == "fsdp"
        in_fp8 = settings.fp8_weights or in_shards
        lora = cfg.lora.enabled
        return OptimizerSpec("fused_adamw", torch.bfloat16, masters, stored, offload, in_fp8, adapters=lora)
    if engine == "zero":
        if not masters:
            raise bad_setting("DeepSpeed always has FP32 masters; drop it", master_weights="none")
        if stored != ("fp32", "fp32"):
            raise bad_setting("DeepSpeed keeps FP32 moments; drop it", moment_dtype=settings.moment_dtype)
        return OptimizerSpec("zero_adamw", torch.float32 if full else torch.bfloat16, True, stored)
    dtype = torch.float32 if masters or full else torch.bfloat16
    same = stored == (("fp32", "fp32") if dtype == torch.float32 else ("bf16", "bf16"))
    if on_gpu and offload and same:
        reason = (
            "torch's AdamW, which steps FP32 weights with FP32 moments, keeps its state on the GPU; drop it"
        )
        raise bad_setting(reason, offload_optimizer=True)
    kind = "torch_adamw" if same else "plain_adamw"
    masters, offload = dtype == torch.float32, offload and not same
    return OptimizerSpec(kind, dtype, masters, stored, offload, adapters=cfg.lora.enabled)


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Group parameters: weight decay for matrices, none for vectors (norms and biases)."""
    decayed, plain = [], []
    for parameter in parameters:
        (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; the others are frozen."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def build_optimizer(model: nn.Module, cfg: OptimConfig, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Build the chosen optimizer over the model's trainable parameters."""
    groups = parameter_groups(trainable(model).values(), cfg.weight_decay)
    common = {"lr": cfg.learning_rate, "betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon}
    if spec.kind in ("fused_adamw", "plain_adamw"):
        dtypes = {"master_weights": spec.master_weights, "moment_dtypes": spec.moment_dtypes}
        return MasterAdamW(groups, **common, **dtypes, offload=spec.offload)
    return torch.optim.AdamW(groups, **common, fused=True)


def step_if(optimizer: torch.optim.Optimizer, *, apply: Tensor, scale: Tensor) -> None:
    """Step with gradients times `scale` if `apply`. Both are scalars on the device."""
    if isinstance(optimizer, MasterAdamW):
        optimizer.step(scale=scale, apply=apply)
    else:  # interface between torch's fused optimizers and GradScaler
        optimizer.grad_scale, optimizer.found_inf = 1 / scale, (~apply).float()
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter's live optimizer state, allocated if necessary."""
    if optimizer.state[parameter].keys() - {WEIGHT}:
        return optimizer.state[parameter]
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    else:
        optimizer.initialize_state(parameter)
    return optimizer.state[parameter]


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return live references to all state tensors as `<parameter>.<state>`, allocated if necessary.

    Step counts and weights are excluded, see `optimizer_steps` and `weight_of`.
    """
    if isinstance(optimizer, MasterAdamW) and optimizer.host:
        optimizer.host.api.synchronize()  # host memory may lack the results of the last step
    state: dict[str, Tensor] = {}
    for name, parameter in trainable(model).items():
        tensors = state_of(optimizer, parameter)
        state |= {f"{name}.{key}": value for key, value in tensors.items() if key not in ("step", WEIGHT)}
    return state


def weight_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return a parameter, or the BF16 weight from which an FP8 parameter is quantized."""
    return optimizer.state.get(parameter, {}).get(WEIGHT, parameter)


@torch.no_grad()
def set_weights(optimizer: torch.optim.Optimizer, model: nn.Module, shards: dict[str, Tensor]) -> None:
    """Initialize the BF16 weights of FP8 parameters from `shards`, this rank's shards by name."""
    for name in shards:
        optimizer.initialize_weight(model.get_parameter(name))
    if shards and optimizer.host:
        optimizer.host.wait_until_locked()
    for name, shard in shards.items():
        local(weight_of(optimizer, model.get_parameter(name))).copy_(shard)


def take_low_halves(model: nn.Module, *, offload: bool) -> dict[str, Tensor]:
    """Remove from parameters the `low_half` that loading left there; return them by name."""
    parameters = dict(model.named_parameters())
    low_halves = {name: vars(p).pop("low_half") for name, p in parameters.items() if hasattr(p, "low_half")}
    return {name: low.cpu() if offload else low for name, low in low_halves.items()}


@torch.no_grad()
def set_low_halves(optimizer: torch.optim.Optimizer, model: nn.Module, low_halves: dict[str, Tensor]) -> None:
    """Initialize the low halves of masters, this rank's shards by name, and empty `low_halves`."""
    for name in list(low_halves):
        state = state_of(optimizer, model.get_parameter(name))
        local(state["master_param"]).copy_(low_halves.pop(name))


def spread_masters(
    optimizer: MasterAdamW, model: nn.Module, seed: int, exact: Collection[str] = frozenset()
) -> None:
    """Start FP32 masters, except `exact` ones, anywhere in the interval that rounds to their BF16 weight.

    A checkpoint's weights are in the middle of these intervals. From there a weight changes only when its
    updates add up to half the BF16 spacing: after 30 to 60 updates of 1e-6 at a weight near 0.02. What is
    added is what rounding to BF16 took away, so no forward pass changes. Zeros stay zeros. Offloaded masters
    are spread in the first step, which waits for page-locking anyway.
    """
    state = optimizer_state(optimizer, model)
    regions = getattr(model, "regions", {})  # parts of weights under tensor parallelism

    @torch.no_grad()
    def spread() -> None:
        for name, parameter in trainable(model).items():
            if name in exact or f"{name}.master_param" not in state:  # FP32 parameters are their own masters
                continue
            low = local(state[f"{name}.master_param"]).view(-1)
            weight = local(weight_of(optimizer, parameter)).reshape(-1)
            # The same for an element in every sharding, so equal on replicas.
            start = first_row(parameter) * prod(parameter.shape[1:]) if isinstance(parameter, DTensor) else 0
            part = regions[name].rank if name in regions else 0
            key = torch.tensor(seed_of(seed, f"{name}/master/{part}"), device=parameter.device)
            for first in range(0, len(low), SPREAD_AT_ONCE):
                zero = weight[first : first + SPREAD_AT_ONCE].to(parameter.device) == 0
                bits, _ = moments.random_bits(len(zero), moments.seed_at(key, start + first))
                low[first : first + SPREAD_AT_ONCE].copy_((bits >> 16).short().masked_fill_(zero, 0))

    if optimizer.host:
        optimizer.host.when_locked(spread)
    else:
        spread()


def optimizer_steps(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of applied steps, for Adam's bias correction."""
    if isinstance(optimizer, torch.optim.AdamW):  # counts per parameter
        return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    return int(optimizer.steps)


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Restore the number of applied steps."""
    if isinstance(optimizer, torch.optim.AdamW):
        for state in optimizer.state.values():
            state["step"].fill_(steps)
    else:
        optimizer.steps.fill_(steps)

"""DeepSpeed's configuration: how to shard comes from a JSON file, everything else from the flags.

A value in the file that contradicts a flag is refused: a command is the same run in every sharding mode.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from typing import Any

import torch

from core.errors import UserError, bad_setting
from core.settings import nearest
from training.config import Config
from training.parallel.settings import MODES, read_deepspeed_config

DEEPSPEED = "deepspeed==0.19.8"
CONFIGS = {name: f"ds_configs/{name.removeprefix('ds_')}.json" for name, mode in MODES.items() if mode.stage}
# Sections that change nothing but speed, memory or DeepSpeed's own output.
FREE = ("zero_optimization", "comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown")
# Parts of zero_optimization that would change what a run computes, or that `zero.Zero` has no support for:
# the only accepted value.
FIXED = {
    "zenflow": None,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "compute_grad_norm": True,
    "zero_hpz_partition_size": 1,
}


def merge_settings(
    path_or_short_name: str, cfg: Config, world_size: int, parameter_dtype: torch.dtype
) -> dict[str, Any]:
    """Return DeepSpeed's configuration from a key of `CONFIGS` or a JSON file, and the flags."""
    path = CONFIGS.get(path_or_short_name, path_or_short_name)
    given = read_deepspeed_config(path)
    decided = _decided(cfg, world_size, parameter_dtype)
    for key in given.keys() - set(FREE):
        value = given[key]
        off = isinstance(value, dict) and value.get("enabled") in (False, "auto")
        if not (_agrees(value, decided[key]) if key in decided else off):
            by = f"flags set it to {json.dumps(decided[key])}" if key in decided else "only flags set it"
            hint = "" if key in decided else nearest(key, [*FREE, *decided])
            raise bad_setting(
                f"{key} is {json.dumps(value)}, but {by}{hint}; drop it: this file sets how to shard "
                "(zero_optimization)",
                deepspeed_config=path,
            )
    zero = _check_zero(given.get("zero_optimization"), path)
    return {key: given[key] for key in FREE if key in given} | {"zero_optimization": zero} | decided


def _agrees(value: Any, decided: Any) -> bool:
    if isinstance(value, dict) and isinstance(decided, dict):
        return all(_agrees(inner, decided.get(name)) for name, inner in value.items())
    return value in ("auto", decided)


def _decided(cfg: Config, world_size: int, parameter_dtype: torch.dtype) -> dict[str, Any]:
    """Return what flags decide, in DeepSpeed's terms."""
    micro, steps = cfg.optim.batch_size, cfg.optim.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * world_size,
        "gradient_clipping": cfg.optim.max_grad_norm,
        # The default is the weights' dtype: BF16 sums, which lose what one rank adds to many.
        "communication_data_type": cfg.sharding.grad_reduce_dtype,
        # Sums of several micro-batches need FP32; one gradient, reduced, is no more exact than its terms.
        "data_types": {"grad_accum_dtype": "fp32" if steps > 1 else None},
        # Without the check a step with a non-finite gradient would be applied. Immediate: ZeRO 1 frees each
        # gradient once it is in the FP32 sums of several micro-batches, instead of in the step.
        "bf16": {
            "enabled": parameter_dtype == torch.bfloat16,
            "check_grad_overflow": True,
            "immediate_grad_update": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own compiles a C++ extension at the first start
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # synchronizes the device before every forward pass
    }


def _check_zero(zero: Any, path: str) -> dict[str, Any]:
    """Return zero_optimization without "auto". Refuse what DeepSpeed would, before weights are read."""

    def refuse(key: str, reason: str) -> UserError:
        return bad_setting(f"zero_optimization.{key} {reason}", deepspeed_config=path)

    stage = zero.get("stage") if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise refuse("stage", f"is {json.dumps(stage)}; use 1, 2 or 3, or --sharding_mode ddp")
    zero = {key: value for key, value in zero.items() if value != "auto"}
    for key, accepted in FIXED.items():
        if zero.get(key, accepted) != accepted:
            raise refuse(key, f"must be {json.dumps(accepted)}, for the run would be another one; drop it")
    import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        raise refuse(".".join(map(str, first["loc"])), f"is refused by DeepSpeed: {first['msg']}") from None
    for key in ("offload_param", "offload_optimizer"):
        offload = zero.get(key) or {}
        device = offload.get("device", "none")
        if device not in ("none", "cpu") or offload.get("super_offload") or offload.get("ratio", 1) != 1:
            raise refuse(key, 'must be {"device": "cpu"}, without ratio or super_offload, or be left out')
        if key == "offload_param" and device == "cpu" and stage != 3:
            raise refuse(key, f"needs stage 3, this is stage {stage}")
    return zero


def import_deepspeed() -> Any:
    """Import DeepSpeed with its log, warnings and compiled extensions turned off."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # detecting it logs a warning
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"--sharding_mode with DeepSpeed: it cannot be imported ({error}); `pip install {DEEPSPEED}`, "
            "or use --sharding_mode fsdp_full"
        ) from None
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_no_skipped_step)
    # It calls functions that newer torch renames: one warning per collective.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    # None of its compiled extensions is used; on the CPU it would build one for a minute.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _is_no_skipped_step(record: logging.LogRecord) -> bool:
    return "OVERFLOW!" not in record.getMessage()  # the training loop logs it, with loss and norm

"""DeepSpeed's configuration: `zero_optimization` comes from a JSON file, everything else from the flags.

A value in the file that contradicts a flag is refused: a command is the same run in every sharding mode.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.settings import nearest
from fp8_suite.training.config import Config
from fp8_suite.training.parallel.settings import MODES, read_deepspeed_config

DEEPSPEED = "deepspeed==0.19.8"
CONFIGS = {name: f"ds_configs/{name.removeprefix('ds_')}.json" for name, spec in MODES.items() if spec.stage}
# Sections that affect only speed, memory and DeepSpeed's own output.
ALLOWED = ("zero_optimization", "comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown")
# Keys of zero_optimization that change results, or that `zero.Zero` does not support: their only valid value.
FIXED = {
    "zenflow": None,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "compute_grad_norm": True,
    "zero_hpz_partition_size": 1,
}


def merge_settings(path: str, cfg: Config, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration from a JSON file and the flags. UserError if they contradict."""
    from_file, from_flags = read_deepspeed_config(path), _from_flags(cfg, world_size)
    for key, value in from_file.items():
        if key in ALLOWED or (_agrees(value, from_flags[key]) if key in from_flags else _is_off(value)):
            continue
        if key in from_flags:
            reason = f"but the flags set it to {json.dumps(from_flags[key])}; remove it"
        else:
            reason = f"which only flags can set; remove it{nearest(key, [*ALLOWED, *from_flags])}"
        raise bad_setting(f"{key} is {json.dumps(value)}, {reason}", deepspeed_config=path)
    zero = _check_zero(from_file.get("zero_optimization"), path)
    allowed = {key: value for key, value in from_file.items() if key in ALLOWED}
    return allowed | {"zero_optimization": zero} | from_flags


def _is_off(section: Any) -> bool:
    return isinstance(section, dict) and section.get("enabled") in (False, "auto")


def _agrees(value: Any, expected: Any) -> bool:
    if isinstance(value, dict) and isinstance(expected, dict):
        return all(_agrees(inner, expected.get(name)) for name, inner in value.items())
    return value in ("auto", expected)


def _from_flags(cfg: Config, world_size: int) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that the flags determine."""
    batch_size, accumulation = cfg.optim.batch_size, cfg.optim.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": batch_size * accumulation * world_size,
        "gradient_clipping": cfg.optim.max_grad_norm,
        # DeepSpeed's default is the weights' dtype. BF16 sums over many ranks lose low-order bits.
        "communication_data_type": cfg.sharding.grad_reduce_dtype,
        # Only sums of several micro-batches need FP32; a single BF16 gradient gains nothing from it.
        "data_types": {"grad_accum_dtype": "fp32" if accumulation > 1 else None},
        "bf16": {
            "enabled": cfg.precision.mixed_precision != "fp32",
            "check_grad_overflow": True,  # else DeepSpeed applies steps with non-finite gradients
            # With accumulation ZeRO 1 frees each BF16 gradient as soon as it is added to the FP32 sum.
            "immediate_grad_update": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's optimizer would compile a C++ extension
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it synchronizes the device before every forward pass
    }


def _check_zero(zero: Any, path: str) -> dict[str, Any]:
    """Return zero_optimization without values of "auto". UserError if DeepSpeed or `Zero` cannot run it."""

    def refuse(key: str, reason: str) -> UserError:
        return bad_setting(f"zero_optimization.{key} {reason}", deepspeed_config=path)

    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (1, 2, 3):
        raise refuse("stage", f"is {json.dumps(stage)}; use 1, 2 or 3, or --sharding_mode ddp")
    zero = {key: value for key, value in zero.items() if value != "auto"}
    for key, only in FIXED.items():
        if zero.get(key, only) != only:
            raise refuse(key, f"must be {json.dumps(only)}, other values are not supported; remove it")
    import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise refuse(key, f"is not valid in DeepSpeed: {first['msg']}; correct or remove it") from None
    for key in ("offload_param", "offload_optimizer"):
        offload = zero.get(key) or {}
        device = offload.get("device", "none")
        if device not in ("none", "cpu") or offload.get("super_offload") or offload.get("ratio", 1) != 1:
            raise refuse(key, 'supports only {"device": "cpu"}, without ratio or super_offload; change it')
        if key == "offload_param" and device == "cpu" and stage != 3:
            raise refuse(key, f"needs stage 3, not {stage}; change the stage or remove it")
    return zero


def import_deepspeed() -> Any:
    """Import DeepSpeed without its log messages, warnings and compiled extensions."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids a warning
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"--sharding_mode deepspeed or ds_*: DeepSpeed cannot be imported ({error}); run `pip install "
            f"{DEEPSPEED}`, or use --sharding_mode fsdp_full"
        ) from None
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    # The training loop logs skipped steps, with loss and gradient norm.
    logger.addFilter(lambda record: "OVERFLOW!" not in record.getMessage())
    # The suite uses none of the compiled extensions. On a CPU DeepSpeed would spend a minute on building one.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed

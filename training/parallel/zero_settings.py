"""The DeepSpeed configuration of a run: how to shard from a file, everything else from the flags.

A file of ds_configs/ says how to shard. What a flag decides is not its business, and a value there that says
otherwise is an error, so that one command is one run in every sharding mode.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from typing import Any

import torch

from core.settings import nearest
from training.config import Config
from training.parallel.settings import read_deepspeed_config

DEEPSPEED = "deepspeed==0.19.8"

CONFIGS = {
    "ds_zero1": "ds_configs/zero1.json",
    "ds_zero2": "ds_configs/zero2.json",
    "ds_zero3": "ds_configs/zero3.json",
    "ds_zero3_offload": "ds_configs/zero3_offload.json",
}

# Settings that may stand in a file and change nothing but speed, memory or what DeepSpeed itself prints.
FREE = ("zero_optimization", "comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown")

# Sections of a DeepSpeed file whose job a flag has here.
FLAGS_INSTEAD = {
    "optimizer": "--learning_rate, --weight_decay, --adam_beta1, --adam_beta2 and --adam_epsilon",
    "scheduler": "--lr_scheduler and --num_warmup_steps",
    "fp16": "--mixed_precision",
    "amp": "--mixed_precision",
    "torch_autocast": "--mixed_precision",
    "activation_checkpointing": "--gradient_checkpointing",
    "compile": "--compile",
    "wandb": "--use_wandb",
    "tensorboard": "--log_dir",
    "comet": "--use_wandb or --log_dir",
    "csv_monitor": "metrics.jsonl, which every run writes",
    "checkpoint": "--save_interval and --keep_last",
}

# Parts of zero_optimization that this program has no place for.
UNSUPPORTED = {
    "legacy_stage1": "was removed from DeepSpeed",
    "zenflow": "updates parts of the weights late",
    "zero_quantized_weights": "quantizes weights, which --mixed_precision fp8 does",
    "zero_quantized_nontrainable_weights": "quantizes weights, which --mixed_precision fp8 does",
    "zero_quantized_gradients": "quantizes gradients, whose dtype is --grad_reduce_dtype",
}


def merge_settings(
    path_or_short_name: str, cfg: Config, world_size: int, parameter_dtype: torch.dtype
) -> dict[str, Any]:
    """The DeepSpeed configuration: how to shard from a file, all else from the flags.

    `path_or_short_name`: a JSON file, relative to the working directory or to this repository, or a key of
    `CONFIGS`. ValueError if the file cannot be read, does not shard, or contradicts a flag; RuntimeError
    without DeepSpeed.
    """
    path = CONFIGS.get(path_or_short_name, path_or_short_name)
    where = f"--deepspeed_config {path}"
    given = read_deepspeed_config(path)
    decided, flags = _decided(cfg, world_size, parameter_dtype)
    for key, value in given.items():
        if key in FREE:
            continue
        if key in FLAGS_INSTEAD:
            if not (isinstance(value, dict) and value.get("enabled") in (False, "auto")):
                raise ValueError(f"{where}: {key} is not read; leave it out and use {FLAGS_INSTEAD[key]}")
        elif key in decided:
            _compare(where, key, value, decided[key], flags)
        else:
            raise ValueError(
                f"{where}: {key} is no setting that belongs here{nearest(key, [*FREE, *decided])}; the file "
                "says how to shard (zero_optimization), flags decide the rest"
            )
    zero = _check_zero(given.get("zero_optimization"), where)
    return {key: given[key] for key in FREE if key in given} | {"zero_optimization": zero} | decided


def _decided(cfg: Config, world_size: int, parameter_dtype: torch.dtype) -> tuple[dict[str, Any], dict]:
    """What flags decide, in DeepSpeed's terms, and {dotted key: the flags that decide it}."""
    optimizer, reduce_dtype = cfg.optim, cfg.sharding.grad_reduce_dtype
    micro, steps = optimizer.batch_size, optimizer.gradient_accumulation_steps
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * world_size,
        "gradient_clipping": optimizer.max_grad_norm,
        # The default is the weights' dtype: BF16 sums, which lose what one rank adds to many.
        "communication_data_type": reduce_dtype,
        # Sums of several micro-batches need FP32; one gradient, reduced, is no more exact than its terms.
        "data_types": {"grad_accum_dtype": "fp32" if steps > 1 else None},
        # Without the check a step with a gradient that is not finite would be taken. Immediate: ZeRO 1 frees
        # a gradient once it is in the FP32 sums of several micro-batches, and not at the step alone.
        "bf16": {
            "enabled": parameter_dtype == torch.bfloat16,
            "check_grad_overflow": True,
            "immediate_grad_update": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own compiles a C++ extension at the first start
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # waits for the device before every forward pass
    }
    flags = {
        "train_micro_batch_size_per_gpu": f"--batch_size {micro}",
        "gradient_accumulation_steps": f"--gradient_accumulation_steps {steps}",
        "train_batch_size": (
            f"--batch_size {micro} x --gradient_accumulation_steps {steps} x {world_size} ranks"
        ),
        "gradient_clipping": f"--max_grad_norm {optimizer.max_grad_norm}",
        "communication_data_type": f"--grad_reduce_dtype {reduce_dtype}",
        "bf16": f"--mixed_precision {cfg.precision.mixed_precision}",
        "bf16.enabled": f"--mixed_precision {cfg.precision.mixed_precision}",
        "steps_per_print": "--log_interval, in lines of our own,",
    }
    return settings, flags


def _compare(where: str, key: str, value: Any, decided: Any, flags: dict[str, str]) -> None:
    if isinstance(decided, dict) and isinstance(value, dict):
        for name, inner in value.items():
            _compare(where, f"{key}.{name}", inner, decided.get(name), flags)
    elif value != "auto" and value != decided:
        by = f"{flags[key]} makes it" if key in flags else "here it is always"
        raise ValueError(
            f"{where}: {key} is {json.dumps(value)}, but {by} {json.dumps(decided)}; leave it out"
        )


def _check_zero(zero: Any, where: str) -> dict[str, Any]:
    """zero_optimization without "auto" values, as DeepSpeed will accept it. ValueError names the key."""
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(
            f"{where}: zero_optimization.stage is {json.dumps(stage)}; give 1, 2 or 3, or use "
            "--sharding_mode ddp to shard nothing"
        )
    zero = {key: value for key, value in zero.items() if value != "auto"}
    for key, reason in UNSUPPORTED.items():
        if zero.get(key):
            raise ValueError(f"{where}: zero_optimization.{key} {reason}; leave it out")
    if zero.get("compute_grad_norm") is False:
        raise ValueError(f"{where}: zero_optimization.compute_grad_norm must be true, the norm is logged")
    if zero.get("zero_hpz_partition_size", 1) != 1:
        raise ValueError(f"{where}: zero_optimization.zero_hpz_partition_size: use --sharding_mode hsdp")
    for key in ("offload_param", "offload_optimizer"):
        offload = zero.get(key) or {}
        if not isinstance(offload, dict):
            raise ValueError(f'{where}: zero_optimization.{key} must be like {{"device": "cpu"}}')
        if offload.get("device", "none") not in ("none", "cpu"):
            raise ValueError(f'{where}: zero_optimization.{key}.device must be "cpu", or leave {key} out')
        if offload.get("super_offload") or offload.get("ratio", 1) != 1:
            raise ValueError(
                f"{where}: zero_optimization.{key} is all or nothing: no ratio, no super_offload"
            )
    if stage != 3 and (zero.get("offload_param") or {}).get("device", "none") != "none":
        raise ValueError(f"{where}: zero_optimization.offload_param needs stage 3, this is stage {stage}")
    import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["zero_optimization", *map(str, first["loc"])])
        raise ValueError(f"{where}: {key}: {first['msg']} (DeepSpeed)") from None
    return zero


def import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it warns when it has to find out
    try:
        import deepspeed
    except ImportError as error:
        raise RuntimeError(
            f"--sharding_mode with DeepSpeed: it cannot be imported ({error}); `pip install {DEEPSPEED}`, "
            "or use --sharding_mode fsdp_full"
        ) from None
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_not_a_skipped_step)
    # Its calls of what newer torch renames, one warning per collective.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    # None of its compiled extensions is used; on the CPU it would spend a minute on building one.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _not_a_skipped_step(record: logging.LogRecord) -> bool:
    return "OVERFLOW!" not in record.getMessage()  # the loop reports it, with loss and norm

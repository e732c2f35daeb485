"""Settings of sharding over many GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.errors import bad_setting
from core.packages import ROOT
from core.settings import Section, require, setting


@dataclass(frozen=True)
class Mode:
    """A sharding mode, as rules across settings, the memory model and the strategies read it."""

    engine: Literal["none", "ddp", "fsdp", "deepspeed"]
    stage: int = 0  # of DeepSpeed's ZeRO; 0 for `deepspeed`, whose --deepspeed_config has it
    gathers_once: bool = False  # weights stay gathered over all micro-batches of a step
    in_groups: bool = False  # shards within --hsdp_shard_size ranks, replicates across
    offload: bool = False  # weights and optimizer state live in host memory


# "single" runs without torchrun; the others are choices. `training.parallel.strategies` implements them.
MODES: dict[str, Mode] = {
    "single": Mode("none"),
    "ddp": Mode("ddp"),
    "fsdp_full": Mode("fsdp"),
    "fsdp_grad": Mode("fsdp", gathers_once=True),
    "fsdp_offload": Mode("fsdp", offload=True),
    "hsdp": Mode("fsdp", in_groups=True),
    "deepspeed": Mode("deepspeed"),
    "ds_zero1": Mode("deepspeed", stage=1),
    "ds_zero2": Mode("deepspeed", stage=2),
    "ds_zero3": Mode("deepspeed", stage=3),
    "ds_zero3_offload": Mode("deepspeed", stage=3, offload=True),
}
FP8_GATHER_MODES = tuple(name for name, m in MODES.items() if m.engine == "fsdp" and not m.offload)


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Section):
    """many GPUs (train_multi_gpu.py)"""

    sharding_mode: Literal[("auto", *list(MODES)[1:])] = setting(
        "auto",
        "ddp: a whole model on every GPU; fsdp_full: weights sharded, gathered layer by layer (ZeRO-3); "
        "fsdp_grad: gathered once a batch (ZeRO-2); fsdp_offload: sharded, kept on the CPU; hsdp: sharded "
        "within --hsdp_shard_size ranks, replicated across; deepspeed: as --deepspeed_config says, ds_*: "
        "short names for ds_configs/*.json; auto: by memory, and says why",
        resumable=True,
    )
    deepspeed_config: str | None = setting(
        None, "DeepSpeed JSON of --sharding_mode deepspeed, with sharding settings only", resumable=True
    )
    cpu_offload: bool = setting(False, "keep weights and optimizer on the CPU: fsdp_offload", resumable=True)
    hsdp_shard_size: int | None = setting(
        None,
        "hsdp: ranks that share one copy of the model; default: the ranks of a node",
        resumable=True,
        minimum=1,
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "dtype in which gradients are summed over ranks, and over micro-batches (but in ddp: bf16, and "
        "DeepSpeed: fp32)",
    )
    fp8_all_gather: bool = setting(
        False, "gather GEMM weights in FP8 (FSDP modes; --fp8_scenario current, without --use_te tensorwise)"
    )
    empty_cache_freq: int = setting(
        0,
        "steps between calls of torch.cuda.empty_cache, against fragmentation; 0 for none",
        resumable=True,
        minimum=0,
    )
    timeout_minutes: float = setting(
        30.0,
        "end the job when a rank makes no progress for this long, and name it",
        resumable=True,
        affects="nothing",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        mode, size, minutes = self.sharding_mode, self.hsdp_shard_size, self.timeout_minutes
        require(0 < minutes <= 10_080, "timeout_minutes", minutes, "must be above 0, at most a week (10080)")
        if size is not None and mode != "hsdp":
            raise bad_setting(
                "only valid with --sharding_mode hsdp", hsdp_shard_size=size, sharding_mode=mode
            )
        if (mode == "deepspeed") != (self.deepspeed_config is not None):
            raise bad_setting(
                "--sharding_mode deepspeed needs a --deepspeed_config (ds_configs/zero2.json, for example), "
                "and no other mode reads one",
                sharding_mode=mode,
                deepspeed_config=self.deepspeed_config,
            )
        if self.cpu_offload and mode not in ("auto", "fsdp_full", "fsdp_offload"):
            raise bad_setting(
                "it means --sharding_mode fsdp_offload; drop --sharding_mode, or use ds_zero3_offload",
                cpu_offload=True,
                sharding_mode=mode,
            )

    @property
    def mode(self) -> str:
        return "fsdp_offload" if self.cpu_offload else self.sharding_mode


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """Read a JSON file, relative to the working directory or to this repository."""
    candidates = [Path(path).expanduser(), ROOT / path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        known = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("ds_configs/*.json"))
        raise bad_setting(f"no such file; ds_configs/ has {', '.join(known)}", deepspeed_config=path)
    try:
        loaded = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad_setting(f"cannot be read as JSON: {error}", deepspeed_config=path) from None
    if not isinstance(loaded, dict):
        raise bad_setting(f"must hold one JSON object, holds {type(loaded).__name__}", deepspeed_config=path)
    return loaded

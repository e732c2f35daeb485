"""Settings of sharding over many GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.packages import ROOT
from core.settings import Section, require, setting


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Section):
    """many GPUs (train_multi_gpu.py)"""

    sharding_mode: Literal[
        "auto",
        "ddp",
        "fsdp_full",
        "fsdp_grad",
        "fsdp_offload",
        "hsdp",
        "deepspeed",
        "ds_zero1",
        "ds_zero2",
        "ds_zero3",
        "ds_zero3_offload",
    ] = setting(
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
        30.0, "end the job when a rank makes no progress for this long, and name it", resumable=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size, minutes = self.hsdp_shard_size, self.timeout_minutes
        require(0 < minutes <= 10_080, "timeout_minutes", minutes, "must be above 0, at most a week (10080)")
        if size is not None and self.sharding_mode != "hsdp":
            raise ValueError(
                f"--hsdp_shard_size {size} --sharding_mode {self.sharding_mode}: it is for hsdp alone"
            )
        if (self.sharding_mode == "deepspeed") != (self.deepspeed_config is not None):
            raise ValueError(
                f"--sharding_mode {self.sharding_mode} --deepspeed_config {self.deepspeed_config}: "
                "--sharding_mode deepspeed and a --deepspeed_config go together (ds_configs/zero2.json, say)"
            )
        if self.cpu_offload and self.sharding_mode not in ("auto", "fsdp_full", "fsdp_offload"):
            raise ValueError(
                f"--cpu_offload --sharding_mode {self.sharding_mode}: offload is fsdp_offload; leave out "
                "--sharding_mode, or use --sharding_mode ds_zero3_offload"
            )

    @property
    def mode(self) -> str:
        return "fsdp_offload" if self.cpu_offload else self.sharding_mode


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """A JSON file, relative to the working directory or to this repository. ValueError if it is none."""
    where = f"--deepspeed_config {path}"
    candidates = [Path(path).expanduser(), ROOT / path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        ours = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("ds_configs/*.json"))
        raise ValueError(f"{where}: no such file; ds_configs/ has {', '.join(ours)}")
    try:
        loaded = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: cannot be read as JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{where}: must hold one JSON object, holds {type(loaded).__name__}")
    return loaded

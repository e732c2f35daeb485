"""Sharding modes, and the settings of training on many GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from fp8_suite.core.errors import bad_setting, counted
from fp8_suite.core.packages import ROOT
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.core.settings import AUTO, Section, resumable, setting

WEEK = 7 * 24 * 60  # minutes


@dataclass(frozen=True)
class ModeSpec:
    """Properties of a sharding mode."""

    engine: Literal["none", "ddp", "fsdp", "zero"]
    stage: int = 0  # ZeRO stage; 0 if --deepspeed_config sets it
    gathers_once: bool = False  # weights stay gathered for all micro-batches of a step
    in_groups: bool = False  # shards within groups of --hsdp_shard_size ranks, replicates across groups
    offload: bool = False  # DeepSpeed keeps weights and optimizer state in host memory


# "single" is the mode without torchrun; all others are choices of --sharding_mode.
MODES: dict[str, ModeSpec] = {
    "single": ModeSpec("none"),
    "ddp": ModeSpec("ddp"),
    "fsdp_full": ModeSpec("fsdp"),
    "fsdp_grad": ModeSpec("fsdp", gathers_once=True),
    "hsdp": ModeSpec("fsdp", in_groups=True),
    "deepspeed": ModeSpec("zero"),
    "ds_zero1": ModeSpec("zero", stage=1),
    "ds_zero2": ModeSpec("zero", stage=2),
    "ds_zero3": ModeSpec("zero", stage=3),
    "ds_zero3_offload": ModeSpec("zero", stage=3, offload=True),
}
DEEPSPEED_MODES = tuple(name for name, spec in MODES.items() if spec.engine == "zero")
ZERO_3_MODES = tuple(name for name, spec in MODES.items() if spec.stage == 3)
FSDP_MODES = tuple(name for name, spec in MODES.items() if spec.engine == "fsdp")

AXES = {"cp": "context_parallel_size", "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
# Sizes of parallel axes -> settings that do not run with them.
WHOLE_LAYERS = ("lora_rank", "offload_optimizer", "fp8_weights")
EXCLUDED = {
    "context_parallel_size": (),
    "tensor_parallel_size": (*WHOLE_LAYERS, "fp8_all_gather"),
    "pipeline_parallel_size": (*WHOLE_LAYERS, "offload_activations", "fp8_stats_interval"),
}
# Settings of one axis.
ONLY_WITH = {
    "cp_comm_type": "context_parallel_size",
    "virtual_stages": "pipeline_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Section):
    """many GPUs (train_multi_gpu.py)"""

    sharding_mode: Literal[("auto", *list(MODES)[1:])] = resumable(
        "auto", "how to shard the model (docs/multi_gpu.md); auto: the fastest mode that fits"
    )
    deepspeed_config: str | None = resumable(
        None, "JSON file with zero_optimization; required by --sharding_mode deepspeed"
    )
    offload_optimizer: bool = resumable(
        False, "keep masters and moments in host memory; stream them through the GPU every step"
    )
    hsdp_shard_size: int | None = resumable(
        None, "ranks that share one copy of the model under hsdp; default: the ranks of a node", minimum=1
    )
    context_parallel_size: int | Literal["auto"] = resumable(
        1, "ranks that split each sequence, with --use_te; auto: fastest layout that fits", minimum=1
    )
    cp_comm_type: Literal["auto", "p2p", "all_gather", "a2a", "a2a+p2p"] = resumable(
        "auto", "how the ranks of a sequence attend; auto: a2a if they divide the heads, else all_gather"
    )
    tensor_parallel_size: int | Literal["auto"] = resumable(
        1, "ranks of a node that split each layer, with --use_te; auto: fastest layout that fits", minimum=1
    )
    pipeline_parallel_size: int | Literal["auto"] = resumable(
        1, "pipeline stages that split the layers, with --use_te; auto: fastest layout that fits", minimum=1
    )
    virtual_stages: int = resumable(
        1, "pipeline stages per rank: several run interleaved, one runs 1F1B", minimum=1
    )
    grad_reduce_dtype: Literal["fp32", "bf16", "fp8"] = setting(
        "fp32", "dtype of gradient sums over ranks and micro-batches; fp8: sent in FP8, accumulated in BF16"
    )
    fp8_all_gather: bool = setting(
        False, "all-gather linear weights in FP8 (FSDP; recipe current with --use_te, tensorwise without)"
    )
    memory_limit_gb: float | None = resumable(
        None, "GPU memory to use, in GB (10^9 bytes); default: all", above=0, affects="nothing"
    )
    empty_cache_freq: int = resumable(0, "steps between calls of torch.cuda.empty_cache; 0: never", minimum=0)
    timeout_minutes: float = resumable(
        30.0,
        "end the job after this many minutes without progress; must exceed the longest save",
        above=0,
        maximum=WEEK,
        affects="nothing",
    )

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of the axes beside data parallelism, by field of `estimate.layout.Layout`."""
        sizes = {axis: getattr(self, name) for axis, name in AXES.items()}
        return sizes | {"virtual": self.virtual_stages}

    def data_ranks(self, ranks: int) -> int:
        """Return the ranks that read different rows. UserError if sizes of parallel axes do not divide."""
        sizes = {name: size for name in AXES.values() if (size := getattr(self, name)) > 1}
        needed = prod(sizes.values())
        if ranks % needed == 0:
            return ranks // needed
        reason = f"needs a multiple of {needed} ranks, not {ranks}; start as many, or use smaller sizes"
        raise bad_setting(reason, **sizes)

    def shard_size(self, gpus: int, gpus_per_node: int) -> int:
        """Return the ranks that share one copy of the model under hsdp. UserError if they cannot."""
        size = self.hsdp_shard_size or min(gpus, gpus_per_node)
        if gpus % size:
            raise bad_setting(
                f"does not divide {counted(gpus, 'rank')} with the same layers; use a divisor, or "
                "--sharding_mode fsdp_full",
                hsdp_shard_size=size,
            )
        if size % (context := self.context_parallel_size):
            reason = "the ranks of a sequence share one copy of the model; use a multiple of their number"
            raise bad_setting(reason, hsdp_shard_size=size, context_parallel_size=context)
        if size == 1 and self.grad_reduce_dtype == "fp8":
            reason = "shard size 1 has nothing to exchange; use ddp, or a larger size"
            raise bad_setting(reason, grad_reduce_dtype="fp8", hsdp_shard_size=size)
        return size


def recorded_data_ranks(settings: Mapping[str, Any], ranks: int) -> int:
    """Return the ranks that read different rows, in a run with these recorded settings."""
    return ranks // prod(settings.get(name, 1) for name in AXES.values())


def axis_rules(s: Any) -> Iterator[tuple[str, str]]:
    """Yield the rules of parallel axes: (names of conflicting settings, reason)."""
    for name, size in ONLY_WITH.items():
        if getattr(s, size) == 1 and getattr(s, name) not in (1, AUTO):
            yield name, f"only valid with --{size} 2 or more; drop it"
    for size, names in EXCLUDED.items():
        if getattr(s, size) in (1, AUTO):
            continue
        if not s.use_te:
            yield f"{size} use_te", "ranks share Transformer Engine layers only; add --use_te"
        if s.sharding_mode in DEEPSPEED_MODES:
            yield f"{size} sharding_mode", "not with DeepSpeed; choose ddp, fsdp_full, fsdp_grad or hsdp"
        for name in names:
            if getattr(s, name):
                yield f"{size} {name}", "do not run together; drop one of the two"
    if s.cp_comm_type == "a2a+p2p" and s.packing:
        yield "cp_comm_type packing", "TE has no a2a+p2p for packed rows; use p2p, or --no_packing"
    if s.pipeline_parallel_size == AUTO:
        return
    if s.pipeline_parallel_size > 1 and s.grad_reduce_dtype == "fp8":
        yield "pipeline_parallel_size grad_reduce_dtype", "pipelines exchange fp32 or bf16; choose one"


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """Read a DeepSpeed JSON file. Relative paths start at the working directory or this repository."""
    file = next((file for file in (Path(path).expanduser(), ROOT / path) if file.is_file()), None)
    if file is None:
        available = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("ds_configs/*.json"))
        raise bad_setting(f"no such file; ds_configs/ has {', '.join(available)}", deepspeed_config=path)
    try:
        return read_json(file)
    except UnreadableFile as error:
        raise bad_setting(error.reason, deepspeed_config=path) from None

"""Which sharding mode fits, by the memory it takes; for --sharding_mode auto, and before offloading."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.machine import host_memory
from training.config import Config
from training.parallel import ranks


@dataclass(frozen=True)
class Memory:
    """What a training run holds per parameter, in bytes, and how much room a GPU has."""

    parameters: int
    weights: int  # as they are gathered for a forward pass
    state: int  # weights, gradient and optimizer state together
    accumulated: int  # whole gradients that FSDP keeps until the last micro-batch
    gpu: int

    @classmethod
    def of(cls, cfg: Config, *, parameters: int, state: int, gpu: int) -> Memory:
        """Of a model with so many parameters; `state` and `gpu` as above."""
        accumulating = cfg.optim.gradient_accumulation_steps > 1
        return cls(
            parameters,
            weights=4 if cfg.precision.mixed_precision == "fp32" else 2,
            state=state,
            accumulated=(4 if cfg.sharding.grad_reduce_dtype == "fp32" else 2) * accumulating,
            gpu=gpu,
        )


# From here on sharing the optimizer's work out saves more than gathering weights costs (docs/multi_gpu.md).
LARGE = 2 * 10**9
LEAST_STATE = 8  # bytes a parameter: weight, gradient and both moments in BF16
ROOM = 0.6  # of a GPU's memory for what `Memory` counts; the rest is for activations, FP8 copies and NCCL
# Before all goes to the CPU, which costs most of the speed; --gradient_checkpointing makes the rest do.
LAST_ROOM = 0.75
ALONE = 0.9  # on one GPU, where sharding shares nothing out: an 8B takes 80 % of an H200 and trains


def choose_mode(memory: Memory | None, *, world_size: int, local_size: int) -> tuple[str, str]:
    """The fastest sharding mode among those that fit, and why, for --sharding_mode auto."""
    if memory is None:
        return "ddp", "without a GPU there is no memory to plan for"
    whole = memory.parameters * memory.state / 1e9
    if world_size == 1 and whole <= ALONE * memory.gpu / 1e9:
        return "single", "one GPU, nothing to shard"
    gathered = memory.parameters * memory.weights / 1e9
    kept = memory.parameters * memory.accumulated / 1e9
    room = ROOM * memory.gpu / 1e9
    what = f"weights, gradients and optimizer take {whole:.1f} GB, a GPU has {room:.1f} GB for them"
    if kept:
        what += f", accumulated gradients {kept:.1f} GB"
    if whole <= room and memory.parameters < LARGE:
        return "ddp", what
    if gathered * 2 + kept + whole / world_size <= room:
        return (
            "fsdp_grad",
            f"{what}; gathered weights and gradients ({gathered * 2:.1f} GB) fit beside a shard",
        )
    if whole <= room:
        return "ddp", what
    if world_size > local_size > 1 and kept + whole / local_size <= room:
        return "hsdp", f"{what}; sharded over the {local_size} ranks of a node they fit"
    if kept + whole / world_size <= room:
        return "fsdp_full", f"{what}; sharded over {world_size} ranks they fit"
    last = LAST_ROOM * memory.gpu / 1e9
    sharded = f"{what}; sharded over {world_size} ranks they"
    if kept + whole / world_size <= last:
        return "fsdp_full", f"{sharded} fit into {last:.1f} GB"
    return "fsdp_offload", f"{sharded} do not even fit into {last:.1f} GB, the CPU must hold them"


def refuse_small_gpu(model: str, memory: Memory, *, mode: str, shard_group_size: int, shrinks: bool) -> None:
    """RuntimeError if a GPU cannot even hold its share of weights, gradients and optimizer state.

    `shard_group_size`: ranks that hold them together in this `mode`; `shrinks`: whether BF16 alone may hold them.
    """
    whole, gpu = memory.parameters * memory.state, memory.gpu
    if whole / shard_group_size <= gpu:
        return
    ways = []
    least = memory.parameters * LEAST_STATE / shard_group_size
    if shrinks and least <= gpu:
        ways.append(
            f"--master_weights none --moment_dtype bf16 takes {least / 1e9:.1f} GB (and loses small updates)"
        )
    room = LAST_ROOM * gpu - memory.parameters * memory.accumulated
    if room > 0:
        ways.append(f"--sharding_mode fsdp_full takes {math.ceil(whole / room)} such GPUs")
    start = "torchrun --nproc_per_node=1 train_multi_gpu.py " if mode == "single" else ""
    ways.append(f"{start}--sharding_mode fsdp_offload takes the hosts' memory")
    where = "on one GPU" if mode == "single" else f"--sharding_mode {mode}"
    raise RuntimeError(
        f"--model_name {model}, {where}: weights, gradients and optimizer of {memory.parameters / 1e9:.1f} B "
        f"parameters take {whole / shard_group_size / 1e9:.1f} GB a GPU, which has {gpu / 1e9:.1f} GB: "
        f"{', or '.join(ways)}"
    )


def refuse_small_host(parameters: int, mode: str, each: int) -> None:
    """RuntimeError if this node cannot hold its share of all parameters, `each` bytes a parameter."""
    needed = each * parameters * ranks.local_rank_and_size()[1] / ranks.world_size()
    total = host_memory()
    if needed > total:
        on_gpu = "fsdp_full" if mode == "fsdp_offload" else "ds_zero3"
        raise RuntimeError(
            f"--sharding_mode {mode}: needs {needed / 1e9:.0f} GB of host memory on this node for weights, "
            f"gradients, moments and saving, which has {total / 1e9:.0f} GB; use more nodes, or {on_gpu}"
        )

"""Choice of sharding strategy and optimizer; what cannot fit is refused before any weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from core.errors import UserError
from core.machine import host_memory
from te_models import build as te_models
from te_models.build import ModelPlan
from training.config import Config
from training.optim import optimizer as optim
from training.optim.optimizer import OptimizerPlan
from training.parallel import memory, ranks
from training.parallel.memory import Job, ModelSize
from training.parallel.ranks import print_rank0
from training.parallel.strategies import STRATEGIES, Strategy

LEAST_STATE = 8  # bytes a parameter: weight, gradient and both moments in BF16


@dataclass(frozen=True)
class MemoryPlan:
    """How weights and optimizer state are kept and sharded."""

    strategy: Strategy
    optimizer: OptimizerPlan


def plan_memory(cfg: Config, model: ModelPlan, device: torch.device) -> MemoryPlan:
    """Choose strategy and optimizer, the same on every rank, and refuse what cannot fit. Collective."""
    gpu = None  # memory of the smallest GPU
    if device.type == "cuda":
        gpu = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory))
    mode = ranks.run_on_rank0(lambda: _choose_mode(cfg, model, device, gpu))
    strategy = STRATEGIES[mode](device, cfg)
    if strategy.steps_on_cpu:
        print_rank0(f"the optimizer steps on the CPU: {ranks.use_cores()} threads a rank")
    optimizer = _plan_optimizer(cfg, device, strategy.master_home)
    ranks.run_on_all_ranks(lambda: check_memory(cfg, model, strategy, optimizer, gpu))
    if warning := optim.moment_warning(optimizer, cfg.optim.adam_beta2):
        print_rank0(warning)
    return MemoryPlan(strategy, optimizer)


def check_memory(
    cfg: Config, model: ModelPlan, strategy: Strategy, optimizer: OptimizerPlan, gpu: int | None
) -> None:
    """Refuse a state that cannot fit on the hosts, or on a GPU of `gpu` bytes (None without one)."""
    trains = cfg.optim.max_steps != 0  # evaluation needs only weights
    if strategy.steps_on_cpu:
        refuse_small_host(_job(cfg, model, optimizer, strategy.mode))
    # A repository's own code may not build a model without storage, which counting needs.
    elif gpu is not None and trains and not model.trust_remote_code:
        refuse_small_gpu(_job(cfg, model, optimizer, strategy.mode), gpu)


def _choose_mode(cfg: Config, model: ModelPlan, device: torch.device, gpu: int | None) -> str:
    mode = cfg.sharding.mode
    if not dist.is_initialized():
        if mode != "auto":
            print_rank0(
                f"--sharding_mode {mode} ignored: one device, nothing to shard; launch train_multi_gpu.py "
                "with torchrun"
            )
        return "single"
    if mode != "auto":
        return mode
    job = _job(cfg, model, _plan_optimizer(cfg, device, "device"), "ddp")
    mode, why = memory.choose_mode(job, gpu)
    print_rank0(f"--sharding_mode auto: {mode} ({why})")
    return mode


def _plan_optimizer(cfg: Config, device: torch.device, master_home: str) -> OptimizerPlan:
    return optim.plan_optimizer(cfg.precision, on_gpu=device.type == "cuda", master_home=master_home)


def _job(cfg: Config, model: ModelPlan, optimizer: OptimizerPlan, mode: str) -> Job:
    size = ModelSize(te_models.count_parameters(model))
    return Job(cfg, size, optimizer, mode, ranks.world_size(), ranks.local_rank_and_size()[1])


def refuse_small_gpu(job: Job, gpu: int) -> None:
    """Refuse a GPU of `gpu` bytes that cannot hold its share of weights, gradients and optimizer state."""
    parameters, shard = job.model.parameters, job.shard
    whole = parameters * job.optimizer.state_bytes
    if whole / shard <= gpu:
        return
    ways = []
    least = parameters * LEAST_STATE / shard
    if job.optimizer.kind == "fused_adamw" and least <= gpu:
        ways.append(
            f"--master_weights none --moment_dtype bf16 needs {least / 1e9:.1f} GB (and loses small updates)"
        )
    room = memory.LAST_ROOM * gpu - memory.accumulated_gradients(replace(job, mode="fsdp_full"))
    if room > 0:
        ways.append(f"--sharding_mode fsdp_full needs {math.ceil(whole / room)} such GPUs")
    start = "torchrun --nproc_per_node=1 train_multi_gpu.py " if job.mode == "single" else ""
    ways.append(f"{start}--sharding_mode fsdp_offload uses the hosts' memory")
    where = "on one GPU" if job.mode == "single" else f"--sharding_mode {job.mode}"
    raise UserError(
        f"--model_name {job.cfg.model.model_name}, {where}: weights, gradients and optimizer of "
        f"{parameters / 1e9:.1f} B parameters need {whole / shard / 1e9:.1f} GB a GPU, which has "
        f"{gpu / 1e9:.1f} GB: {', or '.join(ways)}"
    )


def refuse_small_host(job: Job) -> None:
    """Refuse to offload more than this node's memory can hold."""
    kept, saving = memory.host_bytes(job)
    each = kept + saving * job.cfg.checkpoint.save_checkpoints
    needed, total = each * job.model.parameters / job.nodes, host_memory()
    if needed > total:
        on_gpu = "ds_zero3" if job.sharding.engine == "deepspeed" else "fsdp_full"
        raise UserError(
            f"--sharding_mode {job.mode}: weights, gradients, moments and saving need {needed / 1e9:.0f} GB "
            f"of host memory on this node, which has {total / 1e9:.0f} GB; use more nodes, or {on_gpu}"
        )

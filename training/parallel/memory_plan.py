"""How weights and optimizer state are kept and spread, planned and refused before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from te_models import build as te_models
from te_models.build import ModelPlan
from training.config import Config
from training.optim import optimizer as optim
from training.optim.optimizer import OptimizerPlan
from training.parallel import ranks
from training.parallel.auto_mode import Memory, choose_mode, refuse_small_gpu, refuse_small_host
from training.parallel.ranks import print_rank0
from training.parallel.strategies import STRATEGIES, Strategy


@dataclass(frozen=True)
class MemoryPlan:
    strategy: Strategy
    optimizer: OptimizerPlan


def plan_memory(cfg: Config, model: ModelPlan, device: torch.device) -> MemoryPlan:
    """The sharding strategy and the optimizer's state, the same on every rank. Collective.

    RuntimeError: a GPU or host cannot even hold its share of weights, gradients and optimizer state.
    """
    gpu = None  # bytes of the smallest GPU's memory
    if device.type == "cuda":
        gpu = min(ranks.gather(torch.cuda.get_device_properties(device).total_memory))
    mode = ranks.run_on_rank0(lambda: _choose_mode(cfg, model, device, gpu))
    strategy = STRATEGIES[mode](device, cfg)
    if strategy.steps_on_cpu:
        print_rank0(f"the optimizer steps on the CPU: {ranks.use_cores()} threads a rank")
    optimizer = _plan_optimizer(cfg, device, strategy.master_home)
    ranks.run_on_all_ranks(lambda: check_memory(cfg, model, strategy, optimizer, gpu))
    if said := optim.moment_warning(optimizer, cfg.optim.adam_beta2):
        print_rank0(said)
    return MemoryPlan(strategy, optimizer)


def check_memory(
    cfg: Config, model: ModelPlan, strategy: Strategy, optimizer: OptimizerPlan, gpu: int | None
) -> None:
    """RuntimeError for what cannot fit; `gpu`: bytes of the smallest GPU's memory, None without one."""
    if strategy.steps_on_cpu:
        each = strategy.host_bytes(optimizer.state_bytes, saves=cfg.checkpoint.save_checkpoints)
        refuse_small_host(te_models.count_parameters(model), strategy.mode, each)
        return
    trains = cfg.optim.max_steps != 0  # evaluation takes weights alone
    # A repository's own code may not build a model without storage, by which weights are counted.
    if gpu is not None and trains and not model.trust_remote_code:
        refuse_small_gpu(
            model.name,
            _memory(cfg, model, optimizer, gpu),
            mode=strategy.mode,
            shard_group_size=strategy.shard_group_size,
            shrinks=optimizer.kind == "fused_adamw",
        )


def _choose_mode(cfg: Config, model: ModelPlan, device: torch.device, gpu: int | None) -> str:
    mode = cfg.sharding.mode
    if not dist.is_initialized():
        if mode != "auto":
            print_rank0(
                f"--sharding_mode {mode}: one device, nothing to shard; torchrun train_multi_gpu.py does"
            )
        return "single"
    if mode != "auto":
        return mode
    memory = None if gpu is None else _memory(cfg, model, _plan_optimizer(cfg, device, "device"), gpu)
    _, local_size = ranks.local_rank_and_size()
    mode, why = choose_mode(memory, world_size=ranks.world_size(), local_size=local_size)
    print_rank0(f"--sharding_mode auto: {mode} ({why})")
    return mode


def _plan_optimizer(cfg: Config, device: torch.device, master_home: str) -> OptimizerPlan:
    return optim.plan_optimizer(cfg.precision, on_gpu=device.type == "cuda", master_home=master_home)


def _memory(cfg: Config, model: ModelPlan, optimizer: OptimizerPlan, gpu: int) -> Memory:
    return Memory.of(cfg, parameters=te_models.count_parameters(model), state=optimizer.state_bytes, gpu=gpu)

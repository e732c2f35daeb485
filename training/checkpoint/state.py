"""What a checkpoint holds, by key: model/, optimizer/, rng/, fp8/; the rest is its meta."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.checkpoint.progress import Progress
from training.checkpoint.store import Checkpoints
from training.config import Config
from training.optim import adamw
from training.optim import optimizer as optim
from training.optim.adamw import local
from training.precision import recipes as precision


def save_run(
    checkpoints: Checkpoints,
    cfg: Config,
    resolved: precision.Precision,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Any,
    loader: Any,
    evaluation: Any,
    progress: Progress,
    total_steps: int,
    eval_loss: float | None,
    scaling: dict[str, Tensor],
) -> None:
    """Save everything the run is as one checkpoint. Collective.

    `scaling`: TE's FP8 state by name; `evaluation`: what tells the evaluation's samples from others, as JSON.
    """
    scaling = {f"fp8/{name}": tensor for name, tensor in scaling.items()}
    meta = {
        "config": cfg.to_dict(),
        **resolved.as_dict(),
        "progress": asdict(progress),
        "total_steps": total_steps,
        "loader": loader.state_dict(),
        "evaluation": evaluation,
        "optimizer_steps": optim.optimizer_steps(optimizer),
        "world_size": strategy.world_size,
    }
    tensors, _ = weights_and_optimizer(model, optimizer, strategy, cfg)
    checkpoints.save(progress.step, tensors | rng(strategy.rank) | scaling, meta, eval_loss=eval_loss)


def restore_run(
    checkpoints: Checkpoints,
    path: Path,
    meta: dict,
    cfg: Config,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Any,
    loader: Any,
) -> tuple[Progress, dict[str, Tensor]]:
    """Load model, optimizer, random state and loader; returns progress and the FP8 scaling state to apply.

    TE allocates its scales in the first forward pass, so they are handed back instead of being filled here.
    A rank that the saved run did not have keeps the random state it was started with. Collective.
    """
    shapes = checkpoints.shapes(path)
    scaling = {key: torch.empty(shape) for key, shape in shapes.items() if key.startswith("fp8/")}
    tensors, put_back = weights_and_optimizer(model, optimizer, strategy, cfg)
    random_state = {key: tensor for key, tensor in rng(strategy.rank).items() if key in shapes}
    checkpoints.load(path, tensors | random_state | scaling)
    put_back()
    optim.set_optimizer_steps(optimizer, meta["optimizer_steps"])
    if random_state:
        set_rng_state({key.rpartition("/")[2]: tensor for key, tensor in random_state.items()})
    loader.load_state_dict(meta["loader"])
    return progress_of(meta), {k.removeprefix("fp8/"): t for k, t in scaling.items()}


def progress_of(meta: dict) -> Progress:
    """ValueError for what a later version counted, and this one would lose."""
    saved = meta["progress"]
    if strange := sorted(saved.keys() - {field.name for field in fields(Progress)}):
        raise ValueError(
            "--resume: the checkpoint counts what this version of the suite does not "
            f"({', '.join(strange)}); go on with the version that saved it"
        )
    return Progress(**saved)


def weights_and_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Any, cfg: Config
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """What a checkpoint holds of them, the same in every sharding mode, and what puts it back after a load.

    32-bit weights are kept as BF16 and the 16 bits below it, whichever optimizer holds them, unless the run
    computes in FP32. Where the model has them in this form the tensors are live references.
    """
    strategy.reshard(model)
    if strategy.master_home == "zero":
        tensors, put_back = strategy.state(model, optimizer)
    else:
        tensors, put_back = _held_by_optimizer(model, optimizer, cfg)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                tensors[f"model/{name}"] = buffer
    return tensors, put_back


def _held_by_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, cfg: Config
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Parameters and optimizer state, where no library keeps them in a form of its own."""
    tensors = {f"optimizer/{k}": v for k, v in optim.optimizer_state(optimizer, model).items()}
    whole: dict[str, Tensor] = {}
    halved = cfg.precision.mixed_precision != "fp32"
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = _unwrapped(parameter.detach())
        master = optim.master_of(optimizer, parameter)
        if master is None and halved and parameter.dtype == torch.float32:
            master = parameter.detach()
        if master is not None:
            whole[name] = master
            weight, remainder = _like(master, adamw.split_master)
            tensors |= {f"model/{name}": weight, f"optimizer/{name}.master_param": remainder}

    @torch.no_grad()
    def put_back() -> None:
        for name, master in whole.items():
            halves = tensors[f"model/{name}"], tensors[f"optimizer/{name}.master_param"]
            local(master).copy_(adamw.merge_master(*map(local, halves)))
            weight = local(model.get_parameter(name).detach())
            if hasattr(weight, "quantize_"):  # FP8, with a scale that all shards share
                weight.quantize_(local(master))
            elif weight.dtype != torch.float32:
                weight.copy_(local(halves[0]))

    return tensors, put_back


def _unwrapped(parameter: Tensor) -> Tensor:
    """A parameter without what torchao wraps around a shard that it gathers in FP8; the same memory."""
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return parameter if local(parameter) is shard else _like(parameter, lambda part: (part,))[0]


def _like(parameter: Tensor, work: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """`work` on this rank's part of `parameter`, its results sharded alike."""
    results = work(local(parameter.detach()))
    if not isinstance(parameter, DTensor):
        return list(results)
    layout = {"shape": parameter.size(), "stride": parameter.stride(), "run_check": False}
    mesh, placements = parameter.device_mesh, parameter.placements
    return [DTensor.from_local(result, mesh, placements, **layout) for result in results]


def rng(rank: int) -> dict[str, Tensor]:
    return {f"rng/{rank}/{name}": tensor for name, tensor in rng_state().items()}


def rng_state() -> dict[str, Tensor]:
    """States of torch (CPU, current GPU), Python and NumPy; `load` can fill it, as shapes are fixed."""
    _, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*key.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["torch_cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore what `rng_state` returned; the CUDA generator only where `state` has one."""
    torch.set_rng_state(state["torch_cpu"])
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    *key, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, cached))
    if "torch_cuda" in state:
        torch.cuda.set_rng_state(state["torch_cuda"])

"""What a checkpoint holds, by key: model/, optimizer/, rng/, fp8/; the rest is its meta."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import optim, precision
from training.checkpoint import Checkpoints, rng_state, set_rng_state
from training.config import Config
from training.trainer import Progress


def save_run(
    checkpoints: Checkpoints,
    cfg: Config,
    resolved: precision.Precision,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    progress: Progress,
    eval_loss: float | None,
) -> None:
    scaling = {f"fp8/{name}": tensor for name, tensor in precision.scaling_state(model).items()}
    meta = {
        "config": cfg.to_dict(),
        **resolved.as_dict(),
        "progress": asdict(progress),
        "loader": loader.state_dict(),
        "optimizer_steps": optim.optimizer_steps(optimizer),
    }
    tensors = _model_and_optimizer(model, optimizer) | _rng() | scaling
    checkpoints.save(progress.step, tensors, meta, eval_loss=eval_loss)


def restore_run(
    checkpoints: Checkpoints,
    path: Path,
    meta: dict,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
) -> tuple[Progress, dict[str, Tensor]]:
    """Load model, optimizer, random state and loader; returns progress and the FP8 scaling state to apply.

    TE allocates its scales in the first forward pass, so they are handed back instead of being filled here.
    """
    shapes = checkpoints.shapes(path)
    scaling = {key: torch.empty(shape) for key, shape in shapes.items() if key.startswith("fp8/")}
    rng = _rng()
    checkpoints.load(path, _model_and_optimizer(model, optimizer) | rng | scaling)
    set_rng_state({name.removeprefix("rng/"): tensor for name, tensor in rng.items()})
    optim.set_optimizer_steps(optimizer, meta["optimizer_steps"])
    loader.load_state_dict(meta["loader"])
    return Progress(**meta["progress"]), {k.removeprefix("fp8/"): t for k, t in scaling.items()}


def _model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                tensors[f"model/{name}"] = buffer
    return tensors | {f"optimizer/{k}": v for k, v in optim.optimizer_state(optimizer, model).items()}


def _rng() -> dict[str, Tensor]:
    return {f"rng/{name}": tensor for name, tensor in rng_state().items()}

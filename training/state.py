"""What a checkpoint holds, by key: model/, optimizer/, rng/, fp8/; the rest is its meta."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training import optim, precision
from training.checkpoint import Checkpoints
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

"""Conversion between a run's state and checkpoint tensors (model/, optimizer/, rng/, fp8/) with meta.json."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8_suite.te_models.parallel.tensor_parallel import Region
from fp8_suite.training.checkpoint.progress import Progress
from fp8_suite.training.checkpoint.resume import ResumePoint
from fp8_suite.training.checkpoint.store import Checkpoints, in_groups
from fp8_suite.training.config import Config
from fp8_suite.training.optim import adamw, moments
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.parallel.topology import Topology
from fp8_suite.training.precision.recipes import Precision
from fp8_suite.training.precision.settings import parse_moment_dtype
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

StoredMoments = dict[tuple[str, str], dict[str, Tensor]]  # tensors of (parameter's key, moment), by part
ELEMENTS_AT_ONCE = 2**28  # elements of all ranks, loaded together when the format of moments changes


@dataclass
class RunState:
    """All state in a checkpoint. Saving reads it; `restore_run` fills it in place."""

    cfg: Config
    precision: Precision
    model: nn.Module  # without the strategy's wrapper
    optimizer: torch.optim.Optimizer
    strategy: Any
    loader: Any  # None in a run that only evaluates; `training.prepare` has set its position
    progress: Progress
    total_steps: int
    evaluation: Any  # fingerprint of the evaluation samples (JSON), or None
    base: str | None = None  # identity of frozen weights, which checkpoints do not hold
    model_files: dict[str, str] | None = None  # digests of the model that training started from


def saved_state(run: RunState, scaling: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors of this rank, meta.json) of a checkpoint of the run. Collective for DeepSpeed.

    `scaling` is the FP8 scaling state by name. Weights and optimizer state are live references until the next
    update; everything that a forward pass changes is copied.
    """
    meta = {
        "config": run.cfg.to_dict(),
        **run.precision.as_dict(),
        "progress": asdict(run.progress),
        "total_steps": run.total_steps,
        "loader": run.loader.state_dict(),
        "evaluation": run.evaluation,
        "base": run.base,
        "model": run.model_files,
        "optimizer_steps": optim.optimizer_steps(run.optimizer),
        "world_size": run.strategy.topology.world_size,
    }
    tensors, _ = weights_and_optimizer(run.model, run.optimizer, run.strategy, run.cfg)
    tensors |= {f"fp8/{name}": tensor for name, tensor in scaling.items()}
    parameters = {f"model/{name}" for name in optim.trainable(run.model)}
    for key, tensor in tensors.items():
        if key not in parameters and not key.startswith("optimizer/"):
            tensors[key] = tensor.clone()
    share = share_of_rank(tensors, run.strategy.topology, partial(region_of, run.model))
    return share | rng_state(run.strategy.topology.rank), meta


def region_of(model: nn.Module, key: str) -> Region | None:
    """Return the region of a checkpoint's tensor of which this rank holds a part, or None."""
    regions = getattr(model, "regions", {})
    kind, _, name = key.partition("/")
    if kind == "model":
        return regions.get(name)
    parameter, _, part = name.rpartition(".")
    region = regions.get(parameter) if kind == "optimizer" else None
    return region.blocks(moments.BLOCK) if region and part.endswith(moments.EXPONENTS) else region


def share_of_rank(
    tensors: dict[str, Tensor], topology: Topology, region: Callable[[str], Region | None]
) -> dict[str, Tensor]:
    """Return the tensors that this rank saves, so that each is saved once and all ranks save as much."""
    loads: dict[int, list[int]] = {}  # bytes assigned so far to each of N replicas
    share, tp = {}, topology.tp
    for key, tensor in tensors.items():
        # Ranks of other stages have other tensors, and those of `tp` other parts.
        replica, replicas = topology.rank % topology.stage_size // tp, topology.stage_size // tp
        if isinstance(tensor, DTensor):
            replica, replicas = _replica(tensor)
        if not region(key):  # a whole tensor
            replica, replicas = replica * tp + topology.rank % tp, replicas * tp
        assigned = loads.setdefault(replicas, [0] * replicas)
        saver = assigned.index(min(assigned))
        assigned[saver] += tensor.nbytes
        if saver == replica:
            share[key] = tensor
    return share


def _replica(tensor: DTensor) -> tuple[int, int]:
    """Return (number of this rank's replica of a DTensor, number of replicas)."""
    number, count = 0, 1
    for coordinate, size, placement in zip(
        tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            number, count = number * size + coordinate, count * size
    return number, count


def restore_run(checkpoints: Checkpoints, point: ResumePoint, run: RunState) -> dict[str, Tensor]:
    """Load a checkpoint into `run` and return the FP8 scaling state. Collective.

    The scaling state is returned because TE allocates it in the first forward pass. Ranks beyond the saved
    world size keep their RNG state. Moments of another format are converted.
    """
    shapes, meta = checkpoints.shapes(point.path), point.meta
    scaling = {key: torch.empty(shape) for key, shape in shapes.items() if key.startswith("fp8/")}
    if run.strategy.topology.pp > 1:
        modules = {name for name, _ in run.model.named_modules()}
        scaling = {key: t for key, t in scaling.items() if key[4:].partition(".scaling_")[0] in modules}
    tensors, copy_back = weights_and_optimizer(
        run.model, run.optimizer, run.strategy, run.cfg, weights_only=run.loader is None
    )
    rng = rng_state(run.strategy.topology.rank)
    rng_tensors = {key: tensor for key, tensor in rng.items() if key in shapes}
    saved_formats = parse_moment_dtype(meta["config"].get("moment_dtype", "fp32"))
    same = saved_formats == parse_moment_dtype(run.cfg.precision.moment_dtype)
    to_convert = {} if same else _moments_in(tensors)
    loaded_later = {f"{key}.{part}" for (key, _), parts in to_convert.items() for part in parts}
    loaded = {name: tensor for name, tensor in tensors.items() if name not in loaded_later}
    checkpoints.load(point.path, loaded | rng_tensors | scaling)
    formats = dict(zip(moments.MOMENTS, saved_formats, strict=True))
    _load_moments(checkpoints, point.path, to_convert, formats, run.strategy.device)
    copy_back()
    optim.set_optimizer_steps(run.optimizer, meta["optimizer_steps"])
    if rng_tensors:
        set_rng_state({key.rpartition("/")[2]: tensor for key, tensor in rng_tensors.items()})
    vars(run.progress).update(vars(Progress.from_meta(meta)))
    return {key.removeprefix("fp8/"): tensor for key, tensor in scaling.items()}


def _moments_in(tensors: dict[str, Tensor]) -> StoredMoments:
    keys = [(key, moment) for key, _, moment in (name.rpartition(".") for name in tensors)]
    return {
        (key, moment): {
            part: tensors[f"{key}.{part}"]
            for part in (moment, moment + moments.EXPONENTS)
            if f"{key}.{part}" in tensors
        }
        for key, moment in keys
        if moment in moments.MOMENTS
    }


@torch.no_grad()
def _load_moments(
    checkpoints: Checkpoints,
    path: Path,
    live: StoredMoments,
    formats: dict[str, str],
    device: torch.device,
) -> None:
    """Load moments saved in `formats` (by moment) and store them in the formats of `live`. Collective.

    They are loaded in groups, as all of them may not fit in both formats, and converted on `device`.
    """
    for group in in_groups(live, lambda names: live[names][names[1]].numel(), ELEMENTS_AT_ONCE):
        saved = {
            (key, name): moments.allocate(live[key, name][name], name, formats[name]) for key, name in group
        }
        checkpoints.read(path, {f"{key}.{part}": t for (key, _), p in saved.items() for part, t in p.items()})
        for key, moment in group:
            source, target = (
                {part: local(tensor) for part, tensor in tensors[key, moment].items()}
                for tensors in (saved, live)
            )
            moments.convert_(target, source, moment, device)


def weights_and_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Any,
    cfg: Config,
    *,
    weights_only: bool = False,
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return (tensors in the checkpoint layout, function to call after loading them).

    The layout is the same in every sharding mode, without frozen weights. FP32 weights are split into BF16
    weights and 16-bit remainders, unless the run computes in FP32. Tensors that the model stores in this form
    are live references; the function copies the others back. `weights_only` allocates no optimizer state,
    except for DeepSpeed, whose masters are loaded in any case.
    """
    strategy.reshard(model)
    if strategy.owns_masters:
        tensors, copy_back = strategy.state()
    else:
        state = {} if weights_only else optim.optimizer_state(optimizer, model)
        tensors, copy_back = _plain_or_fsdp_state(model, optimizer, cfg, state)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                tensors[f"model/{name}"] = buffer
    return tensors, copy_back


def _plain_or_fsdp_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, cfg: Config, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Implement `weights_and_optimizer` for plain and DTensor parameters, i.e. without ZeRO."""
    tensors = {f"optimizer/{name}": tensor for name, tensor in state.items()}
    masters: dict[str, Tensor] = {}
    split = cfg.precision.mixed_precision != "fp32"
    for name, parameter in optim.trainable(model).items():
        tensors[f"model/{name}"] = _unwrapped(optim.weight_of(optimizer, parameter).detach())
        if split and parameter.dtype == torch.float32:
            masters[name] = parameter.detach()
            weight, remainder = _like(parameter, adamw.split_master)
            tensors |= {f"model/{name}": weight, f"optimizer/{name}.master_param": remainder}

    @torch.no_grad()
    def copy_back() -> None:
        for name, master in masters.items():
            halves = tensors[f"model/{name}"], tensors[f"optimizer/{name}.master_param"]
            local(master).copy_(adamw.merge_master(*map(local, halves)))
        for parameter in optim.trainable(model).values():
            weight = optim.weight_of(optimizer, parameter)
            if weight is not parameter:  # FP8; the shards of a weight share a scale, so this is a collective
                local(parameter).quantize_(local(weight).to(parameter.device))

    return tensors, copy_back


def _unwrapped(parameter: Tensor) -> Tensor:
    """Return the parameter without torchao's FP8 all-gather wrapper; shares memory."""
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return parameter if local(parameter) is shard else _like(parameter, lambda part: (part,))[0]


def _like(parameter: Tensor, work: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """Apply `work` to this rank's shard of `parameter` and shard the results like it, on its device."""
    results = work(local(parameter.detach()))
    if not isinstance(parameter, DTensor):
        return list(results)
    sizes = {"shape": parameter.size(), "stride": parameter.stride(), "run_check": False}
    mesh, placements = parameter.device_mesh, parameter.placements
    layouts = [DTensor.from_local(result.to("meta"), mesh, placements, **sizes) for result in results]
    return [moments.with_layout(*pair) for pair in zip(results, layouts, strict=True)]


def rng_state(rank: int) -> dict[str, Tensor]:
    """Return the RNG states of torch (CPU and current GPU), Python and NumPy by checkpoint key."""
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
    return {f"rng/{rank}/{name}": tensor for name, tensor in state.items()}


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Restore RNG states; the CUDA one only if it was saved."""
    torch.set_rng_state(state["torch_cpu"])
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    *key, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, cached))
    if "torch_cuda" in state:
        torch.cuda.set_rng_state(state["torch_cuda"])

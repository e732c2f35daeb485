"""Sharding strategies: all that differs between one device, DDP, FSDP2 and DeepSpeed.

A strategy shards the model, exchanges gradients, and owns backward and the optimizer's step. Gradients are
averaged over ranks; the training loop multiplies the loss by the world size to undo it.

The rest of the suite reads a mode only through these capabilities:

| capability                | single, default  | ddp | fsdp_*, hsdp                 | deepspeed, ds_zero*   |
| ------------------------- | ---------------- | --- | ---------------------------- | --------------------- |
| shards_weights            | no               | no  | yes: filled shard by shard   | no                    |
| keeps_weights_gathered    | yes              | yes | fsdp_grad                    | no                    |
| master_home               | device           | =   | cpu with offload             | zero                  |
| steps_on_cpu              | no               | no  | with offload                 | offload_optimizer     |
| reentrant (recomputation) | no               | no  | no                           | stage 3               |
| sums_micro_batches        | if accumulating  | no  | no                           | no                    |
| fuses_wgrad_accumulation  | with FusedAdamW  | no  | unless --fp8_all_gather      | no                    |
| shard_group_size          | 1                | 1   | world size, hsdp_shard_size  | world size            |

To add a mode: its row in `settings.MODES`, its class here, its class in `ENGINES`, its terms in `memory.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from core.errors import UserError, bad_setting
from training.config import Config
from training.optim.accumulation import FSDPMainGradAccumulator, MainGradAccumulator, gradient_of
from training.optim.adamw import FusedAdamW, local
from training.optim.optimizer import step_if
from training.parallel import gradient_exchange, ranks
from training.parallel.gradient_exchange import within_a_node
from training.parallel.memory import hsdp_shard_size
from training.parallel.settings import MODES


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step. Both tensors stay on the device, so that the host need not wait."""

    grad_norm: Tensor  # of all gradients, before clipping; float32 scalar
    # True if the step was applied (bool scalar). Otherwise weights and optimizer state are unchanged.
    applied: Tensor


class Strategy:
    """One device, and the defaults of every other mode."""

    shards_weights = False
    keeps_weights_gathered = True  # from a step's first micro-batch to its last
    steps_on_cpu = False
    reentrant = False  # recomputation has to build the graph of its second forward pass

    def __init__(self, device: torch.device, cfg: Config | None = None, mode: str = "single"):
        self.device, self.cfg, self.mode = device, cfg, mode
        self.master_home = MODES[mode].master_home
        self.rank, self.world_size, self.num_nodes = ranks.rank(), ranks.world_size(), ranks.num_nodes()
        self.gradient_sums: MainGradAccumulator | FSDPMainGradAccumulator | None = None

    @property
    def accumulates(self) -> bool:
        return self.cfg is not None and self.cfg.optim.gradient_accumulation_steps > 1

    @property
    def sums_micro_batches(self) -> bool:
        """True if gradients of BF16 weights add up in `MainGradAccumulator`."""
        return self.accumulates

    @property
    def shard_group_size(self) -> int:
        """Number of ranks that hold one copy of weights, gradients and moments together."""
        return 1

    def fuses_wgrad_accumulation(self, optimizer: str) -> bool:
        """True if TE's GEMMs may add to the gradient sums. `optimizer`: its `OptimizerPlan.kind`."""
        return self.sums_micro_batches and optimizer == "fused_adamw"

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Shard `model` before its weights are read, possibly on the meta device."""

    def compute_dtype(self, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of parameters in a forward pass."""
        return parameter_dtype

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return what the loop calls and steps, once model and optimizer hold their values."""
        if self.sums_micro_batches and isinstance(optimizer, FusedAdamW):
            self.gradient_sums = MainGradAccumulator(model, self.sum_dtype)
        return model, optimizer

    @property
    def sum_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.cfg.sharding.grad_reduce_dtype]

    def reshard(self, model: nn.Module) -> None:
        """Free gathered weights after forward passes without backward."""

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        """Wrap one micro-batch; only the last one needs to exchange gradients."""
        model.first_micro_batch = first  # TE layers keep FP8 weights for the other micro-batches of the step
        if self.gradient_sums:
            self.gradient_sums.begin_micro_batch(first=first, last=last)
        yield
        model.first_micro_batch = None

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Clip to `max_norm` (0: off), step if `usable` and the gradient is finite, and zero gradients.

        The decision stays on the device, except under TE's optimizer (--fp8_all_gather): see `step_if`.
        """
        found = map(gradient_of, model.parameters())
        gradients = [local(gradient) for gradient in found if gradient is not None]
        norm = self.total_norm(global_norm(gradients))
        applied = norm.isfinite() & usable.to(norm.device)
        scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        step_if(optimizer, apply=applied, scale=scale, gradients=gradients)
        self.discard(model, optimizer)
        return StepOutcome(norm, applied)

    def total_norm(self, norm: Tensor) -> Tensor:
        """Combine the norms of all ranks' shards."""
        return norm

    def discard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients of a finished backward pass."""
        optimizer.zero_grad(set_to_none=True)
        if self.gradient_sums:
            self.gradient_sums.clear()

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """All-gather these parameters on every rank. Collective; one layer at a time fits everywhere."""
        detached = (tensor.detach() for tensor in tensors)
        return [local(t.full_tensor() if isinstance(t, DTensor) else t) for t in detached]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return ranks.all_sum(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""
        return ranks.all_max(tensor)

    def any(self, flag: bool) -> bool:
        """True on every rank if the flag is set on any rank."""
        if self.world_size == 1:
            return flag
        return bool(ranks.all_max(torch.tensor(float(flag), device=self.device)))


class DDP(Strategy):
    """A whole model on every rank; gradients are averaged in buckets during backward."""

    sums_micro_batches = False

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        with warnings.catch_warnings():
            # torch 2.13 renames `broadcast_buffers`; torch 2.11 has only the old name.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            wrapped = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                bucket_cap_mb=100,
                find_unused_parameters=not getattr(model, "uses_all_parameters", True),
            )
        low = any(p.dtype != torch.float32 for p in model.parameters())
        if low and self.sum_dtype == torch.float32:
            pieces = within_a_node(self.world_size) and self.device.type == "cuda"
            wrapped.register_comm_hook(
                None,
                gradient_exchange.all_to_all_fp32_reduce_hook(self.device)
                if pieces
                else gradient_exchange.fp32_all_reduce_hook,
            )
        elif self.sum_dtype == torch.bfloat16 and not low:
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped, optimizer

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        exchange = nullcontext() if last else model.no_sync()
        with super().accumulating(model.module, first=first, last=last), exchange:
            yield


class FSDP(Strategy):
    """FSDP2: weights, gradients and optimizer state of every block are sharded along dim 0."""

    shards_weights = True
    sums_micro_batches = False

    def __init__(self, device: torch.device, cfg: Config, mode: str = "fsdp_full"):
        super().__init__(device, cfg, mode)
        self.steps_on_cpu, self.keeps_weights_gathered = MODES[mode].offload, MODES[mode].gathers_once
        size, local_size = self.world_size, ranks.local_rank_and_size()[1]
        if MODES[mode].in_groups:
            size = ranks.run_on_rank0(lambda: hsdp_shard_size(cfg, self.world_size, local_size))
        if size == self.world_size:
            self.mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        else:
            shape = (self.world_size // size, size)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self._check_dtypes(model, parameter_dtype)
        reduce_dtype = self.sum_dtype
        # Micro-batches add up before the exchange, in FP32, which then needs FP32 itself.
        pieces = parameter_dtype == compute_dtype == torch.bfloat16 and reduce_dtype == torch.float32
        pieces = pieces and not self.accumulates and self.mesh.ndim == 1 and within_a_node(self.world_size)
        if pieces:
            reduce_dtype = compute_dtype
        pinned = self.device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if compute_dtype == parameter_dtype else compute_dtype,
                reduce_dtype=None if compute_dtype == reduce_dtype else reduce_dtype,
                cast_forward_inputs=False,  # it would cast RoPE angles to BF16
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if self.steps_on_cpu else OffloadPolicy(),
        }
        blocks = model.blocks
        if self.cfg.sharding.fp8_all_gather:
            self._check_rows(blocks)
        for block in blocks:
            fully_shard(block, reshard_after_forward=not self.keeps_weights_gathered, **options)
        # Embedding, final norm and LM head share one group, which a tied weight requires.
        fully_shard(model, reshard_after_forward=False, **options)
        if pieces:
            for module in (*blocks, model):
                module.set_custom_reduce_scatter(gradient_exchange.FP32ReduceScatter())
        # By default a block is gathered when the CPU reaches it, which is late if kernel launches are slow.
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])

    def _check_dtypes(self, model: nn.Module, parameter_dtype: torch.dtype) -> None:
        """Refuse a model with parameters of several dtypes, which FSDP2 cannot gather."""
        others = [name for name, p in model.named_parameters() if p.dtype != parameter_dtype]
        if others:
            raise bad_setting(
                f"transformers keeps {len(others)} parameters of this model ({others[0]} first) in another "
                "dtype than the rest, which FSDP2 cannot shard together; use ddp, or --mixed_precision fp32",
                sharding_mode=self.mode,
            )

    def _check_rows(self, blocks: Iterable[nn.Module]) -> None:
        """Refuse uneven shards under --fp8_all_gather: FSDP2 does not pad those that are cast to FP8."""
        shards = self.shard_group_size
        weights = (item for block in blocks for item in block.named_parameters() if item[1].ndim == 2)
        for name, weight in weights:
            if weight.shape[0] % shards:
                raise bad_setting(
                    f"{shards} ranks cannot share the {weight.shape[0]} rows of {name} evenly; use a number "
                    "of ranks that divides them, or drop --fp8_all_gather",
                    fp8_all_gather=True,
                )

    @property
    def shard_group_size(self) -> int:
        return self.mesh["shard"].size()

    def fuses_wgrad_accumulation(self, optimizer: str) -> bool:
        return self.accumulates and not self.cfg.sharding.fp8_all_gather

    def compute_dtype(self, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        return compute_dtype  # FP32 weights are cast before they are gathered

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.accumulates:
            self.gradient_sums = FSDPMainGradAccumulator(model, self.sum_dtype)
        return model, optimizer

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # for example the root, which FSDP2 keeps gathered after forward

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        if self.keeps_weights_gathered:
            model.set_reshard_after_backward(last)
        with super().accumulating(model, first=first, last=last):
            yield

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        dist.all_reduce(square, group=self.mesh.get_group("shard"))
        if self.mesh.ndim == 2:  # replicas sum in different orders and would drift apart by clipping
            dist.all_reduce(square, op=dist.ReduceOp.MAX, group=self.mesh.get_group("replicate"))
        return square.sqrt()


def _deepspeed(device: torch.device, cfg: Config, mode: str) -> Strategy:
    from training.parallel.zero import Zero  # it imports this module

    return Zero(device, cfg, mode)


ENGINES: dict[str, Callable[..., Strategy]] = {
    "none": Strategy,
    "ddp": DDP,
    "fsdp": FSDP,
    "deepspeed": _deepspeed,
}
# Each mode's strategy, built from a device and the configuration.
STRATEGIES: dict[str, Callable[[torch.device, Config], Strategy]] = {
    name: partial(ENGINES[mode.engine], mode=name) for name, mode in MODES.items()
}


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all tensors, accumulated in float32 for every dtype."""
    if not gradients:
        raise UserError("no parameter has a gradient: nothing of the model is trainable")
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))

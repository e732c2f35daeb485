"""Sharding strategies: the differences between one device, DDP, FSDP2 and DeepSpeed.

A strategy shards the model, exchanges gradients, and runs backward and the optimizer step. Gradients are
averaged over ranks; the training loop multiplies the loss by the world size, which makes them sums.

Assembly, training loop and checkpoints depend on a mode only through these capabilities. The memory model and
the planner read `settings.MODES`; rules of settings, the choice of mode and advice also test names of modes.

| capability               | single          | ddp    | fsdp_*, hsdp                | deepspeed, ds_zero*    |
| ------------------------ | --------------- | ------ | --------------------------- | ---------------------- |
| shards_weights           | no              | no     | yes, before they are read   | no                     |
| master_home              | device          | device | device; cpu with offload    | zero                   |
| steps_on_cpu             | no              | no     | with offload                | if its file offloads   |
| reentrant                | no              | no     | no                          | stage 3                |
| fuses_wgrad_accumulation | yes [1]         | no     | without --fp8_all_gather    | no                     |

[1] With an optimizer of kind `fused_adamw`. The whole row needs steps of several micro-batches.

docs/development.md lists what a new mode needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.training.config import Config
from fp8_suite.training.optim.accumulation import FSDPMainGradAccumulator, MainGradAccumulator, gradient_of
from fp8_suite.training.optim.adamw import FusedAdamW, local
from fp8_suite.training.optim.optimizer import step_if
from fp8_suite.training.parallel import gradient_exchange, ranks
from fp8_suite.training.parallel.settings import MODES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step, in tensors on the gradients' device: the host does not wait for a GPU."""

    grad_norm: Tensor  # norm of all gradients before clipping, float32 scalar
    # True if the step was applied (bool scalar). Otherwise weights and optimizer state are unchanged.
    applied: Tensor


class Strategy:
    """Training on one device, and the defaults of all other modes."""

    shards_weights = False
    steps_on_cpu = False
    reentrant = False  # True if activation checkpointing has to be reentrant, see `zero.Zero`

    def __init__(self, device: torch.device, cfg: Config, mode: str = "single"):
        self.device, self.cfg, self.mode = device, cfg, mode
        self.master_home = MODES[mode].master_home
        self.rank, self.world_size, self.num_nodes = ranks.rank(), ranks.world_size(), ranks.num_nodes()
        self.gradient_sums: MainGradAccumulator | FSDPMainGradAccumulator | None = None

    @property
    def accumulates(self) -> bool:
        """True if a step has several micro-batches."""
        return self.cfg.optim.gradient_accumulation_steps > 1

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of sums over micro-batches, and of the gradients that FSDP2 hands over for reduction."""
        return torch.float32 if self.cfg.sharding.grad_reduce_dtype == "fp32" else torch.bfloat16

    @property
    def sends_fp8(self) -> bool:
        """True if gradients travel between ranks in FP8."""
        return self.cfg.sharding.grad_reduce_dtype == "fp8"

    def fuses_wgrad_accumulation(self, optimizer_kind: str) -> bool:
        """True if TE's wgrad GEMMs may accumulate into `main_grad`. Takes `OptimizerSpec.kind`."""
        return self.accumulates and optimizer_kind == "fused_adamw"

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Shard `model` in place before its weights are read. It may be on the meta device."""

    def forward_dtype(self, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of parameters in a forward pass: FSDP2 casts them before it gathers them."""
        return compute_dtype if self.shards_weights else parameter_dtype

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the module to call in the training loop. Model and optimizer must hold their values."""
        if self.accumulates and isinstance(optimizer, FusedAdamW):
            self.gradient_sums = MainGradAccumulator(model, self.sum_dtype)
        return model

    def reshard(self, model: nn.Module) -> None:
        """Free weights that are still gathered after forward passes without backward, such as the root's."""

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        """Enclose forward and backward of one micro-batch; gradients are exchanged in the last one."""
        model.first_micro_batch = first  # TE casts weights to FP8 in the first one and reuses them
        if self.gradient_sums:
            self.gradient_sums.begin_micro_batch(first=first, last=last)
        yield
        model.first_micro_batch = None

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        # In autograd's own thread, backward launches kernels up to 5 % slower (7B, 4 x 1,024 tokens, H200).
        # With several ranks that was not measured.
        with torch.autograd.set_multithreading_enabled(self.world_size > 1):
            loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Clip gradients to `max_norm` (0: no clipping), step, and zero gradients.

        The step is skipped if `usable` (bool scalar) is False or a gradient is not finite. This is decided on
        the gradients' device.
        """
        gradients = [local(g) for p in model.parameters() if (g := gradient_of(p)) is not None]
        norm = self.total_norm(global_norm(gradients))
        applied = norm.isfinite() & usable.to(norm.device)
        scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        step_if(optimizer, apply=applied, scale=scale)
        self.discard(model, optimizer)
        return StepOutcome(norm, applied)

    def total_norm(self, norm: Tensor) -> Tensor:
        """Combine the gradient norms of all shards."""
        return norm

    def discard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Discard all gradients."""
        optimizer.zero_grad(set_to_none=True)
        if self.gradient_sums:
            self.gradient_sums.clear()

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """All-gather parameters to every rank. Collective. Call it layer by layer to limit memory."""
        detached = (tensor.detach() for tensor in tensors)
        return [local(t.full_tensor() if isinstance(t, DTensor) else t) for t in detached]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks; `tensor` is unchanged."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks; `tensor` is unchanged."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return True on every rank if the flag is set on any rank."""
        if self.world_size == 1:
            return flag
        return bool(self.max(torch.tensor(float(flag), device=self.device)))

    def _all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=operation)
        return reduced


class DDP(Strategy):
    """A whole model on every rank. Gradients are averaged in buckets during backward."""

    def fuses_wgrad_accumulation(self, optimizer_kind: str) -> bool:
        return False  # DDP exchanges `grad`

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        with warnings.catch_warnings():
            # torch 2.13 deprecates `broadcast_buffers`; its successor does not exist in torch 2.11.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            wrapped = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                bucket_cap_mb=100,
                find_unused_parameters=not getattr(model, "uses_all_parameters", True),
            )
        has_low_precision = any(p.dtype != torch.float32 for p in model.parameters())
        hook = None
        if self.sends_fp8:
            hook = gradient_exchange.all_to_all_hook(self.device, fp8=True)
        elif has_low_precision and self.sum_dtype == torch.float32:
            if self.device.type == "cuda" and gradient_exchange.within_a_node(self.world_size):
                hook = gradient_exchange.all_to_all_hook(self.device, fp8=False)
            else:
                hook = gradient_exchange.all_reduce_hook(torch.float32)
        elif self.sum_dtype == torch.bfloat16 and not has_low_precision:
            hook = gradient_exchange.all_reduce_hook(torch.bfloat16)
        if hook:
            wrapped.register_comm_hook(None, hook)
        return wrapped

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        exchange = nullcontext() if last else model.no_sync()
        with super().accumulating(model.module, first=first, last=last), exchange:
            yield


class FSDP(Strategy):
    """FSDP2, which shards weights, gradients and optimizer state of every block along dim 0."""

    shards_weights = True

    def __init__(self, device: torch.device, cfg: Config, mode: str):
        super().__init__(device, cfg, mode)
        self.steps_on_cpu, self.gathers_once = MODES[mode].offload, MODES[mode].gathers_once
        size, local_size = self.world_size, ranks.local_rank_and_size()[1]
        if MODES[mode].in_groups:
            size = ranks.run_on_rank0(lambda: cfg.sharding.shard_size(self.world_size, local_size))
        if size == self.world_size:
            self.mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        else:
            shape = (self.world_size // size, size)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self._check_dtypes(model, parameter_dtype)
        reduce_dtype = self.sum_dtype
        # `FP32ReduceScatter` exchanges BF16 gradients. With accumulation they are already FP32 sums.
        custom_reduce_scatter = (
            parameter_dtype == compute_dtype == torch.bfloat16
            and reduce_dtype == torch.float32
            and not self.accumulates
            and self.mesh.ndim == 1
            and gradient_exchange.within_a_node(self.world_size)
        )
        if custom_reduce_scatter:
            reduce_dtype = compute_dtype
        pinned = self.device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if compute_dtype == parameter_dtype else compute_dtype,
                reduce_dtype=None if compute_dtype == reduce_dtype else reduce_dtype,
                cast_forward_inputs=False,  # keeps RoPE angles in FP32
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if self.steps_on_cpu else OffloadPolicy(),
        }
        blocks = model.blocks
        if self.cfg.sharding.fp8_all_gather:
            self._check_rows(blocks)
        for block in blocks:
            fully_shard(block, reshard_after_forward=not self.gathers_once, **options)
        # Embedding, final norm and LM head form one group, because embedding and head may share a weight.
        fully_shard(model, reshard_after_forward=False, **options)
        if custom_reduce_scatter or self.sends_fp8:
            kind = (
                gradient_exchange.FP8ReduceScatter if self.sends_fp8 else gradient_exchange.FP32ReduceScatter
            )
            for module in (*blocks, model):
                module.set_custom_reduce_scatter(kind())
        # Without prefetch a block is gathered when the CPU reaches it: too late if kernel launches are slow.
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])

    def _check_dtypes(self, model: nn.Module, parameter_dtype: torch.dtype) -> None:
        """Raise UserError if parameters differ in dtype: FSDP2 gathers those of a group as one tensor."""
        others = [name for name, p in model.named_parameters() if p.dtype != parameter_dtype]
        if others:
            raise bad_setting(
                f"transformers keeps {len(others)} parameters of this model, such as {others[0]}, in another "
                "dtype than the rest, and FSDP2 cannot shard them together; use --sharding_mode ddp, or "
                "--mixed_precision fp32",
                sharding_mode=self.mode,
            )

    def _check_rows(self, blocks: Iterable[nn.Module]) -> None:
        """Raise UserError for uneven shards under --fp8_all_gather: FSDP2 does not pad FP8 shards."""
        shards = self.mesh["shard"].size()
        weights = (item for block in blocks for item in block.named_parameters() if item[1].ndim == 2)
        for name, weight in weights:
            if weight.shape[0] % shards:
                raise bad_setting(
                    f"{name} has {weight.shape[0]} rows, which {shards} ranks do not divide evenly; use a "
                    "number of ranks that does, or drop --fp8_all_gather",
                    fp8_all_gather=True,
                )

    def fuses_wgrad_accumulation(self, optimizer_kind: str) -> bool:
        return self.accumulates and not self.cfg.sharding.fp8_all_gather

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        if self.accumulates:
            self.gradient_sums = FSDPMainGradAccumulator(model, self.sum_dtype)
        return model

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        if self.gathers_once:
            model.set_reshard_after_backward(last)
        with super().accumulating(model, first=first, last=last):
            yield

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        dist.all_reduce(square, group=self.mesh.get_group("shard"))
        if self.mesh.ndim == 2:
            # Replicas add in different orders, and clipping by different norms would make them diverge.
            dist.all_reduce(square, op=dist.ReduceOp.MAX, group=self.mesh.get_group("replicate"))
        return square.sqrt()


def build_strategy(mode: str, device: torch.device, cfg: Config) -> Strategy:
    """Build the strategy of a sharding mode. Collective."""
    engine = MODES[mode].engine
    if engine == "deepspeed":
        from fp8_suite.training.parallel.zero import Zero  # imported here because it imports this module

        return Zero(device, cfg, mode)
    engines: dict[str, type[Strategy]] = {"none": Strategy, "ddp": DDP, "fsdp": FSDP}
    return engines[engine](device, cfg, mode)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm over all tensors in float32."""
    if not gradients:
        raise UserError("no parameter has a gradient; check that the model has trainable parameters")
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))

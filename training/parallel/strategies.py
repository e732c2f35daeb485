"""Sharding strategies: the differences between one device, DDP, FSDP2 and DeepSpeed.

`engines.build_strategy` builds one. A strategy shards the model, exchanges gradients, and runs backward and
the optimizer step. Gradients are averaged over the ranks with the same parts of the model; `train_step`
multiplies the loss by their number, `Topology.sum_size`, which makes them sums.

Assembly, training loop and checkpoints depend on a mode only through its strategy. The memory model and the
planner read `settings.MODES`; rules of settings, the choice of mode and advice also test names of modes.

docs/development.md lists what a new mode needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.parallel.tensor_parallel import TensorParallel
from fp8_suite.training.config import Config
from fp8_suite.training.optim.accumulation import FSDPMainGradAccumulator, MainGradAccumulator, gradient_of
from fp8_suite.training.optim.adamw import MasterAdamW, local
from fp8_suite.training.optim.loss_scale import LossScale
from fp8_suite.training.optim.optimizer import step_if
from fp8_suite.training.parallel import gradient_exchange
from fp8_suite.training.parallel.topology import build_topology
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step, in tensors on the gradients' device: the host does not wait for a GPU."""

    grad_norm: Tensor  # norm of all gradients before clipping, float32 scalar
    # True if the step was applied (bool scalar). Otherwise weights and optimizer state are unchanged.
    applied: Tensor


class Strategy:
    """Training on one device, and the defaults of all other modes."""

    shards_weights = False  # True if FSDP2 shards weights before they are read
    owns_masters = False  # True if an engine holds the FP32 master weights and steps them
    reentrant = False  # True if activation checkpointing has to be reentrant, see `zero.Zero`

    def __init__(self, mode: str, device: torch.device, cfg: Config):
        self.mode, self.device = mode, device
        self.accumulates = cfg.optim.gradient_accumulation_steps > 1  # a step has several micro-batches
        self.reduce_dtype = cfg.sharding.grad_reduce_dtype  # fp32, bf16 or fp8
        self.topology = build_topology(cfg.sharding, mode)
        group = self.topology.tensor_group
        self.tensor = TensorParallel(group) if group else None
        self.gradient_sums: MainGradAccumulator | FSDPMainGradAccumulator | None = None
        self.loss_scale = LossScale(device) if cfg.precision.mixed_precision == "fp16" else None

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of sums over micro-batches, and of the gradients that FSDP2 hands over for reduction."""
        return torch.float32 if self.reduce_dtype == "fp32" else torch.bfloat16

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Shard `model` in place before its weights are read. It may be on the meta device."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the module to call in the training loop. Model and optimizer must hold their values."""
        if self.accumulates and isinstance(optimizer, MasterAdamW):
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
        with torch.autograd.set_multithreading_enabled(self.topology.world_size > 1):
            (loss * self.loss_scale.value if self.loss_scale else loss).backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Clip gradients to `max_norm` (0: no clipping), step, and zero gradients.

        The step is skipped if `usable` (bool scalar) is False or a gradient is not finite. This is decided on
        the gradients' device.
        """
        gradients = [local(g) for p in self.counted(model) if (g := gradient_of(p)) is not None]
        local_norm = self._norm_of_layers(model) if self.tensor else global_norm(gradients)
        norm, usable = self.total_norm(local_norm), usable.to(gradients[0].device)
        if self.loss_scale:
            norm = norm / self.loss_scale.value
        applied = norm.isfinite() & usable
        scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        if self.loss_scale:
            scale = scale / self.loss_scale.value
            self.loss_scale.update(applied=applied, overflow=usable & ~norm.isfinite())
        step_if(optimizer, apply=applied, scale=scale)
        self.discard(model, optimizer)
        return StepOutcome(norm, applied)

    def counted(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the model's parameters without copies of other ranks' in a pipeline."""
        return list(model.parameters())

    def count_parameters(self, model: nn.Module) -> int:
        """Return the number of the unsharded model's parameters. Collective."""
        regions = model.regions if self.tensor else {}
        wholes = {id(p): regions.get(name, p) for name, p in model.named_parameters()}
        return sum(wholes[id(p)].shape.numel() for p in self.counted(model))

    def _norm_of_layers(self, model: nn.Module) -> Tensor:
        """Sum the gradients of weights that the ranks of a layer all hold; return the norm over these ranks.

        Of a weight that FSDP2 shards, these ranks hold the same shard.
        """
        model = getattr(model, "module", model)  # in DDP
        split, whole = [], []
        counted = set(map(id, self.counted(model)))
        for name, parameter in model.named_parameters():
            if id(parameter) in counted and (gradient := gradient_of(parameter)) is not None:
                (split if name in model.regions else whole).append(local(gradient))
        self.tensor.sum_gradients(whole)
        square = global_norm(split).square()
        dist.all_reduce(square, group=self.tensor.group)
        return (square + global_norm(whole).square()).sqrt()

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
        """Return the sum over ranks; `tensor` is unchanged.

        Ranks of `tp`, or of one pipeline, read the same rows and count once. Those of a
        pipeline may have different sums; the largest counts.
        """
        total = self._all_reduce(tensor, dist.ReduceOp.SUM, self.topology.stage_group)
        total = total / self.topology.tp if self.tensor else total
        if pipeline := self.topology.pipeline_group:
            return self._all_reduce(total, dist.ReduceOp.MAX, pipeline)
        return total

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks; `tensor` is unchanged."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return True on every rank if the flag is set on any rank."""
        if self.topology.world_size == 1:
            return flag
        return bool(self.max(torch.tensor(float(flag), device=self.device)))

    def keeping_rng(self) -> AbstractContextManager[None]:
        """Return a context that restores the RNG: attention kernels advance it even without dropout."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _all_reduce(self, tensor: Tensor, operation: Any, group: Any = None) -> Tensor:
        if self.topology.world_size == 1:
            return tensor
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=operation, group=group)
        return reduced


class DDP(Strategy):
    """A whole model on every rank.

    Gradients are averaged in buckets during backward. Sums of several BF16 micro-batches in FP32 are averaged
    after the last one instead: DDP's buckets have the parameters' dtype.
    """

    def __init__(self, mode: str, device: torch.device, cfg: Config):
        super().__init__(mode, device, cfg)
        self.sums_in_fp32 = self.accumulates and self.sum_dtype == torch.float32

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        has_low_precision = any(p.dtype != torch.float32 for p in model.parameters())
        if self.sums_in_fp32 and has_low_precision:
            self.gradient_sums = MainGradAccumulator(model, torch.float32)
            return model
        with warnings.catch_warnings():
            # torch 2.13 deprecates `broadcast_buffers`; its successor does not exist in torch 2.11.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            wrapped = nn.parallel.DistributedDataParallel(
                model,
                process_group=self.topology.sum_group,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                broadcast_buffers=False,
                init_sync=all(p.requires_grad for p in model.parameters()),  # frozen weights may be in FP8
                gradient_as_bucket_view=True,
                bucket_cap_mb=100,
                find_unused_parameters=not _uses_all_parameters(model),
            )
        if hook := self._exchange(has_low_precision):
            wrapped.register_comm_hook(None, hook)
        return wrapped

    def _exchange(self, has_low_precision: bool) -> Callable | None:
        """Return the function that averages a bucket of gradients, or None for DDP's own."""
        group = self.topology.sum_group
        if self.reduce_dtype == "fp8":
            return gradient_exchange.all_to_all_hook(self.device, group, fp8=True)
        if has_low_precision and self.sum_dtype == torch.float32:
            if self.device.type == "cuda" and gradient_exchange.within_a_node(self.topology.world_size):
                return gradient_exchange.all_to_all_hook(self.device, group, fp8=False)
            return gradient_exchange.all_reduce_hook(torch.float32, group)
        if self.sum_dtype == torch.bfloat16 and not has_low_precision:
            return gradient_exchange.all_reduce_hook(torch.bfloat16, group)
        return None

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        if self.gradient_sums:
            with super().accumulating(model, first=first, last=last):
                yield
            if last:
                uses_all, group = _uses_all_parameters(model), self.topology.sum_group
                gradient_exchange.average_sums(model, group, uses_all_parameters=uses_all)
            return
        exchange = nullcontext() if last else model.no_sync()
        with super().accumulating(model.module, first=first, last=last), exchange:
            yield


def _uses_all_parameters(model: nn.Module) -> bool:
    """True unless a forward pass may leave parameters unused, such as experts without tokens."""
    return getattr(model, "uses_all_parameters", True)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm over all tensors in float32."""
    if not gradients:
        raise UserError("no parameter has a gradient; check that the model has trainable parameters")
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))

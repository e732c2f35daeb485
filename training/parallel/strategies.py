"""How the work is spread over devices: the few things that differ between one device and many.

A strategy shards the model, says when gradients are exchanged, and owns backward and the optimizer's step.
Gradients are averaged over ranks; the loop scales the loss by the number of ranks to undo it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

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

from training.config import Config
from training.optim.accumulation import FSDPMainGradAccumulator, MainGradAccumulator, gradient_of
from training.optim.adamw import FusedAdamW, local
from training.optim.optimizer import step_if
from training.parallel import ranks
from training.parallel.gradient_sums import FP32Sums, average_by_pieces, average_in_fp32, within_a_node


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step found out; both are on the device, so that the host need not wait."""

    grad_norm: Tensor  # of all gradients together, before clipping; float32 scalar
    # Whether it was taken, a bool scalar on the device; if not, neither weights nor optimizer changed.
    taken: Tensor


class Strategy:
    """What all modes have in common, as it is on one device, where nothing is shared."""

    mode = "single"
    # Whether recomputation must build the graph of its second pass.
    reentrant = False
    shards_weights = False  # so that weights are drawn into shards instead of a whole model
    keeps_weights_gathered = True  # weights on the device, from the first micro-batch to the last
    master_home = "device"  # where FP32 weights are: on the device, on the CPU ("cpu") or in ZeRO ("zero")
    steps_on_cpu = False  # the optimizer, though the model runs elsewhere

    def __init__(self, device: torch.device, cfg: Config | None = None):
        self.device, self.cfg = device, cfg
        self.rank, self.world_size, self.num_nodes = ranks.rank(), ranks.world_size(), ranks.num_nodes()
        self.gradient_sums: MainGradAccumulator | FSDPMainGradAccumulator | None = None

    @property
    def accumulates(self) -> bool:
        return self.cfg is not None and self.cfg.optim.gradient_accumulation_steps > 1

    @property
    def sums_micro_batches(self) -> bool:
        """Whether gradients of BF16 weights add up in `MainGradAccumulator`, not by the mode itself."""
        return self.accumulates

    @property
    def shard_group_size(self) -> int:
        """Ranks that hold weights, gradients and moments together, at best."""
        return 1

    def fuses_wgrad_accumulation(self, optimizer: str) -> bool:
        """Whether GEMMs of TE's layers may add gradients up; `optimizer`: its `OptimizerPlan.kind`."""
        return self.sums_micro_batches and optimizer == "fused_adamw"

    def host_bytes(self, state_bytes: int, *, saves: bool) -> int:
        """Host memory that offloading takes, in bytes per parameter.

        `state_bytes`: of weight, gradient and moments. A save splits FP32 weights into halves.
        """
        return state_bytes + 4 * saves

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Shard `model`, on the meta device or not, before its weights are read."""

    def compute_dtype(self, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        """The dtype that forward passes find parameters in."""
        return parameter_dtype

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What the loop calls and steps instead of `model` and `optimizer`, once both hold their values."""
        if self.sums_micro_batches and isinstance(optimizer, FusedAdamW):
            self.gradient_sums = MainGradAccumulator(model, self.sum_dtype)
        return model, optimizer

    @property
    def sum_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.cfg.sharding.grad_reduce_dtype]

    def reshard(self, model: nn.Module) -> None:
        """After forward passes without backward: parameters are again those that the optimizer holds."""

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        """Around a micro-batch; all but the last may skip the exchange of gradients."""
        model.first_micro_batch = first  # TE's layers keep FP8 weights for the step's other micro-batches
        if self.gradient_sums:
            self.gradient_sums.begin_micro_batch(first=first, last=last)
        yield
        model.first_micro_batch = None

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Clip to `max_norm` (0: do not) and step, if `usable` and the gradient is finite; zeroes gradients.

        Nothing waits for the device, where the optimizer reads whether and how far to step, unless it is
        TE's (--fp8_all_gather): `optim.step_if`.
        """
        found = map(gradient_of, model.parameters())
        gradients = [local(gradient) for gradient in found if gradient is not None]
        norm = self.total_norm(global_norm(gradients))
        taken = norm.isfinite() & usable.to(norm.device)
        scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        step_if(optimizer, apply=taken, scale=scale, gradients=gradients)
        self.discard(model, optimizer)
        return StepOutcome(norm, taken)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The whole gradient's norm from that of this rank's part of it."""
        return norm

    def discard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Throw the gradients of a finished backward away."""
        optimizer.zero_grad(set_to_none=True)
        if self.gradient_sums:
            self.gradient_sums.clear()

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """These parameters, whole, on every rank; collective. One layer at a time fits everywhere."""
        return [
            local(t.full_tensor() if isinstance(t, DTensor) else t) for t in (t.detach() for t in tensors)
        ]

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return ranks.all_sum(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""
        return ranks.all_max(tensor)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; every rank gets the same answer."""
        if self.world_size == 1:
            return flag
        return bool(ranks.all_max(torch.tensor(float(flag), device=self.device)))


class DDP(Strategy):
    """The whole model on every rank; gradients are averaged in buckets while backward runs."""

    mode = "ddp"
    sums_micro_batches = False

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        with warnings.catch_warnings():
            # torch 2.13 renames `broadcast_buffers`; torch 2.11 knows no other name.
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
        if low and self.cfg.sharding.grad_reduce_dtype == "fp32":
            close = within_a_node(self.world_size) and self.device.type == "cuda"
            hook = average_by_pieces(self.device) if close else average_in_fp32
            wrapped.register_comm_hook(None, hook)
        elif self.cfg.sharding.grad_reduce_dtype == "bf16" and not low:
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped, optimizer

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        exchange = nullcontext() if last else model.no_sync()
        with super().accumulating(model.module, first=first, last=last), exchange:
            yield


class FSDP(Strategy):
    """FSDP2: every block's weights, gradients and optimizer state are cut along dim 0 over the ranks.

    `resharded`: weights are gathered for forward and again for backward (ZeRO-3), or once a step (ZeRO-2).
    """

    shards_weights = True
    sums_micro_batches = False

    def __init__(
        self,
        device: torch.device,
        cfg: Config,
        *,
        mode: str,
        resharded: bool = True,
        offload: bool = False,
        shard_size: int | None = None,
    ):
        super().__init__(device, cfg)
        self.mode, self.resharded, self.steps_on_cpu = mode, resharded, offload
        self.keeps_weights_gathered = not resharded
        self.master_home = "cpu" if offload else "device"
        size = shard_size or self.world_size
        if size == self.world_size:
            self.mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        else:
            shape = (self.world_size // size, size)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self._check_dtypes(model, parameter_dtype)
        reduce_dtype = self.sum_dtype
        gathered = self.compute_dtype(parameter_dtype, compute_dtype)
        # Gradients of several micro-batches add up before they travel, which takes FP32 itself.
        pieces = parameter_dtype == gathered == torch.bfloat16 and reduce_dtype == torch.float32
        pieces = pieces and not self.accumulates and self.mesh.ndim == 1 and within_a_node(self.world_size)
        if pieces:
            reduce_dtype = gathered
        settings = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if gathered == parameter_dtype else gathered,
                reduce_dtype=None if gathered == reduce_dtype else reduce_dtype,
                cast_forward_inputs=False,  # it would cast RoPE angles to BF16
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
            if self.steps_on_cpu
            else OffloadPolicy(),
        }
        blocks = model.blocks
        if self.cfg.sharding.fp8_all_gather:
            self._check_rows(blocks)
        for block in blocks:
            fully_shard(block, reshard_after_forward=self.resharded, **settings)
        # Embedding, final norm and LM head make one group, which a tied weight needs.
        fully_shard(model, reshard_after_forward=False, **settings)
        if pieces:
            for module in (*blocks, model):
                module.set_custom_reduce_scatter(FP32Sums())
        # Without it a block's weights are asked for when the CPU gets there: late, where launching is slow.
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])

    def _check_dtypes(self, model: nn.Module, parameter_dtype: torch.dtype) -> None:
        """ValueError for a model whose parameters have several dtypes, which FSDP2 does not gather."""
        others = [name for name, p in model.named_parameters() if p.dtype != parameter_dtype]
        if others:
            raise ValueError(
                f"--sharding_mode {self.mode}: transformers keeps {len(others)} parameters of this model "
                f"({others[0]} first) in another dtype than the rest, which FSDP2 cannot shard together; use "
                "--sharding_mode ddp, or --mixed_precision fp32"
            )

    @property
    def shard_group_size(self) -> int:
        return self.mesh["shard"].size()

    def fuses_wgrad_accumulation(self, optimizer: str) -> bool:
        return self.accumulates and not self.cfg.sharding.fp8_all_gather

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.accumulates:
            self.gradient_sums = FSDPMainGradAccumulator(model, self.sum_dtype)
        return model, optimizer

    def _check_rows(self, blocks: Iterable[nn.Module]) -> None:
        """FSDP2 pads short shards to gather them, but not those that are cast to FP8 on the way."""
        shards = self.shard_group_size
        weights = (item for block in blocks for item in block.named_parameters() if item[1].ndim == 2)
        for name, weight in weights:
            if weight.shape[0] % shards:
                raise ValueError(
                    f"--fp8_all_gather: {shards} ranks cannot share the {weight.shape[0]} rows of {name} "
                    "evenly; start a number of ranks that divides them, or drop --fp8_all_gather"
                )

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what stays gathered until backward, as the root does

    def compute_dtype(self, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        return compute_dtype  # FP32 weights are cast before they are gathered

    @contextmanager
    def accumulating(self, model: nn.Module, *, first: bool, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        if not self.resharded:  # what is gathered serves all micro-batches of a step
            model.set_reshard_after_backward(last)
        with super().accumulating(model, first=first, last=last):
            yield

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        dist.all_reduce(square, group=self.mesh.get_group("shard"))
        if self.mesh.ndim == 2:  # sums of other orders: copies clipped by them would drift apart
            dist.all_reduce(square, op=dist.ReduceOp.MAX, group=self.mesh.get_group("replicate"))
        return square.sqrt()


def _zero(device: torch.device, cfg: Config) -> Strategy:
    from training.parallel.zero import Zero  # which imports this module

    return Zero(device, cfg)


# How each mode is built from a device and the configuration; "single" is no choice of the user's.
STRATEGIES: dict[str, Callable[[torch.device, Config], Strategy]] = {
    "single": Strategy,
    "ddp": DDP,
    "fsdp_full": lambda device, cfg: FSDP(device, cfg, mode="fsdp_full"),
    "fsdp_grad": lambda device, cfg: FSDP(device, cfg, mode="fsdp_grad", resharded=False),
    "fsdp_offload": lambda device, cfg: FSDP(device, cfg, mode="fsdp_offload", offload=True),
    "hsdp": lambda device, cfg: FSDP(
        device, cfg, mode="hsdp", shard_size=ranks.run_on_rank0(lambda: hsdp_shard_size(cfg))
    ),
    "deepspeed": _zero,
    "ds_zero1": _zero,
    "ds_zero2": _zero,
    "ds_zero3": _zero,
    "ds_zero3_offload": _zero,
}


def hsdp_shard_size(cfg: Config) -> int:
    """Ranks that hold one copy of the model together. ValueError if they do not divide the world."""
    size, world = cfg.sharding.hsdp_shard_size or ranks.local_rank_and_size()[1], ranks.world_size()
    if world % size:
        raise ValueError(
            f"--hsdp_shard_size {size}: does not divide the {world} ranks; give a divisor, or use "
            "--sharding_mode fsdp_full"
        )
    return size


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all tensors, accumulated in float32 whatever their dtype."""
    if not gradients:
        raise RuntimeError("no parameter has a gradient: nothing of the model is trainable")
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))

"""How the work is spread over devices: the few things that differ between one device and many.

A strategy shards the model, says when gradients are exchanged, and owns backward and the optimizer's step.
Gradients are averaged over ranks; the loop scales the loss by the number of ranks to undo it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

from training import ranks
from training.config import Config


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: Tensor  # of all gradients together, before clipping; float32 scalar
    taken: bool  # False: something was not finite and neither weights nor optimizer changed


class SingleDevice:
    """Everything on one device; also what the others have in common."""

    mode = "single"
    # Whether recomputation must build the graph of its second pass.
    reentrant = False
    shards_weights = False  # so that weights are drawn into shards instead of a whole model
    master_home = "device"  # where FP32 weights are: on the device, on the CPU ("cpu") or in ZeRO ("zero")

    def __init__(self, device: torch.device, cfg: Config | None = None):
        self.device, self.cfg = device, cfg
        self.rank, self.world_size, self.num_nodes = ranks.rank(), ranks.world_size(), ranks.num_nodes()

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        """Shard `model`, on the meta device or not, before its weights are read."""

    def compute_dtype(self, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        """The dtype that forward passes find parameters in."""
        return parameter_dtype

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What the loop calls and steps instead of `model` and `optimizer`, once both hold their values."""
        return model, optimizer

    def settle(self, model: nn.Module) -> None:
        """After forward passes without backward: parameters are again those that the optimizer holds."""

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager:
        """Around a micro-batch; all but the last may skip the exchange of gradients."""
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, usable: Tensor, max_norm: float
    ) -> StepOutcome:
        """Clip to `max_norm` (0: do not) and step, if `usable` and the gradient is finite; zeroes gradients.

        Waits for the device once, since whether the step is taken must be known before it is.
        """
        gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
        norm = self.total_norm(global_norm(gradients))
        usable = usable.to(norm.device)
        taken, host_norm = torch.stack([(norm.isfinite() & usable).float(), norm]).tolist()
        if taken:
            if max_norm and host_norm > max_norm:
                torch._foreach_mul_(gradients, max_norm / host_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepOutcome(norm, bool(taken))

    def total_norm(self, norm: Tensor) -> Tensor:
        """The whole gradient's norm from that of this rank's part of it."""
        return norm

    def discard(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Throw the gradients of a finished backward away."""
        optimizer.zero_grad(set_to_none=True)

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """These parameters, whole, on every rank; collective. One layer at a time fits everywhere."""
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]

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


class DDP(SingleDevice):
    """The whole model on every rank; gradients are averaged in buckets while backward runs."""

    mode = "ddp"

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
            )
        low = any(p.dtype != torch.float32 for p in model.parameters())
        if low and self.cfg.sharding.grad_reduce_dtype == "fp32":
            close = within_a_node(self.world_size) and self.device.type == "cuda"
            hook = average_by_pieces(self.device) if close else _average_in_fp32
            wrapped.register_comm_hook(None, hook)
        elif self.cfg.sharding.grad_reduce_dtype == "bf16" and not low:
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return wrapped, optimizer

    def accumulating(self, model: nn.Module, *, last: bool) -> AbstractContextManager:
        return nullcontext() if last else model.no_sync()


def within_a_node(group_size: int) -> bool:
    """Whether groups of this many neighbouring ranks lie within a node, whose links join every pair."""
    return ranks.local_rank_and_size()[1] % group_size == 0


class FP32Sums:
    """FSDP2's reduce-scatter of 16-bit gradients: they travel as they are and are summed in FP32 on arrival.

    The sums are those of a reduce-scatter in FP32, for half its traffic. Every rank sends every other one its
    piece, which suits the links within a node; across nodes NCCL's rings are better.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(_sum_of_pieces(input_tensor, group, mean=op == dist.ReduceOp.AVG))


def _sum_of_pieces(tensor: Tensor, group: Any, *, mean: bool) -> Tensor:
    """This rank's piece of the sum over ranks: [N * n] of any dtype to [n] in float32."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    pieces = received.view(dist.get_world_size(group), -1)
    return (torch.mean if mean else torch.sum)(pieces, dim=0, dtype=torch.float32)


def average_by_pieces(device: torch.device) -> Callable[[Any, dist.GradBucket], torch.futures.Future]:
    """DDP communication hook: as `FP32Sums`, and the averaged pieces are gathered in 16 bits again."""
    stream = torch.cuda.Stream(device)

    def hook(_, bucket):  # DDP refuses annotations that are strings, as all are in this module
        gradients, world_size = bucket.buffer(), dist.get_world_size()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            padding = -gradients.numel() % world_size
            whole = F.pad(gradients, (0, padding)) if padding else gradients
            piece = _sum_of_pieces(whole, None, mean=True).to(gradients.dtype)
            dist.all_gather_into_tensor(whole, piece)
            if padding:
                gradients.copy_(whole[: gradients.numel()])
            future = torch.futures.Future(devices=[device])
            future.set_result(gradients)  # remembers where on this stream it is done
        return future

    return hook


def _average_in_fp32(_, bucket):  # DDP refuses annotations that are strings, as all are in this module
    """Communication hook: sums a bucket of 16-bit gradients over ranks in FP32."""
    low = bucket.buffer()
    high = low.float().div_(dist.get_world_size())
    future = dist.all_reduce(high, async_op=True).get_future()
    return future.then(lambda done: low.copy_(done.value()[0]))


class FSDP(SingleDevice):
    """FSDP2: every block's weights, gradients and optimizer state are cut along dim 0 over the ranks.

    `resharded`: weights are gathered for forward and again for backward (ZeRO-3), or kept between the two
    (ZeRO-2).
    """

    shards_weights = True

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
        self.mode, self.resharded, self.offload = mode, resharded, offload
        self.master_home = "cpu" if offload else "device"
        size = shard_size or self.world_size
        if size == self.world_size:
            self.mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
        else:
            shape = (self.world_size // size, size)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        reduce_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.cfg.sharding.grad_reduce_dtype]
        gathered = self.compute_dtype(parameter_dtype, compute_dtype)
        # Gradients of several micro-batches add up before they travel, which takes FP32 itself.
        once = self.cfg.optim.gradient_accumulation_steps == 1
        pieces = parameter_dtype == gathered == torch.bfloat16 and reduce_dtype == torch.float32
        pieces = pieces and once and self.mesh.ndim == 1 and within_a_node(self.world_size)
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
            if self.offload
            else OffloadPolicy(),
        }
        blocks = model.blocks
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

    def settle(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what stays gathered until backward, as the root does

    def compute_dtype(self, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        return compute_dtype  # FP32 weights are cast before they are gathered

    @contextmanager
    def accumulating(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    def total_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        dist.all_reduce(square, group=self.mesh.get_group("shard"))
        return square.sqrt()


def _zero(device: torch.device, cfg: Config) -> SingleDevice:
    from training.zero import Zero  # imports DeepSpeed

    return Zero(device, cfg)


# How each mode is built from a device and the configuration; "single" is no choice of the user's.
STRATEGIES: dict[str, Callable[[torch.device, Config], SingleDevice]] = {
    "single": SingleDevice,
    "ddp": DDP,
    "fsdp_full": lambda device, cfg: FSDP(device, cfg, mode="fsdp_full"),
    "fsdp_grad": lambda device, cfg: FSDP(device, cfg, mode="fsdp_grad", resharded=False),
    "fsdp_offload": lambda device, cfg: FSDP(device, cfg, mode="fsdp_offload", offload=True),
    "hsdp": lambda device, cfg: FSDP(device, cfg, mode="hsdp", shard_size=hsdp_shard_size(cfg)),
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all tensors, accumulated in float32 whatever their dtype."""
    if not gradients:
        raise RuntimeError("no parameter has a gradient: nothing of the model is trainable")
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
    )


@dataclass(frozen=True)
class Memory:
    """What a training run holds per parameter, in bytes, and how much room a GPU has."""

    parameters: int
    weights: int  # as they are gathered for a forward pass
    state: int  # weights, gradient and optimizer state together
    accumulated: int  # whole gradients that FSDP keeps until the last micro-batch
    gpu: int


# From here on sharing the optimizer's work out saves more than gathering weights costs (docs/multi_gpu.md).
LARGE = 10**9
ROOM = 0.6  # of a GPU's memory for what `Memory` counts; the rest is for activations, FP8 copies and NCCL


def choose_mode(memory: Memory | None, *, world_size: int, local_size: int) -> tuple[str, str]:
    """The fastest sharding mode among those that fit, and why, for --sharding_mode auto."""
    if memory is None:
        return "ddp", "without a GPU there is no memory to plan for"
    whole = memory.parameters * memory.state / 1e9
    gathered = memory.parameters * memory.weights / 1e9
    kept = memory.parameters * memory.accumulated / 1e9
    room = ROOM * memory.gpu / 1e9
    what = f"weights, gradients and optimizer take {whole:.1f} GB, a GPU has {room:.1f} GB for them"
    if kept:
        what += f", accumulated gradients {kept:.1f} GB"
    if whole <= room and memory.parameters < LARGE:
        return "ddp", what
    if gathered * 2 + kept + whole / world_size <= room:
        return (
            "fsdp_grad",
            f"{what}; gathered weights and gradients ({gathered * 2:.1f} GB) fit beside a shard",
        )
    if whole <= room:
        return "ddp", what
    if world_size > local_size > 1 and kept + whole / local_size <= room:
        return "hsdp", f"{what}; sharded over the {local_size} ranks of a node they fit"
    if kept + whole / world_size <= room:
        return "fsdp_full", f"{what}; sharded over {world_size} ranks they fit"
    return (
        "fsdp_offload",
        f"{what}; even sharded over {world_size} ranks they do not fit, the CPU must hold them",
    )


def refuse_small_host(parameters: int) -> None:
    """RuntimeError if this node cannot hold its share of FP32 weights, gradients and two moments."""
    needed = 16 * parameters * ranks.local_rank_and_size()[1] / ranks.world_size()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise RuntimeError(
            f"--sharding_mode fsdp_offload: needs {needed / 1e9:.0f} GB of host memory on this node for FP32 "
            f"weights, gradients and moments, which has {total / 1e9:.0f} GB; use more nodes, or fsdp_full"
        )

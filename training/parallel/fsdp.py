"""FSDP2: weights, gradients and optimizer state sharded over all ranks, or over groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.core.errors import bad_setting
from fp8_suite.training.config import Config
from fp8_suite.training.optim.accumulation import FSDPMainGradAccumulator
from fp8_suite.training.parallel import gradient_exchange
from fp8_suite.training.parallel.settings import MODES
from fp8_suite.training.parallel.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class FSDP(Strategy):
    """FSDP2, which shards weights, gradients and optimizer state of every block along dim 0."""

    shards_weights = True

    def __init__(self, mode: str, device: torch.device, cfg: Config):
        super().__init__(mode, device, cfg)
        self.gathers_once, self.gathers_fp8 = MODES[mode].gathers_once, cfg.sharding.fp8_all_gather
        self.mesh = self.topology.fsdp_mesh(device.type)

    def shard(self, model: nn.Module, *, parameter_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self._check_dtypes(model, parameter_dtype)
        reduce_dtype = self.sum_dtype
        # `ReduceScatter` exchanges BF16 gradients. With accumulation they are already FP32 sums.
        custom_reduce_scatter = (
            parameter_dtype == compute_dtype == torch.bfloat16
            and reduce_dtype == torch.float32
            and not self.accumulates
            and self.mesh.ndim == 1
            and gradient_exchange.within_a_node(self.topology.world_size)
        )
        if custom_reduce_scatter:
            reduce_dtype = compute_dtype
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if compute_dtype == parameter_dtype else compute_dtype,
                reduce_dtype=None if compute_dtype == reduce_dtype else reduce_dtype,
                cast_forward_inputs=False,  # keeps RoPE angles in FP32
            ),
        }
        blocks = model.blocks
        if self.gathers_fp8:
            self._check_rows(blocks)
        for block in blocks:
            fully_shard(block, reshard_after_forward=not self.gathers_once, **options)
        # Embedding, final norm and LM head form one group, because embedding and head may share a weight.
        fully_shard(model, reshard_after_forward=False, **options)
        fp8 = self.reduce_dtype == "fp8"
        if custom_reduce_scatter or fp8:
            for module in (*blocks, model):
                module.set_custom_reduce_scatter(gradient_exchange.ReduceScatter(fp8=fp8))
        # Without prefetch a block is gathered when the CPU reaches it: too late if kernel launches are slow.
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])

    def _check_dtypes(self, model: nn.Module, parameter_dtype: torch.dtype) -> None:
        """Raise UserError if parameters differ in dtype: FSDP2 gathers those of a group as one tensor."""
        if odd := [name for name, p in model.named_parameters() if p.dtype != parameter_dtype]:
            raise bad_setting(
                f"transformers keeps {len(odd)} parameters of this model, such as {odd[0]}, in another "
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

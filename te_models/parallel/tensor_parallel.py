"""Tensor and sequence parallelism of a TE decoder: the ranks of a group hold parts of every matrix.

Between GEMMs a rank holds 1/N of the tokens. GEMMs with weights split in rows read all tokens and compute a
part of the features; those with weights split in columns read that part and compute terms of a sum over ranks
(arXiv:2205.05198). Norms are whole on every rank; their gradients are of its part, and have to be summed.

T tokens, D hidden size, V vocabulary, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fp8_suite.te_models.kernels.loss import IGNORE, TokenLoss, linear_cross_entropy
from fp8_suite.te_models.parallel.sequence_parallel import gather_tokens, scatter_tokens
from torch import Tensor, nn

# Weights of a TE layer -> dimension that is split, and the number of stacked matrices that are split apart.
SPLIT = {
    "self_attention.layernorm_qkv.weight": (0, 1),  # whole groups of heads: they are interleaved
    "self_attention.layernorm_qkv.bias": (0, 1),
    "self_attention.proj.weight": (1, 1),
    "layernorm_mlp.fc1_weight": (0, 2),  # gate, up
    "layernorm_mlp.fc2_weight": (1, 1),
}


@dataclass(frozen=True)
class Region:
    """The rows, or the columns, of a whole weight that a rank of a group holds."""

    shape: torch.Size  # of the whole weight
    dim: int  # 0: rows, 1: columns
    stacked: int  # number of matrices stacked in rows, of which the rank holds a part each
    size: int  # of the group
    rank: int

    @classmethod
    def of(cls, part: Tensor, dim: int, stacked: int, size: int, rank: int) -> Region:
        """Return the region of a part with this shape."""
        shape = [length * size if i == dim else length for i, length in enumerate(part.shape)]
        return cls(torch.Size(shape), dim, stacked, size, rank)

    def blocks(self, columns: int) -> Region:
        """Return the region of a tensor with a column for each block of this many columns."""
        *rows, width = self.shape
        return replace(self, shape=torch.Size([*rows, width // columns]))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[slice, int]]:
        """Yield rows start to stop in slices that are consecutive in the whole, and their first row there."""
        numbers = self.take(torch.arange(self.shape[0]))[start:stop]
        for run in numbers.tensor_split((numbers.diff() != 1).nonzero().flatten() + 1):
            if len(run):
                yield slice(start, start + len(run)), int(run[0])
                start += len(run)

    @property
    def first_column(self) -> int:
        return self.rank * self.shape[1] // self.size if self.dim == 1 else 0

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor with these rows, such as their numbers."""
        if self.dim == 1:
            return whole
        return torch.cat([matrix.chunk(self.size)[self.rank] for matrix in whole.chunk(self.stacked)])

    def take_columns(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of whole rows."""
        return rows.chunk(self.size, 1)[self.rank] if self.dim == 1 else rows

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the whole of all ranks' parts."""
        if self.dim == 1:
            return torch.cat(parts, 1)
        stacks = [part.chunk(self.stacked) for part in parts]
        return torch.cat([stack[matrix] for matrix in range(self.stacked) for stack in stacks])


@dataclass(frozen=True)
class TensorParallel:
    """The group of ranks that share each layer."""

    group: Any

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def linear_arguments(self) -> dict[str, Any]:
        """Arguments of a TE module with one linear layer, beside `parallel_mode`."""
        return {"sequence_parallel": True, "tp_group": self.group, "tp_size": self.size}

    def regions(self, model: nn.Module) -> dict[str, Region]:
        """Return the regions of a TECausalLM's split parameters by name; all ranks hold the others."""
        kinds = {"embed_tokens.weight": (0, 1), "lm_head.weight": (0, 1)}
        for i, _ in model.layers.named_children():
            kinds |= {f"layers.{i}.{name}": kind for name, kind in SPLIT.items()}
        return {
            name: Region.of(parameter, *kinds[name], self.size, self.rank)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name in kinds
        }

    def gather(self, part: Tensor, region: Region | None) -> Tensor:
        """Return the whole weight on every rank. Collective."""
        if region is None:
            return part
        parts = gather_tokens(part.detach()[None], self.group)  # [N, ...]
        return region.join(list(parts))

    def embed(self, embedding: nn.Embedding, tokens: Tensor) -> Tensor:
        """Look up tokens [T, ...] in a split vocabulary; return this rank's T/N embeddings [T/N, ..., D]."""
        row = tokens - self.rank * len(embedding.weight)
        held = (row >= 0) & (row < len(embedding.weight))
        hidden = embedding(torch.where(held, row, 0)).masked_fill(~held[..., None], 0.0)
        return scatter_tokens(hidden, self.group)  # exact: a sum of one embedding and zeros

    def token_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        head_loss: Callable[..., TokenLoss] = linear_cross_entropy,
    ) -> TokenLoss:
        """Return the loss of this rank's hidden states [T/N, D] and of all others', over all labels [T].

        `weight` [V/N, D] is this rank's part of the LM head, and `head_loss` computes the loss of it.
        """
        row = labels - self.rank * len(weight)
        held = (row >= 0) & (row < len(weight))
        labels = torch.where(labels == IGNORE, IGNORE, torch.where(held, row, -1))
        return head_loss(gather_tokens(hidden, self.group), weight, labels, self.group)

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Sum the ranks' gradients of weights that all of them hold, in place and in float32. Collective."""
        total = torch.cat([gradient.flatten().float() for gradient in gradients])
        dist.all_reduce(total, group=self.group)
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

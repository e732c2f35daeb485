"""Exchange of tokens between the ranks that share a layer, in forward and backward.

T tokens, N ranks. The embedding and the LM head exchange tokens by it with native TE layers too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_tokens(x: Tensor, group: Any) -> Tensor:
    """Gather [T/N, ...] from all ranks to [T, ...]; backward sums the gradients of this rank's part."""
    return _Exchange.apply(x, group, _all_gather, _reduce_scatter)


def scatter_tokens(x: Tensor, group: Any) -> Tensor:
    """Sum the ranks' [T, ...] and return this rank's part [T/N, ...]; backward gathers the gradients."""
    return _Exchange.apply(x, group, _reduce_scatter, _all_gather)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, exchange: Callable, inverse: Callable) -> Tensor:
        ctx.inverse = partial(inverse, group=group)
        return exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.inverse(grad), None, None, None


def _all_gather(x: Tensor, group: Any) -> Tensor:
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    part = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part

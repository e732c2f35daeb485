"""Attention in plain PyTorch, also under context parallelism, as TE's all_gather.

B rows, S tokens per row, T tokens of this rank, N ranks, H query heads, G key/value groups, K head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fp8_suite.data.context import WHOLE, Context
from fp8_suite.te_models.parallel.sequence_parallel import gather_tokens
from torch import Tensor


def part_of(group: Any) -> Context:
    """Return this rank's part of each sequence, which the ranks of `group` share, if there is one."""
    return Context(group.size(), group.rank()) if group else WHOLE


def positions(boundaries: list[int], group: Any) -> Tensor:
    """Return the positions of this rank's tokens in their sequences, int64 [T]."""
    places = part_of(group).places(boundaries)
    starts = np.asarray(boundaries)[np.searchsorted(boundaries, places, side="right") - 1]
    return torch.from_numpy(places - starts)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Map q [B, S, H, K], k and v [B, S, G, K] to [B, S, H*K]; `mask` [S, S] replaces the causal one."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H or G, S, K]
    masks = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **masks).transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, boundaries: list[int], group: Any) -> Tensor:
    """Map this rank's q [T, H, K], k and v [T, G, K] to [T, H*K]; `boundaries` are of whole sequences."""
    places = [Context(group.size(), rank).places(boundaries) for rank in range(group.size())]
    order = torch.from_numpy(np.argsort(np.concatenate(places)))
    # In float32, in which backward sums gradients.
    k, v = (gather_tokens(x.float(), group).to(x.dtype)[order] for x in (k, v))  # [T*N, G, K]
    spans = list(pairwise(boundaries))
    parts = q.split([(end - start) // group.size() for start, end in spans])
    where = positions(boundaries, group).split([len(part) for part in parts])
    out = []
    for (start, end), part, at in zip(spans, parts, where, strict=True):
        mask = at[:, None] >= torch.arange(end - start)  # a query sees keys up to its own position
        out.append(attend_causally(*(x[None] for x in (part, k[start:end], v[start:end])), mask)[0])
    return torch.cat(out)

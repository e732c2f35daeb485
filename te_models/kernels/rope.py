"""Fused QKV split and RoPE for te.TransformerLayer, in one pass over memory (kernel: `rope_triton`).

TE copies the queries out of the QKV projection, applies RoPE to queries and keys in separate passes, keeps
the projection in memory for the values, and concatenates the gradients in another copy. The fused kernel
reads and writes everything once, forward and backward.

B rows, S tokens per row, T tokens, H query heads, G key/value groups, R = H / G, K head size, P positions.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from fp8_suite.te_models.kernels.selection import reports_failure
from torch import Tensor, nn

# Arguments of te.TransformerLayer that are passed to its attention if present; TE versions differ.
ATTENTION_ARGUMENTS = (
    *("attn_mask_type", "window_size", "pad_between_seqs"),
    *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
    *("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
)


class Rope(NamedTuple):
    """RoPE table and positions, passed as `rotary_pos_emb` to layers patched by `fuse_qkv_rope`."""

    table: Tensor  # [P, K] float32: cosines of the K/2 angles, then their sines
    positions: Tensor  # [B, S] or [T] int64, contiguous


def rope_table(angles: Tensor) -> Tensor:
    """Convert TE's angles [P, 1, 1, K] float32, whose halves are equal, to `Rope.table`."""
    half = angles.flatten(1)[:, : angles.shape[-1] // 2]  # [P, K/2]
    return torch.cat([half.cos(), half.sin()], dim=-1)  # [P, K]


def fuse_qkv_rope(layer: nn.Module) -> None:
    """Make a te.TransformerLayer accept a `Rope`. Parameters and results stay the same.

    Requires no dropout, no QK norm and no FP8 attention.
    """
    attention: Any = layer.self_attention
    attention.forward = functools.partial(_attend, attention, attention.forward)


def _attend(attention: Any, unfused: Any, hidden_states: Tensor, *args: Any, **arguments: Any) -> Any:
    """Forward pass of te.MultiheadAttention with the fused kernel."""
    rope = arguments.get("rotary_pos_emb")
    if not isinstance(rope, Rope):
        return unfused(hidden_states, *args, **arguments)
    is_first = arguments.get("is_first_microbatch")
    qkv = attention.layernorm_qkv(hidden_states, is_first_microbatch=is_first)
    parts = _kernel().apply(qkv, *rope, attention.num_gqa_groups_per_partition)
    passed_on = {name: arguments[name] for name in ATTENTION_ARGUMENTS if name in arguments}
    attended = attention.core_attention(*parts, qkv_format=attention.qkv_format, **passed_on)
    return attention.proj(attended, is_first_microbatch=is_first)


def _kernel() -> type[torch.autograd.Function]:
    return importlib.import_module("fp8_suite.te_models.kernels.rope_triton").SplitQKVRope


def split_qkv_rope(qkv: Tensor, table: Tensor, positions: Tensor, groups: int) -> tuple:
    """Reference of the kernel: [T, G*(R+2)*K] -> q [T, H, K] and k [T, G, K] with RoPE, v [T, G, K]."""
    parts = qkv.unflatten(-1, (groups, -1, table.shape[1]))  # [T, G, R+2, K]
    cos, sin = (half[:, None, None, :] for half in table[positions].chunk(2, dim=-1))  # [T, 1, 1, K/2]
    x, y = parts[..., :-1, :].float().chunk(2, dim=-1)
    rotated = torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1).to(qkv.dtype)  # [T, G, R+1, K]
    return rotated[..., :-1, :].flatten(1, 2), rotated[..., -1, :], parts[..., -1, :]


@reports_failure
def self_test(heads: int, groups: int, size: int) -> str | None:
    """Compare the kernels with the reference; return the first difference, or None."""
    # 37 tokens do not fill the last block; Triton compiles another kernel for multiples of 16, such as 48.
    return next(filter(None, (_difference(heads, groups, size, tokens) for tokens in (37, 48))), None)


def _difference(heads: int, groups: int, size: int, tokens: int) -> str | None:
    generator = torch.Generator("cuda").manual_seed(0)
    random = functools.partial(torch.randn, device="cuda", generator=generator)
    qkv = random(tokens, (heads + 2 * groups) * size).bfloat16().requires_grad_()
    angles = torch.cat([random(64, size // 2)] * 2, dim=-1)[:, None, None, :]
    table, positions = rope_table(angles), torch.arange(tokens, device="cuda").flip(0) + 11
    expected = split_qkv_rope(qkv, table, positions, groups)
    grads = [random(part.shape).bfloat16() for part in expected]
    (expected_grad,) = torch.autograd.grad(expected, qkv, grads)
    parts = _kernel().apply(qkv, table, positions, groups)
    results = *parts, *torch.autograd.grad(parts, qkv, grads)
    names = ("query", "key", "value", "gradient")
    for name, a, b in zip(names, results, (*expected, expected_grad), strict=True):
        if not torch.allclose(a, b, rtol=2**-7, atol=1e-4):  # one unit in the last place of BF16
            return f"the {name} differs from the reference"
    return None

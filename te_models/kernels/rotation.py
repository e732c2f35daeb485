"""Self-attention of te.TransformerLayer that splits and rotates its projection in one pass.

TE copies the queries out of the joint projection, rotates queries and keys each in a pass of its own, keeps
the projection in memory for the values' sake, and joins the gradients in one more copy: `rotation_triton`
reads and writes everything once, forward and backward.

T tokens in all (of rows [B, S], or packed [T]), H query heads, G key/value groups, K head size, P positions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.errors import first_line


class Rotation(NamedTuple):
    """What a layer is given as `rotary_pos_emb`, for attention that `rotate_in_one_pass` changed."""

    table: Tensor  # [P, K] float32: cosines of K/2 angles, then their sines
    positions: Tensor  # [B, S] or [T] int64, contiguous


def rotation_table(angles: Tensor) -> Tensor:
    """[P, 1, 1, K] float32, as TE takes them, whose halves are the same -> `Rotation.table`."""
    half = angles.flatten(1)[:, : angles.shape[-1] // 2]
    return torch.cat([half.cos(), half.sin()], dim=-1)


def rotate_in_one_pass(layer: nn.Module) -> None:
    """Let a te.TransformerLayer take a `Rotation`; without dropout, norms of heads and FP8 attention.

    Its parameters, their names and what it computes stay.
    """
    attention: Any = layer.self_attention
    attention.__class__ = _rotating(type(attention))


@functools.cache
def _rotating(base: type) -> type:
    """A subclass of te.MultiheadAttention."""

    class RotatingAttention(base):
        def forward(self, hidden_states: Tensor, *args: Any, **arguments: Any) -> Any:
            rotation = arguments.get("rotary_pos_emb")
            if not isinstance(rotation, Rotation):
                return super().forward(hidden_states, *args, **arguments)
            first = arguments.get("is_first_microbatch")
            joint = self.layernorm_qkv(hidden_states, is_first_microbatch=first)
            parts = _SplitAndRotate.apply(joint, *rotation, self.num_gqa_groups_per_partition)
            names = ("attn_mask_type", "window_size", "pad_between_seqs")
            names += ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
            passed_on = {name: arguments[name] for name in names if name in arguments}  # TE's versions differ
            attended = self.core_attention(*parts, qkv_format=self.qkv_format, **passed_on)
            return self.proj(attended, is_first_microbatch=first)

    return RotatingAttention


def why_not(heads: int, groups: int, size: int) -> str | None:
    """What is wrong with the kernels on this machine for so many heads of such a size, or None."""
    # Blocks that are full, and one that is not; Triton compiles anew for what is a multiple of 16.
    return next(filter(None, (_wrong(heads, groups, size, tokens=tokens) for tokens in (37, 48))), None)


def _wrong(heads: int, groups: int, size: int, *, tokens: int) -> str | None:
    generator = torch.Generator("cuda").manual_seed(0)
    random = functools.partial(torch.randn, device="cuda", generator=generator)
    joint = random(tokens, (heads + 2 * groups) * size).bfloat16().requires_grad_()
    angles = torch.cat([random(64, size // 2)] * 2, dim=-1)[:, None, None, :]
    table, positions = rotation_table(angles), torch.arange(tokens, device="cuda").flip(0) + 11
    expected = split_and_rotate(joint, table, positions, groups)
    grads = [random(part.shape).bfloat16() for part in expected]
    (wanted,) = torch.autograd.grad(expected, joint, grads)
    try:
        found = _SplitAndRotate.apply(joint, table, positions, groups)
        (grad,) = torch.autograd.grad(found, joint, grads)
    except Exception as error:  # Triton's compiler
        return f"it fails ({first_line(error)})"
    for name, a, b in zip(("query", "key", "value"), found, expected, strict=True):
        if not torch.allclose(a, b, rtol=2**-7, atol=1e-4):  # a last bit of BF16
            return f"it computes another {name}"
    return None if torch.allclose(grad, wanted, rtol=2**-7, atol=1e-4) else "it computes another gradient"


def split_and_rotate(joint: Tensor, table: Tensor, positions: Tensor, groups: int) -> tuple:
    """What `_SplitAndRotate` computes, from the definition."""
    size = table.shape[1]
    parts = joint.unflatten(-1, (groups, -1, size))  # [T, G, H / G + 2, K]
    cos, sin = (half[:, None, None, :] for half in table[positions].chunk(2, dim=-1))
    x, y = parts[..., :-1, :].float().chunk(2, dim=-1)
    rotated = torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1).to(joint.dtype)
    return rotated[..., :-1, :].flatten(1, 2), rotated[..., -1, :], parts[..., -1, :]


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, table: Tensor, positions: Tensor, groups: int) -> tuple:
        from te_models.kernels.rotation_triton import split

        ctx.save_for_backward(table, positions)
        return split(joint, table, positions, groups)

    @staticmethod
    def backward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> tuple:
        from te_models.kernels.rotation_triton import join

        return join(queries, keys, values, *ctx.saved_tensors), None, None, None

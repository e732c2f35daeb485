"""Transformer Engine's decoder layer in plain PyTorch: TE's numerics anywhere (`--te_backend emulated`).

This module has the names of `transformer_engine.pytorch` and `transformer_engine.common.recipe` that the
suite uses, with the same arguments. Parameters have TE's names and layouts and delayed scaling's state TE's
places and shapes, so that checkpoints go from one backend to the other.

What is quantized, from which precision, with which scale and when scales move on follow TE 2.20 on Hopper
(MXFP8: on Blackwell). Sums of GEMMs and attention differ in their last bits. The parts: `casts`,
`recipes`, `scaling`, `gemm`, `layers`.

B batch, S sequence, T = B*S tokens, D hidden size, H query heads, G key/value groups, K head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from te_models.emulation.layers import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    activation_dtype,
    refuse_other,
)
from te_models.emulation.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from te_models.emulation.scaling import Fp8Module, autocast, checkpoint

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8BlockScaling",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


def quantized_model_init(**_: Any) -> Any:
    """ValueError: the emulated layers keep their weights in high precision."""
    raise ValueError("--fp8_all_gather: --te_backend emulated has no FP8 weights; drop one of them")


# What a layer's arguments must be: the emulation has no other branch of TE's.
FIXED = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "fuse_qkv_params": True,
    "qkv_weight_interleaved": True,
}


class DotProductAttention(Fp8Module):
    """Causal attention within sequences, in the activation dtype, never FP8.

    It has delayed scaling's state all the same, unused, because TE's has.
    """

    num_gemms = 3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """q [B, S, H, K], k and v [B, S, G, K], or [T, ., K] with `cu_seqlens` [N+1]; result [..., H*K]."""
        self.initialize(q.device)
        if cu_seqlens is None:
            return self._attend(q, k, v)
        lengths = cu_seqlens.diff().tolist()
        sequences = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        filled = (qkv for qkv in sequences if len(qkv[0]))
        return torch.cat([self._attend(*(x[None] for x in qkv))[0] for qkv in filled])

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, ., S, K]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(2)  # [B, S, H*K]


class MultiheadAttention(nn.Module):
    """Self-attention of a decoder layer; queries, keys and values come out of one linear, group by group."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        groups: int,
        size: int,
        *,
        eps: float,
        qk_norm: dict[str, Any] | None,
        params_dtype: torch.dtype | None,
        device: Any,
    ):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        made = {"params_dtype": params_dtype, "device": device}
        if qk_norm is not None:
            self.q_norm = RMSNorm(size, dtype=params_dtype, device=device, **qk_norm)
            self.k_norm = RMSNorm(size, dtype=params_dtype, device=device, **qk_norm)
        else:
            self.q_norm = self.k_norm = None
        self.layernorm_qkv = LayerNormLinear(
            hidden_size, (heads + 2 * groups) * size, eps=eps, bias=False, **made
        )
        self.core_attention = DotProductAttention()
        self.proj = Linear(heads * size, hidden_size, **made)

    def forward(self, x: Tensor, rope: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        per_group = self.heads // self.groups
        mixed = self.layernorm_qkv(x).unflatten(-1, (self.groups, per_group + 2, self.size))
        q, k, v = mixed.split([per_group, 1, 1], dim=-2)  # [..., G, R or 1, K]
        q, k, v = (part.flatten(-3, -2) for part in (q, k, v))  # [..., H or G, K]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = rope_at_positions(rope, q, cu_seqlens)
        return self.proj(self.core_attention(rotate(q, angles), rotate(k, angles), v, cu_seqlens))


def rope_at_positions(rope: Tensor, q: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Angles [S, 1, 1, K] for q [B, S, H, K], or for [T, H, K] with positions that restart: [., 1, K]."""
    if cu_seqlens is None:
        return rope[: q.shape[1], 0]  # [S, 1, K]
    tokens = torch.arange(q.shape[0], device=q.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens.int(), right=True) - 1]
    return rope[tokens - starts, 0]  # [T, 1, K]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE on [..., H, K] in float32, the halves of K being the two coordinates."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * angles.cos() + turned * angles.sin()).to(x.dtype)


class TransformerLayer(nn.Module):
    """te.TransformerLayer as the suite builds it: a Llama or Qwen layer. ValueError for other kinds."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        kv_channels: int | None = None,
        layernorm_epsilon: float = 1e-5,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        self_attn_mask_type: str = "causal",
        attn_input_format: str = "bshd",
        layer_number: int | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **rest: Any,
    ):
        super().__init__()
        mask = {"bshd": "causal", "thd": "padding_causal"}.get(attn_input_format)
        fixed = {name: (rest.pop(name, None), value) for name, value in FIXED.items()}
        refuse_other(
            **fixed,
            self_attn_mask_type=(self_attn_mask_type, mask),
            qk_norm_type=(qk_norm_type, qk_norm_type and "RMSNorm"),
            qk_norm_before_rope=(qk_norm_before_rope, bool(qk_norm_type)),
            **{name: (value, "left out") for name, value in rest.items()},
        )
        self.attn_input_format, self.layer_number = attn_input_format, layer_number
        made = {"params_dtype": params_dtype, "device": device}
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            num_gqa_groups or num_attention_heads,
            kv_channels or hidden_size // num_attention_heads,
            eps=layernorm_epsilon,
            qk_norm={"eps": qk_norm_eps} if qk_norm_type else None,
            **made,
        )
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, eps=layernorm_epsilon, **made)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """[B, S, D], or [T, D] with `cu_seqlens_q` int32 [N+1]; angles [S, 1, 1, K] float32.

        TE's other arguments say the same again for self-attention.
        """
        for module in self._fp8_modules():
            module.fsdp2 = isinstance(self, FSDPModule)
        x = hidden_states.to(activation_dtype(hidden_states))
        x = x + self.self_attention(x, rotary_pos_emb, cu_seqlens_q)
        return x + self.layernorm_mlp(x)

    def _fp8_modules(self) -> Iterable[Fp8Module]:
        return (module for module in self.modules() if isinstance(module, Fp8Module))

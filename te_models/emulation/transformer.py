"""Emulated te.TransformerLayer and its attention, with the options that `te_models.decoder` uses.

B rows, S tokens per row, T = B*S tokens, N sequences, D hidden size, H query heads, G key/value groups,
R = H / G, K head size, P positions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from fp8_suite.te_models.emulation import context
from fp8_suite.te_models.emulation.layers import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    activation_dtype,
)
from fp8_suite.te_models.emulation.scaling import Fp8Module
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class DotProductAttention(Fp8Module):
    """Causal attention within each sequence in the activation dtype, never in FP8.

    As in TE, it has state for delayed scaling, which stays unused.
    """

    num_gemms = 3
    context_group: Any = None  # ranks that share sequences; S and T are then of this rank's tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor, boundaries: list[int]) -> Tensor:
        """Map q [B, S, H, K], k and v [B, S, G, K] to [B, S, H*K], or packed [T, ., K] to [T, H*K].

        `boundaries` are of whole sequences.
        """
        self.initialize(q.device)
        if self.context_group:
            flat = (x.flatten(0, -3) for x in (q, k, v))  # [T, ., K]
            return context.attend(*flat, boundaries, self.context_group).view(*q.shape[:-2], -1)
        if q.ndim == 4:
            return context.attend_causally(q, k, v)
        spans = [slice(start, end) for start, end in pairwise(boundaries) if start < end]
        return torch.cat([context.attend_causally(*(x[None, span] for x in (q, k, v)))[0] for span in spans])

    def boundaries(self, q: Tensor, cu_seqlens: Tensor | None) -> list[int]:
        """Return the boundaries of whole sequences; without `cu_seqlens` every row is one."""
        if cu_seqlens is not None:
            return cu_seqlens.tolist()
        rows, width = q.shape[0], q.shape[1] * context.part_of(self.context_group).size
        return [row * width for row in range(rows + 1)]


class MultiheadAttention(nn.Module):
    """Self-attention with one linear layer for queries, keys and values, interleaved by group."""

    sequence_first = False  # rows are [S, B, D], as sequence parallelism splits the first dimension

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        groups: int,
        size: int,
        *,
        eps: float,
        qk_norm_eps: float | None,
        tp: dict[str, Any],
        **factory_kwargs: Any,
    ):
        super().__init__()
        self.heads, self.groups, self.size = heads // tp["tp_size"], groups // tp["tp_size"], size
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            dtype, device = factory_kwargs["params_dtype"], factory_kwargs["device"]
            norms = (RMSNorm(size, eps=qk_norm_eps, dtype=dtype, device=device) for _ in range(2))
            self.q_norm, self.k_norm = norms
        joint = (heads + 2 * groups) * size
        self.layernorm_qkv = LayerNormLinear(hidden_size, joint, eps=eps, bias=False, **tp, **factory_kwargs)
        self.core_attention = DotProductAttention()
        self.proj = Linear(heads * size, hidden_size, **tp, **factory_kwargs)

    def forward(self, x: Tensor, rope: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Map [B, S, D], or packed [T, D] with `cu_seqlens` [N+1]; `rope` angles [P, 1, 1, K] float32.

        With sequence parallelism x is a rank's part, of [T, D] or of [S, B, D].
        """
        per_group = self.heads // self.groups
        joint = self.layernorm_qkv(x).unflatten(-1, (self.groups, per_group + 2, self.size))
        q, k, v = joint.split([per_group, 1, 1], dim=-2)  # [..., G, R or 1, K]
        q, k, v = (part.flatten(-3, -2) for part in (q, k, v))  # [..., H or G, K]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.sequence_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [B, S, ., K]
        attention = self.core_attention
        boundaries = attention.boundaries(q, cu_seqlens)
        positions = context.positions(boundaries, attention.context_group)
        angles = rope[positions, 0].view(*q.shape[:-2], 1, -1)  # [B, S, 1, K] or [T, 1, K]
        out = attention(rotate(q, angles), rotate(k, angles), v, boundaries)
        return self.proj(out.transpose(0, 1) if self.sequence_first else out)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply RoPE to x [..., H, K] in float32; element i of K is rotated with element i + K/2."""
    first, second = x.float().chunk(2, dim=-1)  # [..., H, K/2]
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * angles.cos() + turned * angles.sin()).to(x.dtype)


# Other arguments of te.TransformerLayer -> the values that are emulated.
EMULATED_VALUES: dict[str, tuple] = {
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "normalization": ("RMSNorm",),
    "activation": ("swiglu",),
    "bias": (False,),
    "fuse_qkv_params": (True,),
    "qkv_weight_interleaved": (True,),
    "self_attn_mask_type": ("causal", "padding_causal"),  # every sequence is causal; masked by `cu_seqlens`
    "attn_input_format": ("bshd", "thd", "sbhd"),
    "set_parallel_mode": (True,),
    "sequence_parallel": (True,),
    "qk_norm_type": ("RMSNorm",),
    "qk_norm_before_rope": (True,),
}


class TransformerLayer(nn.Module):
    """Decoder layer of Llama, Qwen or Mistral, with the arguments of te.TransformerLayer.

    TypeError for an argument, or a value of one, that is not emulated.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int,
        kv_channels: int,
        layernorm_epsilon: float,
        qk_norm_eps: float | None = None,
        layer_number: int | None = None,  # for TE's signature; not used
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        **fixed: Any,  # see EMULATED_VALUES
    ):
        super().__init__()
        for name, value in fixed.items():
            if value not in EMULATED_VALUES.get(name, ()):
                raise TypeError(f"TransformerLayer({name}={value!r}) is not emulated")
        factory_kwargs = {"params_dtype": params_dtype, "device": device}
        tp = {"tp_group": tp_group, "tp_size": tp_size}
        sizes = hidden_size, num_attention_heads, num_gqa_groups, kv_channels
        eps = {"eps": layernorm_epsilon, "qk_norm_eps": qk_norm_eps}
        self.self_attention = MultiheadAttention(*sizes, **eps, tp=tp, **factory_kwargs)
        self.self_attention.sequence_first = fixed.get("attn_input_format") == "sbhd"
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, **tp, **factory_kwargs
        )

    def set_context_parallel_group(self, group: Any, ranks: list[int], stream: Any, comm_type: str) -> None:
        assert comm_type == "all_gather", f"{comm_type} is not emulated"
        self.self_attention.core_attention.context_group = group

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        pad_between_seqs: bool = False,
    ) -> Tensor:
        """Map [B, S, D], or packed [T, D] with `cu_seqlens_q` [N+1]; RoPE angles [P, 1, 1, K] float32.

        The other arguments are for TE's signature: keys have the queries' sequences, without padding between.
        """
        assert cu_seqlens_q_padded is None or cu_seqlens_q_padded is cu_seqlens_q
        for module in self.modules():
            if isinstance(module, Fp8Module):
                module.fsdp2 = isinstance(self, FSDPModule)
        x = hidden_states.to(activation_dtype(hidden_states))
        x = x + self.self_attention(x, rotary_pos_emb, cu_seqlens_q)
        return x + self.layernorm_mlp(x)

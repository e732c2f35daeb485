"""Dimensions of a model, and its FLOPs.

A FLOP is one multiplication or one addition: a GEMM of [m, k] x [k, n] has 2*m*k*n. Model FLOPs exclude
recomputed activations, padding and the masked half of attention, so a faster run always has a higher rate.
This module must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fp8_suite.te_models.families import FAMILIES, head_dim

# Model types whose FLOPs `ModelShape` counts correctly: dense, gated MLPs, one LM head.
COUNTED = frozenset({*FAMILIES, "gemma", "gemma2", "granite", "olmo2", "phi3"})


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a dense decoder-only language model with gated MLPs (SwiGLU)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    window: int | None = None  # sliding window of at least one layer, in tokens

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelShape | None:
        """Read a transformers config. None if the model type is not in COUNTED."""
        if config.model_type not in COUNTED:
            return None
        kinds = getattr(config, "layer_types", None)
        slides = kinds is None or "sliding_attention" in kinds
        return cls(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim(config),
            ffn_hidden_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            window=getattr(config, "sliding_window", None) if slides else None,
        )

    def sees_all(self, length: int) -> bool:
        """True if attention covers a sequence of `length` tokens, as `attention_flops` assumes."""
        return self.window is None or self.window >= length

    def part(self, size: int) -> ModelShape:
        """Return the dimensions that one of `size` ranks has, if these share each layer."""
        names = ("num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size")
        return replace(self, **{name: getattr(self, name) // size for name in names})

    @property
    def gemm_sizes(self) -> dict[str, int]:
        """Sizes of a layer's GEMM weights, by their names in error messages."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_hidden_size,
            "query width": self.num_heads * self.head_dim,
            "key/value width": self.num_kv_heads * self.head_dim,
        }


def matmul_parameters(shape: ModelShape) -> int:
    """Count the weights in GEMMs: q, k, v, o, gate, up, down and LM head, tied or not.

    Embedding, norms and biases are not in GEMMs and do not count.
    """
    layer = sum(inputs * outputs for inputs, outputs in projections(shape).values())
    return shape.num_layers * layer + shape.hidden_size * shape.vocab_size


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the input and output features of a layer's linear projections, by Hugging Face name."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        **{"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)},
        **{"o_proj": (queries, hidden), "gate_proj": (hidden, ffn), "up_proj": (hidden, ffn)},
        "down_proj": (ffn, hidden),
    }


def attention_flops(shape: ModelShape, sum_squared_lengths: int) -> float:
    """Forward and backward FLOPs of QK^T and PV in causal attention.

    Full attention takes 12 * layers * heads * head_dim * length^2; causal attention takes half.
    """
    return 6.0 * shape.num_layers * shape.num_heads * shape.head_dim * sum_squared_lengths


def model_flops(shape: ModelShape, *, tokens: int, sum_squared_lengths: int, adapters: int = 0) -> float:
    """Forward and backward FLOPs over `tokens` tokens in independent causal sequences.

    `sum_squared_lengths` is the sum of length^2 over the sequences; each packed sample is a sequence of its
    own. Source: PaLM (arXiv:2204.02311), appendix B, 6N + 12LHQT per token, with N the weights in GEMMs and
    the causal half of the second term. Llama-3.1-8B at 8192 tokens: 51.47 GFLOP per token. With `adapters`,
    the parameters of LoRA, the other weights are frozen: their gradients, 2N, are not computed.
    """
    frozen = 4.0 * matmul_parameters(shape) + 6.0 * adapters
    gemm_flops = (frozen if adapters else 6.0 * matmul_parameters(shape)) * tokens
    return gemm_flops + attention_flops(shape, sum_squared_lengths)

"""Dimensions of the supported models, so that they can be built from random weights without a download."""

from __future__ import annotations

from typing import Any


def _llama3(
    hidden: int, layers: int, heads: int, ffn: int, *, head_dim: int, tied: bool, factor: float
) -> dict:
    """Llama 3.x: https://arxiv.org/abs/2407.21783, table 3, and the published config.json files."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


_LLAMA_32_1B = _llama3(2048, 16, 32, 8192, head_dim=64, tied=True, factor=32.0)
_LLAMA_32_3B = _llama3(3072, 28, 24, 8192, head_dim=128, tied=True, factor=32.0)
_LLAMA_31_8B = _llama3(4096, 32, 32, 14336, head_dim=128, tied=False, factor=8.0)
_LLAMA_31_70B = _llama3(8192, 80, 64, 28672, head_dim=128, tied=False, factor=8.0)
_LLAMA_31_405B = _llama3(16384, 126, 128, 53248, head_dim=128, tied=False, factor=8.0)

# https://arxiv.org/abs/2412.15115, table 1, and the published config.json.
_QWEN_25_14B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}

# Every size is a multiple of 128, so the tiny model runs under every recipe, block scaling included.
_TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": _TINY_LLAMA,
    "meta-llama/Llama-3.2-1B": _LLAMA_32_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_32_1B,
    "meta-llama/Llama-3.2-3B": _LLAMA_32_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_32_3B,
    "meta-llama/Llama-3.1-8B": _LLAMA_31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31_8B,
    "meta-llama/Meta-Llama-3.1-8B": _LLAMA_31_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_31_70B,
    "meta-llama/Meta-Llama-3.1-70B": _LLAMA_31_70B,
    "meta-llama/Llama-3.1-405B": _LLAMA_31_405B,
    "meta-llama/Meta-Llama-3.1-405B": _LLAMA_31_405B,
    "Qwen/Qwen2.5-14B": _QWEN_25_14B,
}

# Presets that exist nowhere else: their weights are always random, their tokenizer is the demo's.
LOCAL_PRESETS = frozenset({"tiny-llama"})

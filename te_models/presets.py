"""Dimensions of the supported models, so that they can be built from random weights without a download."""

from __future__ import annotations

import difflib
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
_LLAMA_3 = {
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
_LLAMA_3_8B, _LLAMA_3_70B = _LLAMA_31_8B | _LLAMA_3, _LLAMA_31_70B | _LLAMA_3
_LLAMA_3_INSTRUCT = {"eos_token_id": 128009}
_LLAMA_INSTRUCT = {"eos_token_id": [128001, 128008, 128009]}  # from 3.1 on


def _qwen25(
    hidden: int, layers: int, heads: int, groups: int, ffn: int, *, tied: bool = False, vocab: int = 152064
) -> dict:
    """Qwen2.5 base models: https://arxiv.org/abs/2412.15115, table 1, and the published config.json files."""
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> dict:
    """Qwen3 dense: https://arxiv.org/abs/2505.09388, table 1, and the published config.json files."""
    shape = _qwen25(hidden, layers, heads, 8, ffn, tied=tied, vocab=151936)
    own = {"model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960, "eos_token_id": 151645}
    return shape | own


_QWEN_25_05B = _qwen25(896, 24, 14, 2, 4864, tied=True, vocab=151936) | {"max_position_embeddings": 32768}
_QWEN_25_15B = _qwen25(1536, 28, 12, 2, 8960, tied=True, vocab=151936)
_QWEN_25_7B = _qwen25(3584, 28, 28, 4, 18944)
_QWEN_25_14B = _qwen25(5120, 48, 40, 8, 13824) | {"rms_norm_eps": 1e-5}
_QWEN_25_INSTRUCT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": 151645}

_QWEN_3_06B = _qwen3(1024, 28, 16, 3072, tied=True)
_QWEN_3_4B = _qwen3(2560, 36, 32, 9728, tied=True)
_QWEN_3_8B = _qwen3(4096, 36, 32, 12288)
_QWEN_3_14B = _qwen3(5120, 40, 40, 17408)
_QWEN_3_BASE = {"max_position_embeddings": 32768, "eos_token_id": 151643}

# https://arxiv.org/abs/2310.06825, table 1, and the published config.json, where v0.3 has no window.
_MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Every size is a multiple of 128, so the tiny models run under every recipe, block scaling included.
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
    "tiny-qwen2": _TINY_LLAMA | {"model_type": "qwen2", "rms_norm_eps": 1e-6},
    # Its heads together are wider than the model, as Qwen3's are.
    "tiny-qwen3": _TINY_LLAMA | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 128},
    "tiny-mistral": _TINY_LLAMA | {"model_type": "mistral", "sliding_window": None},
    "meta-llama/Llama-3.2-1B": _LLAMA_32_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_32_1B | _LLAMA_INSTRUCT,
    "meta-llama/Llama-3.2-3B": _LLAMA_32_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_32_3B | _LLAMA_INSTRUCT,
    "meta-llama/Llama-3.1-8B": _LLAMA_31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_31_8B | _LLAMA_INSTRUCT,
    "meta-llama/Llama-3.1-70B": _LLAMA_31_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_31_70B | _LLAMA_INSTRUCT,
    "meta-llama/Llama-3.1-405B": _LLAMA_31_405B,
    "meta-llama/Llama-3.1-405B-Instruct": _LLAMA_31_405B | _LLAMA_INSTRUCT,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_31_70B | _LLAMA_INSTRUCT,
    "meta-llama/Meta-Llama-3.1-8B": _LLAMA_31_8B,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": _LLAMA_31_8B | _LLAMA_INSTRUCT,
    "meta-llama/Meta-Llama-3.1-70B": _LLAMA_31_70B,
    "meta-llama/Meta-Llama-3.1-70B-Instruct": _LLAMA_31_70B | _LLAMA_INSTRUCT,
    "meta-llama/Meta-Llama-3.1-405B": _LLAMA_31_405B,
    "meta-llama/Meta-Llama-3.1-405B-Instruct": _LLAMA_31_405B | _LLAMA_INSTRUCT,
    "meta-llama/Meta-Llama-3-8B": _LLAMA_3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA_3_8B | _LLAMA_3_INSTRUCT,
    "meta-llama/Meta-Llama-3-70B": _LLAMA_3_70B,
    "meta-llama/Meta-Llama-3-70B-Instruct": _LLAMA_3_70B | _LLAMA_3_INSTRUCT,
    "Qwen/Qwen2.5-0.5B": _QWEN_25_05B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN_25_05B | _QWEN_25_INSTRUCT,
    "Qwen/Qwen2.5-1.5B": _QWEN_25_15B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN_25_15B | _QWEN_25_INSTRUCT,
    "Qwen/Qwen2.5-7B": _QWEN_25_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_25_7B | _QWEN_25_INSTRUCT,
    "Qwen/Qwen2.5-14B": _QWEN_25_14B,
    "Qwen/Qwen2.5-14B-Instruct": _QWEN_25_14B | _QWEN_25_INSTRUCT,
    "Qwen/Qwen3-0.6B": _QWEN_3_06B,
    "Qwen/Qwen3-0.6B-Base": _QWEN_3_06B | _QWEN_3_BASE,
    "Qwen/Qwen3-4B": _QWEN_3_4B,
    "Qwen/Qwen3-4B-Base": _QWEN_3_4B | _QWEN_3_BASE,
    "Qwen/Qwen3-8B": _QWEN_3_8B,
    "Qwen/Qwen3-8B-Base": _QWEN_3_8B | _QWEN_3_BASE,
    "Qwen/Qwen3-14B": _QWEN_3_14B,
    "Qwen/Qwen3-14B-Base": _QWEN_3_14B | _QWEN_3_BASE,
    "mistralai/Mistral-7B-v0.3": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
}

# Presets that exist nowhere else: their weights are always random, their tokenizer is the demo's.
LOCAL_PRESETS = frozenset(name for name in PRESETS if "/" not in name)


def closest_preset(name: str) -> str | None:
    """Return the preset whose name, without its owner, is nearly `name`, or None."""
    shorter = {preset.rpartition("/")[2].lower(): preset for preset in PRESETS}
    close = difflib.get_close_matches(name.lower(), shorter, n=1, cutoff=0.75)
    return shorter[close[0]] if close and "/" not in name else None

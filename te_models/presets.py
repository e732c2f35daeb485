"""Configurations of the supported models, so that they can be built from random weights without a download.

All values are those of the published config.json files; see also the tables in https://arxiv.org/abs/2407.21783
(Llama 3), 2412.15115 (Qwen2.5), 2505.09388 (Qwen3) and 2310.06825 (Mistral).
"""

from __future__ import annotations

import difflib
from typing import Any


def _shape(hidden_size: int, layers: int, heads: int, groups: int, ffn: int, **rest: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "tie_word_embeddings": False,
        **rest,
    }


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _llama31(*shape: int, factor: float = 8.0, **rest: Any) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    defaults = {
        "model_type": "llama",
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **scaling},
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    return _shape(*shape, **defaults | rest)


def _qwen25(*shape: int, **rest: Any) -> dict[str, Any]:
    defaults = {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        **_rope(1000000.0),
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }
    return _shape(*shape, **defaults | rest)


def _qwen3(*shape: int, **rest: Any) -> dict[str, Any]:
    own = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    return _qwen25(*shape, **own, eos_token_id=151645, **rest)


_TIED = {"tie_word_embeddings": True}
_LLAMA_32 = {"factor": 32.0, **_TIED}
_8B, _70B = _llama31(4096, 32, 32, 8, 14336), _llama31(8192, 80, 64, 8, 28672)
_405B = _llama31(16384, 126, 128, 8, 53248)
_LLAMA_3 = {"max_position_embeddings": 8192, **_rope(500000.0)}
_SMALL_QWEN = {"vocab_size": 151936, **_TIED}
_MISTRAL_7B = _shape(4096, 32, 32, 8, 14336, model_type="mistral", head_dim=128, vocab_size=32768)
_MISTRAL_7B |= {"max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5}
_MISTRAL_7B |= {**_rope(1000000.0), "bos_token_id": 1, "eos_token_id": 2}
# Every size is a multiple of 128, so the tiny models run in every recipe, block scaling included.
_TINY = _shape(256, 3, 4, 2, 512, head_dim=64, vocab_size=2048, max_position_embeddings=2048)
_TINY |= {"rms_norm_eps": 1e-6, **_TIED, **_rope(10000.0)}

_TINY_MODELS = {
    "tiny-llama": _TINY | {"model_type": "llama", "rms_norm_eps": 1e-5},
    "tiny-qwen2": _TINY | {"model_type": "qwen2"},
    "tiny-qwen3": _TINY | {"model_type": "qwen3", "head_dim": 128},  # heads wider than the hidden size
    "tiny-mistral": _TINY | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None},
}
_LLAMA_31 = {
    "meta-llama/Llama-3.2-1B": _llama31(2048, 16, 32, 8, 8192, head_dim=64, **_LLAMA_32),
    "meta-llama/Llama-3.2-3B": _llama31(3072, 28, 24, 8, 8192, **_LLAMA_32),
    "meta-llama/Llama-3.1-8B": _8B,
    "meta-llama/Llama-3.1-70B": _70B,
    "meta-llama/Llama-3.1-405B": _405B,
    "meta-llama/Meta-Llama-3.1-8B": _8B,
    "meta-llama/Meta-Llama-3.1-70B": _70B,
    "meta-llama/Meta-Llama-3.1-405B": _405B,
}
_LLAMA_3_MODELS = {
    "meta-llama/Meta-Llama-3-8B": _8B | _LLAMA_3,
    "meta-llama/Meta-Llama-3-70B": _70B | _LLAMA_3,
}
_QWEN_25 = {
    "Qwen/Qwen2.5-0.5B": _qwen25(896, 24, 14, 2, 4864, max_position_embeddings=32768, **_SMALL_QWEN),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 28, 12, 2, 8960, **_SMALL_QWEN),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 28, 28, 4, 18944),
    "Qwen/Qwen2.5-14B": _qwen25(5120, 48, 40, 8, 13824, rms_norm_eps=1e-5),
}
_QWEN_3 = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, **_TIED),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, **_TIED),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408),
}


def _variants(models: dict[str, Any], suffix: str, **changes: Any) -> dict[str, Any]:
    return models | {name + suffix: config | changes for name, config in models.items()}


_LLAMA_31_INSTRUCT = {"eos_token_id": [128001, 128008, 128009]}
_QWEN_25_INSTRUCT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": 151645}
PRESETS: dict[str, dict[str, Any]] = {
    **_TINY_MODELS,
    **_variants(_LLAMA_31, "-Instruct", **_LLAMA_31_INSTRUCT),
    "meta-llama/Llama-3.3-70B-Instruct": _70B | _LLAMA_31_INSTRUCT,
    **_variants(_LLAMA_3_MODELS, "-Instruct", eos_token_id=128009),
    **_variants(_QWEN_25, "-Instruct", **_QWEN_25_INSTRUCT),
    **_variants(_QWEN_3, "-Base", max_position_embeddings=32768, eos_token_id=151643),
    "mistralai/Mistral-7B-v0.3": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
}

LOCAL_PRESETS = frozenset(_TINY_MODELS)  # not on the hub: random weights, the demo's tokenizer


def closest_preset(name: str) -> str | None:
    """Return the preset whose name, without its owner, is nearly `name`, or None."""
    shorter = {preset.rpartition("/")[2].lower(): preset for preset in PRESETS}
    close = difflib.get_close_matches(name.lower(), shorter, n=1, cutoff=0.75)
    return shorter[close[0]] if close and "/" not in name else None

"""Configurations of the supported models, to build them with random weights without a download.

Values are from the published config.json files; see also the tables in https://arxiv.org/abs/2407.21783
(Llama 3), 2412.15115 (Qwen2.5), 2505.09388 (Qwen3) and 2310.06825 (Mistral).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.files import require_folder

SIZES = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"


def _model(family: dict[str, Any], *sizes: int, **rest: Any) -> dict[str, Any]:
    """Return a family's configuration with these `SIZES` and further changes."""
    return family | dict(zip(SIZES, sizes, strict=True)) | rest


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **scaling}}


_TIED = {"tie_word_embeddings": True}
_LLAMA = {
    **{"model_type": "llama", "tie_word_embeddings": False, "head_dim": 128, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **_llama3_rope(8.0)},
    **{"bos_token_id": 128000, "eos_token_id": 128001},
}
_LLAMA_32 = _LLAMA | _TIED | _llama3_rope(32.0)
_QWEN_2 = {
    **{"model_type": "qwen2", "tie_word_embeddings": False, "vocab_size": 152064},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, **_rope(1000000.0)},
    **{"bos_token_id": 151643, "eos_token_id": 151643},
}
_SMALL_QWEN_2 = _QWEN_2 | _TIED | {"vocab_size": 151936}
_QWEN_3 = _QWEN_2 | {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}
_QWEN_3 |= {"max_position_embeddings": 40960, "eos_token_id": 151645}
_MISTRAL = {
    **{"model_type": "mistral", "tie_word_embeddings": False, "head_dim": 128, "vocab_size": 32768},
    **{"max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5, **_rope(1000000.0)},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
# Sizes are multiples of 128, so the tiny models run in every recipe, including block scaling.
_TINY = {"head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_TINY = _model(_TINY | _TIED | _rope(10000.0), 256, 3, 4, 2, 512)

_8B, _70B = _model(_LLAMA, 4096, 32, 32, 8, 14336), _model(_LLAMA, 8192, 80, 64, 8, 28672)
_405B = _model(_LLAMA, 16384, 126, 128, 8, 53248)
_LLAMA_31 = {"8B": _8B, "70B": _70B, "405B": _405B}
_LLAMA_3 = {"max_position_embeddings": 8192, **_rope(500000.0)}
_MISTRAL_7B = _model(_MISTRAL, 4096, 32, 32, 8, 14336)

_TINY_MODELS = {  # one per family: tests train tiny-<model_type>
    "tiny-llama": _TINY | {"model_type": "llama", "rms_norm_eps": 1e-5},
    "tiny-qwen2": _TINY | {"model_type": "qwen2"},
    "tiny-qwen3": _TINY | {"model_type": "qwen3", "head_dim": 128},  # heads wider than the hidden size
    "tiny-mistral": _TINY | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None},
}
_LLAMA_31_AND_32_MODELS = {
    "meta-llama/Llama-3.2-1B": _model(_LLAMA_32, 2048, 16, 32, 8, 8192, head_dim=64),
    "meta-llama/Llama-3.2-3B": _model(_LLAMA_32, 3072, 28, 24, 8, 8192),
    **{f"meta-llama/Llama-3.1-{size}": model for size, model in _LLAMA_31.items()},
    **{f"meta-llama/Meta-Llama-3.1-{size}": model for size, model in _LLAMA_31.items()},
}
_LLAMA_3_MODELS = {
    "meta-llama/Meta-Llama-3-8B": _8B | _LLAMA_3,
    "meta-llama/Meta-Llama-3-70B": _70B | _LLAMA_3,
}
_QWEN_25_MODELS = {
    "Qwen/Qwen2.5-0.5B": _model(_SMALL_QWEN_2, 896, 24, 14, 2, 4864, max_position_embeddings=32768),
    "Qwen/Qwen2.5-1.5B": _model(_SMALL_QWEN_2, 1536, 28, 12, 2, 8960),
    "Qwen/Qwen2.5-7B": _model(_QWEN_2, 3584, 28, 28, 4, 18944),
    "Qwen/Qwen2.5-14B": _model(_QWEN_2, 5120, 48, 40, 8, 13824, rms_norm_eps=1e-5),
}
_QWEN_3_MODELS = {
    "Qwen/Qwen3-0.6B": _model(_QWEN_3 | _TIED, 1024, 28, 16, 8, 3072),
    "Qwen/Qwen3-4B": _model(_QWEN_3 | _TIED, 2560, 36, 32, 8, 9728),
    "Qwen/Qwen3-8B": _model(_QWEN_3, 4096, 36, 32, 8, 12288),
    "Qwen/Qwen3-14B": _model(_QWEN_3, 5120, 40, 40, 8, 17408),
}


def _variants(models: dict[str, Any], suffix: str, **changes: Any) -> dict[str, Any]:
    return models | {name + suffix: config | changes for name, config in models.items()}


_LLAMA_31_INSTRUCT = {"eos_token_id": [128001, 128008, 128009]}
_QWEN_25_INSTRUCT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": 151645}
PRESETS: dict[str, dict[str, Any]] = {
    **_TINY_MODELS,
    **_variants(_LLAMA_31_AND_32_MODELS, "-Instruct", **_LLAMA_31_INSTRUCT),
    "meta-llama/Llama-3.3-70B-Instruct": _70B | _LLAMA_31_INSTRUCT,
    **_variants(_LLAMA_3_MODELS, "-Instruct", eos_token_id=128009),
    **_variants(_QWEN_25_MODELS, "-Instruct", **_QWEN_25_INSTRUCT),
    **_variants(_QWEN_3_MODELS, "-Base", max_position_embeddings=32768, eos_token_id=151643),
    "Qwen/Qwen3-32B": _model(_QWEN_3, 5120, 64, 64, 8, 25600),  # it has no -Base
    "mistralai/Mistral-7B-v0.3": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
}

LOCAL_PRESETS = frozenset(_TINY_MODELS)  # not on the hub: random weights and the demo tokenizer


def closest_preset(name: str) -> str | None:
    """Return the preset whose name without the organization is close to `name`, or None."""
    shorter = {preset.rpartition("/")[2].lower(): preset for preset in PRESETS}
    close = difflib.get_close_matches(name.lower(), shorter, n=1, cutoff=0.75)
    return shorter[close[0]] if close and "/" not in name else None


def require_model(name: str, init: str) -> None:
    """Raise UserError if --model_name is a path that does not exist, or a misspelled preset."""
    if name in LOCAL_PRESETS and init == "pretrained":
        reason = "this preset has no weights; give another model, or use --init random"
        raise bad_setting(reason, model_name=name)
    if name in LOCAL_PRESETS or (init == "random" and name in PRESETS):
        return
    require_folder("model_name", name)
    if (preset := closest_preset(name)) and not Path(name).exists():
        raise bad_setting(f"there is no such preset or folder; did you mean {preset!r}?", model_name=name)

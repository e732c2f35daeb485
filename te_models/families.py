"""Families with a TE form: what each asks of te.TransformerLayer, and which configurations it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Those that neither rescale attention nor depend on a sequence's length.
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Family:
    """What a decoder layer has beside Llama's parts, and which settings rule a TE form out."""

    qkv_bias: bool = False  # on the projections to q, k and v, always
    qk_norm: bool = False  # an RMSNorm over each head's q and k, before RoPE
    bias_flags: tuple[str, ...] = ()  # settings that add biases for which the TE form has no place
    slides: Callable[[Any], bool] = lambda config: False  # whether `sliding_window` is in use in any layer

    def unsupported(self, config: Any) -> str | None:
        """Why this configuration has no TE form here, or None."""
        for name in self.bias_flags:
            if getattr(config, name, False):
                return f"{name}=True: its biases have no place in the TE layers"
        if config.hidden_act != "silu":
            return f"hidden_act={config.hidden_act!r}: TE layers are built with SwiGLU"
        if dropout := getattr(config, "attention_dropout", 0.0):
            return f"attention_dropout={dropout}: TE layers are built without dropout"
        rope = config.rope_parameters["rope_type"]
        if rope not in ROPE_TYPES:
            return f"RoPE type {rope!r}: only {', '.join(ROPE_TYPES)} are angles that no length changes"
        window = getattr(config, "sliding_window", None) if self.slides(config) else None
        positions = config.max_position_embeddings
        if window is not None and window < positions:
            return (
                f"sliding_window={window} is less than max_position_embeddings={positions}: TE layers are "
                "built to see all of a sequence"
            )
        return None


def _some_layer_slides(config: Any) -> bool:
    return "sliding_attention" in config.layer_types


# By Hugging Face's model_type.
FAMILIES: dict[str, Family] = {
    "llama": Family(bias_flags=("attention_bias", "mlp_bias")),  # 2, 3, 3.1, 3.2, 3.3
    "qwen2": Family(qkv_bias=True, slides=_some_layer_slides),  # 2, 2.5
    "qwen3": Family(qk_norm=True, bias_flags=("attention_bias",), slides=_some_layer_slides),
    "mistral": Family(slides=lambda config: True),  # 7B: a window in v0.1, none in v0.2 and v0.3
}

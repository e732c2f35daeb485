"""Model families with TE layers: differences from Llama, and configurations that TE layers cannot run.

docs/development.md lists what a new family needs. `decoder` and `weights` read its entry. A new field of
`Family` needs code there and in `emulation.transformer`, which refuses arguments that it lacks. If the field
changes the number of parameters or activations, `benchmarks.plan.inputs` and
`training.estimate.activations` need it too. FLOPs are counted as for Llama (`te_models.shape.COUNTED`). No
other code tests for a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3")  # types with fixed angles that do not rescale attention


@dataclass(frozen=True)
class Family:
    """Differences of a family from Llama, and config values that TE layers cannot represent."""

    qkv_bias: bool = False  # the q, k and v projections have biases
    qk_norm: bool = False  # RMSNorm over each head's q and k, before RoPE
    bias_flags: tuple[str, ...] = ()  # config fields that add biases which TE layers lack

    def unsupported(self, config: Any) -> str | None:
        """Return why TE layers cannot represent this configuration, or None."""
        for name in self.bias_flags:
            if getattr(config, name, False):
                return f"{name}=True: the TE layers have no place for its biases"
        if config.hidden_act != "silu":
            return f"hidden_act={config.hidden_act!r}: TE layers are built with SwiGLU"
        if dropout := getattr(config, "attention_dropout", 0.0):
            return f"attention_dropout={dropout}: TE layers are built without dropout"
        rope = config.rope_parameters["rope_type"]
        if rope not in ROPE_TYPES:
            return f"RoPE type {rope!r}: TE layers are built for {', '.join(ROPE_TYPES)}"
        return None


# Keys are Hugging Face's model_type.
FAMILIES: dict[str, Family] = {
    "llama": Family(bias_flags=("attention_bias", "mlp_bias")),  # 2, 3, 3.1, 3.2, 3.3
    "qwen2": Family(qkv_bias=True),  # 2, 2.5
    "qwen3": Family(qk_norm=True, bias_flags=("attention_bias",)),
    "mistral": Family(),  # 7B v0.1 has a sliding window, v0.2 and v0.3 have none
}


def head_dim(config: Any) -> int:
    """Return the head size, which some configurations leave to hidden_size / num_attention_heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

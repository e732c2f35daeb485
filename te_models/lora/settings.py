"""Settings of LoRA, and which linear layers they adapt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.settings import Effect, Section, matches, setting

ALL = "all"
PROJECTIONS = {  # Hugging Face's names of a decoder layer's linear layers, in the order of its modules
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
GEMMS = {  # result of a GEMM of a TE layer: the linear layers that it computes, in order
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def projection_names(layers: int) -> list[str]:
    """Return Hugging Face's names of the linear layers in a decoder of this many layers."""
    return [
        f"model.layers.{i}.{parent}.{name}" for i in range(layers) for name, parent in PROJECTIONS.items()
    ]


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """LoRA"""

    affects: ClassVar[Effect] = "step"

    lora_rank: int = setting(
        0, "train adapters of this rank, and freeze the model's weights; 0: train the weights", minimum=0
    )
    # With a fixed ratio, another rank needs no other learning rate.
    lora_alpha: float | None = setting(
        None,
        "adapters are multiplied by alpha / rank; default: 2 x rank",
        above=0,
        affects="learning",
    )
    lora_dropout: float = setting(0.0, "dropout of the adapters' inputs", minimum=0, below=1)
    lora_targets: str = setting(
        ALL, "adapted linear layers of the decoder: all, or names or patterns such as q_proj,layers.0.mlp"
    )

    @property
    def enabled(self) -> bool:
        """True if adapters train and the model's weights are frozen."""
        return self.lora_rank > 0

    @property
    def alpha(self) -> float:
        """Value of --lora_alpha, or its default."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def scaling(self) -> float:
        """Factor of the adapters' products."""
        return self.alpha / self.lora_rank

    def targets(self, names: list[str]) -> list[str]:
        """Return the linear layers to adapt among `names`. UserError for a pattern that matches none."""
        if self.lora_targets == ALL:
            return names
        patterns = [pattern.strip() for pattern in self.lora_targets.split(",")]
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                existing = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
                reason = f"{pattern!r} matches no linear layer of the decoder; they are {existing}"
                raise bad_setting(reason, lora_targets=self.lora_targets)
        return [name for name in names if any(matches(pattern, name) for pattern in patterns)]

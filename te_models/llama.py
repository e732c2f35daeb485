"""Llama (2, 3, 3.1, 3.2, 3.3): what its Hugging Face configuration asks of te.TransformerLayer."""

from __future__ import annotations

from typing import Any


def unsupported(config: Any) -> str | None:
    """Why this configuration has no TE form here, or None."""
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            return f"{name}=True: its biases have no place in the TE layers yet"
    if config.hidden_act != "silu":
        return f"hidden_act={config.hidden_act!r}: TE layers are built with SwiGLU"
    return None

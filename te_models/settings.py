"""Settings of the model: which one, and which layers run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.settings import Section, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """model"""

    model_name: str = setting(
        "tiny-llama",
        "hub id, local folder, or preset (see te_models/presets.py); RUN/export is a run's trained model, to "
        "evaluate or to go on from",
    )
    init: Literal["auto", "pretrained", "random"] = setting(
        "auto",
        "weights: read them, or draw them from the model's dimensions; auto draws for tiny-* presets only",
        affects="learning",
    )
    tokenizer_name: str | None = setting(
        None,
        "hub id, local folder, or `demo`; default: the model's own (tiny-* presets: demo)",
        affects="learning",
    )
    use_te: bool = setting(False, "build the decoder from te.TransformerLayer (Transformer Engine)")
    te_backend: Literal["auto", "native", "emulated"] = setting(
        "auto",
        "TE layers of --use_te: native runs them (needs CUDA), emulated computes the same numerics in plain "
        "PyTorch, slowly, anywhere; auto is native, or emulated on a machine without a GPU",
    )
    gradient_checkpointing: bool = setting(
        False, "recompute each layer's activations in backward to save memory", resumable=True
    )
    compile: bool | None = setting(
        None,
        "torch.compile each decoder layer of a Hugging Face model; default: on a GPU, not under DeepSpeed",
        resumable=True,
    )
    flash_attention: bool = setting(
        True,
        "attention by FlashAttention 4 where it is installed, on Hopper; else cuDNN's and torch's",
        resumable=True,
    )
    fused_residuals: bool = setting(
        True, "TE's norms add up gradients of residual connections in their own kernel", resumable=True
    )
    weights_cache_dir: str | None = setting(
        None,
        "folder for downloaded weights; default: the Hugging Face cache",
        resumable=True,
        affects="nothing",
    )
    trust_remote_code: bool = setting(
        False, "run Python code that a model's repository brings", affects="nothing"
    )

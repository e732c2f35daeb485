"""Settings of the model and its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.settings import Section, resumable, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """model"""

    model_name: str = setting(
        "tiny-llama", "hub id, local folder (such as RUN/export), or preset of te_models/presets.py"
    )
    init: Literal["auto", "pretrained", "random"] = setting(
        "auto",
        "load pretrained weights or start from random ones; auto: random only for tiny-* presets",
        affects="learning",
    )
    tokenizer_name: str | None = setting(
        None, "hub id, folder, or demo; default: the model's own (tiny-* presets: demo)", affects="learning"
    )
    use_te: bool = setting(False, "build the decoder from Transformer Engine layers (te.TransformerLayer)")
    te_backend: Literal["auto", "native", "emulated"] = setting(
        "auto", "TE's CUDA kernels, or the same numerics in plain PyTorch; auto: native on a GPU"
    )
    gradient_checkpointing: bool = resumable(False, "activation checkpointing: recompute layers in backward")
    compile: bool | None = resumable(
        None, "torch.compile each Hugging Face layer; default: on a GPU without DeepSpeed"
    )
    flash_attention: bool = resumable(
        True, "use FlashAttention 4 if installed (Hopper), else cuDNN (TE) or torch's kernel"
    )
    fused_residuals: bool = resumable(True, "fuse the residual-gradient add into TE's norm backward kernel")
    weights_cache_dir: str | None = resumable(
        None, "folder for downloaded weights; default: the Hugging Face cache", affects="nothing"
    )
    trust_remote_code: bool = setting(False, "run Python code from the model's repository", affects="nothing")

"""Settings of the model and its layers, and sizes that the memory model shares with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.settings import AUTO, Section, nearest, resumable, setting

# Logits that exist at a time, enough to fill the GPU in the three GEMMs: 4,186 rows of Llama 3's 128,256.
CHUNK_BYTES = 2**30
# Tokens per wgrad GEMM of the FP8 LM head. The FP8 gradients of their logits are kept: 1 GB for Llama 3.
TOKENS_PER_GEMM = 8192
IN_FLIGHT = 2  # layers whose copies to the host may be unfinished
# Results of kernels that a recomputed TE layer keeps beside its input, by level: see `recompute.layers`.
KEPT: dict[str, tuple[str, ...]] = {
    "cheap": ("qkv", "attention", "output", "gate_up"),
    "mlp": ("qkv", "attention", "output"),
    "layer": ("attention",),
    "full": (),
}
RECOMPUTE_LEVELS = ("none", *KEPT)  # from none to all of a layer; see `te_models.recompute.layers`


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """model"""

    model_name: str = setting(
        "tiny-llama", "hub id, local folder (such as RUN/export), or preset of te_models/presets.py"
    )
    init: Literal["auto", "pretrained", "random"] = setting(
        "auto",
        "load pretrained weights, or initialize at random; auto: random only for tiny-* presets",
        affects="learning",
    )
    tokenizer_name: str | None = setting(
        None, "hub id, folder, or demo; default: the model's own (tiny-* presets: demo)", affects="learning"
    )
    use_te: bool = setting(False, "build the decoder from Transformer Engine layers (te.TransformerLayer)")
    te_backend: Literal["auto", "native", "emulated"] = setting(
        "auto", "TE's CUDA kernels, or the same numerics in plain PyTorch; auto: native on a GPU"
    )
    gradient_checkpointing: bool = resumable(
        False, "activation checkpointing: --recompute layer, unless that is given"
    )
    recompute: str = resumable(
        "none",
        "recompute in backward: cheap, mlp, layer, full, or LEVEL:N (first N layers); auto: least that fits",
    )
    offload_activations: bool = resumable(
        False, "keep the saved activations of recomputed TE layers in host memory"
    )
    compile: bool | None = resumable(
        None, "compile each Hugging Face layer with torch.compile; default: on a GPU, without DeepSpeed"
    )
    flash_attention: bool = resumable(
        True, "use FlashAttention 4 on Hopper if installed, else cuDNN (TE) or torch's kernel"
    )
    trust_remote_code: bool = setting(False, "run Python code from the model's repository", affects="nothing")

    @property
    def recomputation(self) -> str:
        """Value of --recompute, or that of --gradient_checkpointing."""
        return "layer" if self.gradient_checkpointing and self.recompute == "none" else self.recompute


def parse_recompute(text: str) -> list[tuple[str, int | None]]:
    """Return (level, number of layers or None for all others) pairs. UserError if `text` is none."""
    parts = []
    for part in text.split("+"):
        level, colon, number = part.strip().partition(":")
        if level not in RECOMPUTE_LEVELS or (colon and not number.isdecimal()):
            levels = ", ".join(RECOMPUTE_LEVELS)
            reason = (
                f"{part!r} is not one of {levels}, or LEVEL:N such as mlp:8{nearest(level, RECOMPUTE_LEVELS)}"
            )
            raise bad_setting(reason, recompute=text)
        parts.append((level, int(number) if colon else None))
    if any(number is None for _, number in parts[:-1]):
        reason = "only the last level may be without a number of layers; give LEVEL:N for the others"
        raise bad_setting(reason, recompute=text)
    return parts


def named_levels(text: str) -> set[str]:
    """Return the levels of recomputation in `text`, none for auto. UserError if it cannot be parsed."""
    return set() if text == AUTO else {level for level, _ in parse_recompute(text)}


def recompute_levels(text: str, layers: int) -> list[str]:
    """Return the level of each decoder layer: the first layers by `text`, the others `none`.

    UserError if `text` is for more layers than the model has.
    """
    levels: list[str] = []
    for level, number in parse_recompute(text):
        levels += [level] * (layers - len(levels) if number is None else number)
    if len(levels) > layers:
        raise bad_setting(f"for {len(levels)} layers, but the model has {layers}; give fewer", recompute=text)
    return levels + ["none"] * (layers - len(levels))

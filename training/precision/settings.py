"""Settings of precision and FP8 recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.recipes import RECIPES
from core.settings import Section, setting


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """precision"""

    mixed_precision: Literal["bf16", "fp8", "fp32"] = setting("bf16", "compute precision")
    fp8_scenario: Literal[("default", *RECIPES)] = setting(
        "default",
        "scaling recipe under --mixed_precision fp8; with --use_te delayed (its default) to nvfp4, without "
        "it torchao's tensorwise (its default) to rowwise_with_gw_hp",
    )
    bf16_first_layers: int = setting(0, "keep this many decoder layers at the start in BF16", minimum=0)
    bf16_last_layers: int = setting(0, "keep this many decoder layers at the end in BF16", minimum=0)
    precision_map: str | None = setting(
        None,
        "precision by module, PATTERN=RECIPE,...: part of a name in the coverage table, with "
        "* for any part, and a recipe or bf16 (layers.*.self_attention=bf16,layers.*.layernorm_mlp=current)",
    )
    fp8_fallback: Literal["warn", "error"] = setting(
        "warn", "when this GPU or TE cannot run mxfp8 or nvfp4: use the default recipe and warn, or stop"
    )
    fp8_format: Literal["hybrid", "e4m3"] = setting(
        "hybrid", "hybrid: E4M3 forward, E5M2 backward; e4m3: both E4M3"
    )
    fp8_margin: int = setting(0, "delayed scaling: keep this many powers of two of head room", minimum=0)
    fp8_amax_history_len: int = setting(1024, "delayed scaling: micro-batches of amax history", minimum=1)
    fp8_amax_compute_algo: Literal["max", "most_recent"] = setting(
        "max", "delayed scaling: amax taken from the history"
    )
    fp8_fast_accumulation: bool = setting(
        False,
        "backward's FP8 GEMMs add up with fewer bits, as forward's always do: faster on Hopper (delayed and "
        "current scaling)",
    )
    fp8_fp32_scales: bool = setting(
        False, "block and rowwise scaling: any FP32 number is a scale, not powers of two alone (Hopper)"
    )
    fp8_lm_head: bool = setting(
        False, "the LM head's GEMMs in FP8 too, under any FP8 recipe of the layers (docs/precision.md)"
    )
    fp8_attention: bool = setting(False, "attention in FP8 too (TE fp8_dpa; delayed and current scaling)")
    master_weights: Literal["fp32", "none"] = setting(
        "fp32", "FP32 master weights; none keeps BF16 alone and loses small updates (docs/precision.md)"
    )
    moment_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "dtype of Adam's two moments; bf16 saves 4 bytes a parameter"
    )
    fp8_weight_cache: bool = setting(
        True,
        "cast TE's weights once a step, not once a micro-batch (one GPU, ddp, fsdp_grad; no recomputation)",
        resumable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        spec = RECIPES.get(self.fp8_scenario)
        if self.fp8_attention and spec and "fp8_attention" not in spec.settings:
            raise ValueError(
                f"--fp8_attention: TE's FP8 attention runs under delayed and current scaling, not "
                f"--fp8_scenario {self.fp8_scenario}; drop one of the two"
            )

"""Low-precision recipes: one row each, read by settings, training, statistics, comparisons and the planner.

FP8 training keeps weights and optimizer state in higher precision and casts the operands of each GEMM to 8
bits. A recipe defines how the cast is scaled:

- delayed    one scale per tensor, from the largest magnitudes (amax) of the last micro-batches. Cheapest,
             since the scale is known before the tensor is. Its amax history is training state.
- current    one scale per tensor, from the tensor itself; one more read of each tensor.
- block      one scale per 1x128 activations and per 128x128 weights; outliers stay local. Hopper and later.
- mxfp8      one power-of-two scale per 32 values, in hardware. Blackwell.
- nvfp4      4-bit values with two levels of scales. Blackwell.
- tensorwise, rowwise, rowwise_with_gw_hp: torchao's, for Hugging Face layers; see
  `training.precision.torchao_fp8`.

HYBRID format: E4M3 (more precision) forward, E5M2 (more range) for gradients.
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html

docs/development.md lists what a new recipe needs. Importing this module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Figures from which `benchmarks.plan` computes the time and memory of a step.

    Measured on one H200 with Llama 3.1 8B (1B packed for block), unless `measured` is False.
    """

    gemm_share: float  # GEMM rate as a share of the precision's dense peak
    cast_bytes: float  # memory traffic of casting one value
    # Activation bytes saved against BF16, per token and unit of the feed-forward and the hidden size.
    ffn_bytes_saved: float = 0
    hidden_bytes_saved: float = 0
    weight_copies: float = 0  # bytes per GEMM weight, in addition to the BF16 weight
    # Tensor parallelism gathers a GEMM's input row-wise, and backward transposes it for wgrad (TE 2.20:
    # `supports_only_rowwise_all_gather`).
    gathers_rows: bool = False
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class RecipeSpec:
    """Properties of one recipe."""

    # Recipe-specific settings that this recipe reads (`RECIPE_SETTINGS` has those of all recipes).
    settings: frozenset[str] = frozenset()
    # GEMM kernels need tokens of a micro-batch, and rows and columns of every weight, in these multiples.
    token_multiple: int = 16
    feature_multiple: int = 16
    # GPU architectures that run it, for the planner (a run asks `probe`). None: all with FP8 tensor cores.
    architectures: tuple[str, ...] | None = None
    # On a machine that cannot run it, FALLBACK_RECIPE may run instead, with a warning (--fp8_fallback).
    may_fall_back: bool = False
    # It keeps scales and amax histories across steps, which need calibration and checkpointing.
    stateful: bool = False
    # Its scale of a weight is the same for all shards, so that FSDP2 can gather weights in FP8.
    fp8_all_gather: bool = False
    # TE can hold a weight as one FP8 tensor with one scale (--fp8_weights).
    fp8_weights: bool = False
    # TE can hold a frozen weight in FP8 without its transpose (--fp8_weights with --lora_rank).
    frozen_fp8_weights: bool = False
    # Gradients of weights (wgrad) are computed in BF16, one of three GEMMs.
    bf16_wgrad: bool = False
    costs: StepCosts
    # TE recipes: the class in TE's recipe module, how to make it from (PrecisionConfig, module), and the
    # te.is_*_available function. Recipes without a class are torchao's.
    te_class: str = ""
    make: Callable[[Any, Any], Any] | None = None
    probe: str = ""


def _delayed(cfg: Any, te: Any) -> Any:
    return te.DelayedScaling(
        fp8_format=te.Format[cfg.fp8_format.upper()],
        amax_history_len=cfg.fp8_amax_history_len,
    )


def _block(cfg: Any, te: Any) -> Any:
    if not cfg.fp8_fp32_scales:
        return te.Float8BlockScaling()
    recipe = te.Float8BlockScaling(use_f32_scales=True)
    for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        # `use_f32_scales=True` alone is not enough: TE fixes these class attributes when it is imported.
        if hasattr(recipe, operand):
            setattr(recipe, operand, te.QParams(power_2_scale=False, amax_epsilon=0.0))
    return recipe


_PER_TENSOR = frozenset({"fp8_format", "fp8_fast_accumulation"})
_FP32_SCALES = frozenset({"fp8_fp32_scales"})

# Costs. GEMM shares: from TE's FP8 GEMMs (252 ms for 343 TFLOP; block in 161 ms where delayed took 143), and
# from torchao's 8B steps (626 ms tensorwise, 718 rowwise, 657 rowwise_with_gw_hp) minus the time outside of
# GEMMs. Casts: 2 bytes read and 1 written for each of two layouts (TE reads once for both), 2 more if a cast
# needs the amax first; rowwise scales each layout by itself, and rowwise_with_gw_hp casts one layout.
#
# Memory, TE on Hopper: per-tensor recipes keep a weight as it is and transposed (1 + 1 byte), block scaling
# also an FP32 scale per 128x128, MXFP8 a scale byte per 32 values, NVFP4 half a byte per value and a scale
# byte per 16. The MLP's product takes 1 byte less. torchao casts weights anew; torch.compile recomputes norms
# (2 x 2 bytes) and the MLP's product (2), unless GEMMs of gradients read them.
#
# Order matters: the first TE row and the first torchao row are the defaults of --fp8_scenario, and the first
# TE row is the fallback.
RECIPES: dict[str, RecipeSpec] = {
    "delayed": RecipeSpec(
        settings=_PER_TENSOR | {"fp8_amax_history_len"},
        stateful=True,
        fp8_weights=True,
        frozen_fp8_weights=True,
        te_class="DelayedScaling",
        make=_delayed,
        probe="is_fp8_available",
        costs=StepCosts(gemm_share=0.69, cast_bytes=4, ffn_bytes_saved=1, weight_copies=2, gathers_rows=True),
    ),
    "current": RecipeSpec(
        settings=_PER_TENSOR,
        fp8_all_gather=True,
        fp8_weights=True,
        frozen_fp8_weights=True,
        te_class="Float8CurrentScaling",
        make=lambda cfg, te: te.Float8CurrentScaling(fp8_format=te.Format[cfg.fp8_format.upper()]),
        probe="is_fp8_available",
        costs=StepCosts(gemm_share=0.69, cast_bytes=6, ffn_bytes_saved=1, weight_copies=2, gathers_rows=True),
    ),
    "block": RecipeSpec(
        settings=_FP32_SCALES,
        token_multiple=128,
        feature_multiple=128,
        frozen_fp8_weights=True,
        architectures=("Hopper", "Blackwell", "RTX Blackwell"),
        te_class="Float8BlockScaling",
        make=_block,
        probe="is_fp8_block_scaling_available",
        costs=StepCosts(gemm_share=0.50, cast_bytes=6, weight_copies=2 * (1 + 4 / 128**2)),
    ),
    "mxfp8": RecipeSpec(
        token_multiple=32,
        feature_multiple=32,
        architectures=("Blackwell",),
        may_fall_back=True,
        te_class="MXFP8BlockScaling",
        make=lambda cfg, te: te.MXFP8BlockScaling(),
        probe="is_mxfp8_available",
        costs=StepCosts(  # GEMM share as for delayed
            gemm_share=0.69,
            cast_bytes=4,
            ffn_bytes_saved=1 - 1 / 32,
            weight_copies=2 * (1 + 1 / 32),
            measured=False,
        ),
    ),
    "nvfp4": RecipeSpec(
        token_multiple=128,
        feature_multiple=32,
        architectures=("Blackwell", "RTX Blackwell"),
        may_fall_back=True,
        te_class="NVFP4BlockScaling",
        make=lambda cfg, te: te.NVFP4BlockScaling(),
        probe="is_nvfp4_available",
        costs=StepCosts(  # GEMM share as for delayed, at the FP8 peak
            gemm_share=0.69,
            cast_bytes=6,
            ffn_bytes_saved=2 - 9 / 16,
            weight_copies=2 * 9 / 16,
            measured=False,
        ),
    ),
    "tensorwise": RecipeSpec(
        fp8_all_gather=True,
        costs=StepCosts(gemm_share=0.58, cast_bytes=8, ffn_bytes_saved=2, hidden_bytes_saved=4),
    ),
    "rowwise": RecipeSpec(
        settings=_FP32_SCALES,
        costs=StepCosts(gemm_share=0.47, cast_bytes=10, ffn_bytes_saved=2, hidden_bytes_saved=4),
    ),
    "rowwise_with_gw_hp": RecipeSpec(
        settings=_FP32_SCALES,
        bf16_wgrad=True,
        costs=StepCosts(gemm_share=0.58, cast_bytes=5),
    ),
}
# Recipes with --use_te, and without it.
TE_RECIPES = tuple(name for name, spec in RECIPES.items() if spec.te_class)
TORCHAO_RECIPES = tuple(name for name, spec in RECIPES.items() if not spec.te_class)
FALLBACK_RECIPE = TE_RECIPES[0]
LM_HEAD_RECIPE = "current"  # recipe of --fp8_lm_head, whatever recipe the layers use
BF16_COSTS = StepCosts(gemm_share=0.71, cast_bytes=0)  # from the 8B step of 783 ms, as above


def costs_of(recipe: str) -> StepCosts:
    """Return the costs of a recipe, or of BF16."""
    return RECIPES[recipe].costs if recipe in RECIPES else BF16_COSTS

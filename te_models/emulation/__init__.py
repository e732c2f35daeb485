"""Transformer Engine's decoder layer in plain PyTorch: TE's numerics anywhere (`--te_backend emulated`).

Exports what the suite uses of `transformer_engine.pytorch` and `transformer_engine.common.recipe`, with the
same arguments. Parameters have TE's names and layouts, and delayed scaling's state TE's places and shapes, so
checkpoints move between the two backends.

The emulation follows TE 2.20 on Hopper (MXFP8: Blackwell) in which tensors are quantized, from which
precision, with which scale, and in when scales are updated. Sums in GEMMs and attention differ in their last
bits.
"""

# ruff: noqa: F401
from te_models.emulation.layers import LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from te_models.emulation.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from te_models.emulation.scaling import autocast, checkpoint
from te_models.emulation.transformer import TransformerLayer

"""Transformer Engine's decoder layer in plain PyTorch, with TE's numerics (`--te_backend emulated`).

This package replaces `transformer_engine.pytorch`, and `recipes` replaces `transformer_engine.common.recipe`,
with the names and arguments that this project uses. Parameters have TE's names and layouts, and the state
of delayed scaling has TE's names and shapes, so both backends can load each other's checkpoints.

The emulation quantizes the same tensors as TE 2.20 on Hopper (MXFP8: Blackwell), from the same precision and
with the same scales, and updates scales at the same time. Sums in GEMMs and attention differ in the last
bits.
"""

from fp8_suite.te_models.emulation.layers import LayerNormLinear as LayerNormLinear
from fp8_suite.te_models.emulation.layers import LayerNormMLP as LayerNormMLP
from fp8_suite.te_models.emulation.layers import Linear as Linear
from fp8_suite.te_models.emulation.layers import RMSNorm as RMSNorm
from fp8_suite.te_models.emulation.scaling import autocast as autocast
from fp8_suite.te_models.emulation.scaling import checkpoint as checkpoint
from fp8_suite.te_models.emulation.transformer import TransformerLayer as TransformerLayer

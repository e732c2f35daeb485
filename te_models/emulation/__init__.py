"""Transformer Engine's decoder layer in plain PyTorch: TE's numerics anywhere (`--te_backend emulated`).

The package replaces `transformer_engine.pytorch`, and `recipes` `transformer_engine.common.recipe`, with the
names and arguments that the suite uses. Parameters have TE's names and layouts, and delayed scaling's state
has TE's places and shapes, so checkpoints move between the two backends.

The emulation follows TE 2.20 on Hopper (MXFP8: Blackwell) in which tensors are quantized, from which
precision, with which scale, and when scales are updated. Sums in GEMMs and attention differ in their last
bits.
"""

from te_models.emulation.layers import LayerNormLinear as LayerNormLinear
from te_models.emulation.layers import LayerNormMLP as LayerNormMLP
from te_models.emulation.layers import Linear as Linear
from te_models.emulation.layers import RMSNorm as RMSNorm
from te_models.emulation.scaling import autocast as autocast
from te_models.emulation.scaling import checkpoint as checkpoint
from te_models.emulation.transformer import TransformerLayer as TransformerLayer

"""Setups of models of several sizes, for the tests beside this file."""

from dataclasses import replace

import torch
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup, with_adapters
from fp8_suite.training.optim.optimizer import OptimizerSpec

# 14 bytes a parameter: BF16 weights and gradients, FP32 masters' 2 more bytes, two FP32 moments.
FUSED = OptimizerSpec("fused_adamw", torch.bfloat16, True, ("fp32", "fp32"))
FP8_MOMENTS = replace(FUSED, moment_dtypes=("fp8", "fp8"))
OFFLOADED = replace(FUSED, offload=True)
ZERO = replace(FUSED, kind="zero_adamw")
SHAPES = {
    1.2: ModelShape(2048, 16, 32, 8, 64, 8192, 128_256),
    8.0: ModelShape(4096, 32, 32, 8, 128, 14_336, 128_256),
    70.0: ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256),
}


def setup_of(
    billions=8.0, mode="single", gpus=1, *, gpus_per_node=8, optimizer=FUSED, shape=True, **settings
) -> TrainingSetup:
    """Return a setup of TE layers; without `shape` only the training state can be predicted."""
    cfg = config_from_dict({"model_name": "m", "use_te": True, "max_seq_length": 8192} | settings)
    model = ModelSize(int(billions * 1e9), SHAPES[billions] if shape else None)
    return TrainingSetup(cfg, with_adapters(model, cfg.lora), optimizer, mode, gpus, min(gpus, gpus_per_node))

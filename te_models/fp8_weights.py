"""GEMM weights of TE layers that the GPU holds in FP8 only; the optimizer has them in higher precision."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn


@torch.no_grad()
def store_in_fp8(model: nn.Module) -> dict[str, Tensor]:
    """Replace the GEMM weights of native TE layers by FP8 tensors; return the original weights by name.

    Every weight has the scale of its own largest value, also under delayed scaling, so that its FP8 values
    depend on nothing else. Only the layout of forward is stored: TE transposes a weight in backward and frees
    the result after the GEMM, as it does under FSDP2.
    """
    te = importlib.import_module("transformer_engine.pytorch")
    originals = {}
    for prefix, module in model.named_modules():
        names = [
            name
            for name, init in getattr(module, "param_init_meta", {}).items()
            if init.fp8_meta_index is not None
        ]
        for name in names:
            weight = module.get_parameter(name).detach()
            originals[f"{prefix}.{name}"] = weight
            quantizer = te.Float8CurrentScalingQuantizer(
                te.DType.kFloat8E4M3, weight.device, columnwise=False
            )
            setattr(module, name, nn.Parameter(quantizer(weight)))
        if names:
            module._is_fsdp2 = True  # TE's cached answer to "is this module sharded?"
    return originals

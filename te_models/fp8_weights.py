"""GEMM weights of TE layers that the GPU holds in FP8 only; the optimizer has them in higher precision."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn


@torch.no_grad()
def store_in_fp8(model: nn.Module) -> dict[str, Tensor]:
    """Replace the GEMM weights of native TE layers by FP8 tensors; return the original weights by name.

    Every weight has the scale of its own largest value, also under delayed scaling, so that its FP8 values
    depend on nothing else. Only the layout of forward is stored: TE transposes weights in backward, and each
    layer frees the results after its own.
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
    for layer in model.layers:
        layer.register_forward_pre_hook(_free_transposes_after_backward)
    return originals


def _free_transposes_after_backward(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    def free(_: Tensor) -> None:
        for parameter in layer.parameters():
            if hasattr(parameter, "remove_caches"):
                parameter.remove_caches()

    if inputs[0].requires_grad:
        inputs[0].register_hook(free)

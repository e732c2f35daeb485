"""GEMM weights of native TE layers in FP8: whole, or in FSDP2's shards.

The optimizer holds them in higher precision.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch
from torch import Tensor, nn


@torch.no_grad()
def quantize_weights(model: nn.Module) -> dict[str, Tensor]:
    """Quantize the loaded GEMM weights to FP8, each with the scale of its largest value.

    Return the original weights by name. Every quantized parameter becomes a new object. Its values do not
    depend on amax histories, also under delayed scaling. Only the layout of forward is stored: TE transposes
    weights in backward, and each layer frees its transposes when its backward is done.
    """
    te = importlib.import_module("transformer_engine.pytorch")
    originals = {}
    for prefix, module in model.named_modules():
        for name, init in list(getattr(module, "param_init_meta", {}).items()):
            if init.fp8_meta_index is None:
                continue
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


@torch.no_grad()
def quantize_shards(model: nn.Module) -> dict[str, Tensor]:
    """Quantize the loaded, sharded GEMM weights to FP8 by the recipe with which the model was built.

    Return this rank's high-precision shards by name, for the optimizer. Every quantized parameter becomes a
    new object. Collective, because the shards of a weight share a scale.
    """
    original = {}
    for prefix, module in model.named_modules():
        if not getattr(module, "primary_weights_in_fp8", False):
            continue
        for name, init in module.param_init_meta.items():
            if init.fp8_meta_index is not None:
                original[f"{prefix}.{name}"] = module.get_parameter(name).to_local().clone()
            # TE quantizes in reset_parameters(), after an initialization that must keep the values.
            keep_values = replace(init, init_fn=lambda tensor: None, get_rng_state_tracker=None)
            module.param_init_meta[name] = keep_values
        module.reset_parameters()
    return original

"""GEMM weights of native TE layers in FP8: whole, in FSDP2's shards, or frozen.

The optimizer holds those that train in higher precision.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def quantize_weights(model: nn.Module) -> dict[str, Tensor]:
    """Quantize the loaded GEMM weights to FP8, each with the scale of its largest value.

    Return the original weights by name. Every quantized parameter becomes a new object. Its values do not
    depend on amax histories, also under delayed scaling. Only the layout of forward is stored: TE transposes
    weights in backward, and each layer frees its transposes when its backward is done.
    """
    originals = {}
    for prefix, module, name in list(_gemm_weights(model)):
        weight = module.get_parameter(name).detach()
        originals[f"{prefix}.{name}"] = weight
        setattr(module, name, nn.Parameter(_quantizer(None, weight.device)(weight)))
    for layer in model.layers:
        layer.register_forward_pre_hook(_free_transposes_after_backward)
    return originals


@contextmanager
def frozen_in_fp8(layer: nn.Module, recipe: Any, device: torch.device) -> Iterator[None]:
    """Allocate a layer on the meta device; at exit, quantize the GEMM weights that were filled inside.

    They are filled in FP32, so that values of an FP8 checkpoint are not rounded in between. The recipe's
    class decides if there is a scale per weight or, for block scaling, per block. Forward's layout is stored.
    """
    weights = [(module, name, module.get_parameter(name)) for _, module, name in _gemm_weights(layer)]
    layer.to_empty(device=device)
    for module, name, weight in weights:
        filled = torch.empty(weight.shape, dtype=torch.float32, device=device)
        setattr(module, name, nn.Parameter(filled, requires_grad=False))
    yield
    for module, name, weight in weights:
        quantized = _quantizer(recipe, device).make_empty(weight.shape, dtype=weight.dtype, device=device)
        quantized.quantize_(module.get_parameter(name).detach())
        setattr(module, name, nn.Parameter(quantized, requires_grad=False))
    layer.register_forward_pre_hook(_free_transposes_after_backward)


def _gemm_weights(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name of a module, the module, name of a GEMM weight of it)."""
    for prefix, module in root.named_modules():
        for name, init in getattr(module, "param_init_meta", {}).items():
            if init.fp8_meta_index is not None:
                yield prefix, module, name


def _quantizer(recipe: Any, device: torch.device) -> Any:
    """Return a quantizer of weights, with one scale of the tensor unless the recipe scales blocks."""
    te = importlib.import_module("transformer_engine.pytorch")
    if recipe is not None and recipe.float8_block_scaling():
        settings = recipe.fp8_quant_fwd_weight
        return te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=settings.amax_epsilon,
            force_pow_2_scales=settings.power_2_scale,
            block_scaling_dim=recipe.w_block_scaling_dim,
        )
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device, columnwise=False)


def _free_transposes_after_backward(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    def free(_: Tensor) -> None:
        for parameter in layer.parameters():
            if hasattr(parameter, "update_usage"):
                parameter.update_usage(rowwise_usage=True, columnwise_usage=False)

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

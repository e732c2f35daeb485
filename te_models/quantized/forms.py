"""FP8 forms of exported models: which weights are in FP8, how they are quantized, how config.json says so.

Weights are [out, in]. Each one in FP8 becomes two tensors: E4M3 values and scales, whose product it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from fp8_suite.te_models.emulation.casts import BLOCK, E4M3, amax_of, cast_blocks, saturate, scale_of, tiled
from fp8_suite.te_models.quantized.noise import noise_of
from fp8_suite.te_models.quantized.reader import SQUARE, dequantize
from torch import Tensor


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [out, in] and FP32 scales [out/128, in/128], powers of two, as TE's block recipe."""
    operand = cast_blocks(weight, E4M3, (BLOCK, BLOCK))
    return operand.data, operand.scale_inv


def round_blocks(weight: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and scales like `quantize_blocks`, rounded at random by uniform int16 `noise` [out, in].

    An FP32 weight [out, in] between two values becomes one of them with the probability that keeps its mean,
    so a model's many small updates survive on average. A weight that equals a value keeps its bits.
    """
    scales = scale_of(amax_of(tiled(weight, SQUARE), (1, 3)), E4M3, power_of_two=True)
    values = dequantize(weight.abs(), scales, SQUARE)  # at most 448
    steps = (values.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2**exponent
    steps.clamp_(min=2**-6).div_(8)  # subnormal values have the step of the smallest normal ones
    values.div_(steps).add_(noise, alpha=2**-16).add_(0.5 + 2**-17)  # noise in (0, 1) moves no whole number
    values.floor_().mul_(steps)
    return values.copysign_(weight).to(E4M3), scales.reciprocal()


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [out, in] and BF16 scales [out, 1] by the rule of compressed-tensors."""
    scale = (weight.abs().amax(1, keepdim=True) / torch.finfo(E4M3).max).bfloat16()
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return saturate(weight / scale.float(), E4M3), scale


@dataclass(frozen=True)
class Form:
    """A way to store FP8 weights: `X.weight` in E4M3 and its scales in `X.<scale_name>`."""

    scale_name: str
    multiple: int  # of rows and columns of weights in FP8; others stay in BF16
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]  # FP32 weight -> values, scales
    config: dict[str, Any]  # quantization_config, in which `kept_field` lists the modules in BF16
    kept_field: str


BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNEL_GROUP = {
    "targets": ["Linear"],
    "weights": NUMBERS | {"strategy": "channel", "dynamic": False},
    "input_activations": NUMBERS | {"strategy": "token", "dynamic": True},
}
CHANNEL_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": CHANNEL_GROUP},
}
FORMS = {
    # transformers reads wrong values from a weight with cut-off blocks.
    "block": Form("weight_scale_inv", BLOCK, quantize_blocks, BLOCK_CONFIG, "modules_to_not_convert"),
    "channel": Form("weight_scale", 16, quantize_channels, CHANNEL_CONFIG, "ignore"),
}

# vLLM runs these projections as one GEMM, so all or none of them are in FP8.
FUSED = {f"{part}_proj": "qkv" for part in "qkv"} | {"gate_proj": "gate_up", "up_proj": "gate_up"}
ROUTERS = {"gate", "router"}


def layer_of(name: str) -> str:
    """Return the prefix of a tensor's name up to the number of its layer; "" outside of layers."""
    return re.match(r"(.*?\.\d+\.)?", name)[0]


def fp8_weights(shapes: Mapping[str, Sequence[int]], form: Form, bf16: Collection[str] = ()) -> set[str]:
    """Return the names of the weights to store in FP8; the modules `bf16` are not.

    These are the linear weights of decoder layers whose sizes fit the form.
    """
    modules, excluded = {}, set()  # weight -> GEMM of vLLM; such GEMMs in BF16
    for name, shape in shapes.items():
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        if name.endswith(".weight") and len(shape) == 2 and ".layers." in name and leaf not in ROUTERS:
            modules[name] = parent, FUSED.get(leaf, leaf)
            if f"{parent}.{leaf}" in bf16 or any(size % form.multiple for size in shape):
                excluded.add(modules[name])
    return {name for name, module in modules.items() if module not in excluded}


class Quantizer:
    """Quantizes the tensors of a model as they pass, and remembers what it did for config.json."""

    def __init__(
        self, form: Form, bf16: Collection[str] = (), at_random: Collection[str] = frozenset(), seed: int = 0
    ):
        """`bf16`: linear modules to keep in BF16. `at_random`: weights, maybe in FP32, to round at random."""
        self.form, self.bf16, self.at_random, self.seed = form, bf16, at_random, seed
        self.quantized = 0  # number of weights in FP8
        self.kept = {"lm_head": None}  # modules with matrices in BF16, in order; also if tied

    def quantize(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors with hub names, in which each weight in FP8 is followed by its scales.

        Tensors of a layer follow one another and are in memory together.
        """
        for _, pairs in groupby(tensors, key=lambda pair: layer_of(pair[0])):
            layer = dict(pairs)
            chosen = fp8_weights({name: tensor.shape for name, tensor in layer.items()}, self.form, self.bf16)
            for name in list(layer):
                tensor, module = layer.pop(name), name.rpartition(".")[0]
                if name in chosen:
                    self.quantized += 1
                    quantize = self.form.quantize
                    if name in self.at_random:
                        noise = noise_of(self.seed, f"{name}/rounding", tensor.shape, tensor.device)
                        quantize = partial(round_blocks, noise=noise)
                    values, scales = quantize(tensor.float())
                    yield name, values
                    yield f"{module}.{self.form.scale_name}", scales
                else:
                    self.kept |= {module: None} if tensor.ndim > 1 else {}
                    yield name, tensor.bfloat16() if name in self.at_random else tensor

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        return self.form.config | {self.form.kept_field: list(self.kept)}

    def describe(self) -> str:
        """Return, for the user, how many weights are in FP8."""
        return f"{self.quantized} linear weights are in FP8"

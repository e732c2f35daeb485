"""FP8 forms of exported models: which weights are in FP8, how they are quantized, how config.json says so.

Weights are BF16 or FP32, [out, in]. Each weight in FP8 becomes two tensors: E4M3 values and scales, whose
product is the weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from fp8_suite.te_models.emulation.casts import BLOCK, E4M3, saturate, scale_of
from torch import Tensor

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
CHUNK = 2**25  # values quantized at a time, to limit the memory of temporary results


def quantize_blocks(weight: Tensor, *, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Return values [out, in] and FP32 scales [out/128, in/128], as `cast_blocks` and TE's block recipe."""
    tiles = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [out/128, 128, in/128, 128]
    tiles = tiles if power_of_two else tiles.float()  # products with powers of two are exact in BF16
    scale = scale_of(tiles.abs().amax((1, 3)).float(), E4M3, power_of_two=power_of_two)
    values = saturate(tiles * scale.to(tiles.dtype)[:, None, :, None], E4M3)
    return values.flatten(2, 3).flatten(0, 1), scale.reciprocal()


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [out, in] and BF16 scales [out, 1] by the rule of compressed-tensors."""
    scale = (weight.abs().amax(1, keepdim=True) / torch.finfo(E4M3).max).bfloat16()
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return saturate(weight.float() / scale.float(), E4M3), scale


def _block_config(kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(kept),
    }


def _channel_config(kept: Sequence[str]) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
    }


@dataclass(frozen=True)
class Form:
    """A way to store FP8 weights: `X.weight` in E4M3 and its scales in `X.<scale_name>`."""

    scale_name: str
    multiple: int  # of rows and columns of weights in FP8; others stay in BF16
    quantize: Quantize
    config: Callable[[Sequence[str]], dict[str, Any]]  # quantization_config, from the modules in BF16


FORMS = {
    # transformers reads wrong values from a weight with cut-off blocks.
    "block": Form("weight_scale_inv", BLOCK, quantize_blocks, _block_config),
    "channel": Form("weight_scale", 16, quantize_channels, _channel_config),
}
# Block scales of any value, as TE's block recipe has with `--fp8_fp32_scales`.
FP32_BLOCKS = Form("weight_scale_inv", BLOCK, partial(quantize_blocks, power_of_two=False), _block_config)

# vLLM runs these projections as one GEMM, so all or none of them are in FP8.
FUSED = {f"{part}_proj": "qkv" for part in "qkv"} | {"gate_proj": "gate_up", "up_proj": "gate_up"}
FUSED |= {"q_a_proj": "qkv_a", "kv_a_proj_with_mqa": "qkv_a"}
ROUTERS = {"gate", "router", "shared_expert_gate"}


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


def in_chunks(quantize: Quantize, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize blocks of rows one after the other."""
    rows = max(CHUNK // weight.shape[1] // BLOCK, 1) * BLOCK
    values, scales = zip(*map(quantize, weight.split(rows)), strict=True)
    return torch.cat(values), torch.cat(scales)


# The dimension of a weight that tensor parallelism divides.
DIVIDED = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


def unshardable(shapes: Mapping[str, Sequence[int]], kv_heads: int | None) -> dict[int, str]:
    """Return {GPUs: weight} for numbers of GPUs over which vLLM cannot divide FP8 weights in blocks.

    Each part needs a multiple of 128 rows or columns. Every GPU has at least one of the `kv_heads`.
    """
    refused = {}
    for gpus in (8, 4, 2):
        for name, shape in shapes.items():
            leaf = name.removesuffix(".weight").rpartition(".")[2]
            parts = min(gpus, kv_heads or gpus) if leaf in ("k_proj", "v_proj") else gpus
            if leaf in DIVIDED and shape[DIVIDED[leaf]] % (parts * BLOCK):
                refused[gpus] = f"{leaf} {list(shape)}"
    return dict(sorted(refused.items()))


class Quantizer:
    """Quantizes the tensors of a model as they pass, and remembers what it did for config.json."""

    def __init__(self, form: Form, bf16: Collection[str] = ()):
        """`bf16`: names of linear modules to keep in BF16."""
        self.form, self.bf16 = form, bf16
        self.shapes: dict[str, list[int]] = {}  # of weights in FP8
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
                if name not in chosen:
                    self.kept |= {module: None} if tensor.ndim > 1 else {}
                    yield name, tensor
                    continue
                self.shapes[name] = list(tensor.shape)
                exact = tensor.dtype in (torch.bfloat16, torch.float32)
                values, scales = in_chunks(self.form.quantize, tensor if exact else tensor.float())
                yield name, values
                yield f"{module}.{self.form.scale_name}", scales

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        return self.form.config(list(self.kept))

    def describe(self, kv_heads: int | None) -> list[str]:
        """Return lines for the user: what is in FP8, and how vLLM cannot serve it."""
        inside = [module for module in self.kept if ".layers." in module]
        lines = [f"{len(self.shapes)} linear weights are in FP8"]
        lines[0] += f"; {len(inside)} modules of layers stay in BF16, {inside[0]} first" if inside else ""
        blocks = self.form.scale_name == FORMS["block"].scale_name
        if blocks and (refused := unshardable(self.shapes, kv_heads)):
            gpus, weights = ", ".join(map(str, refused)), ", ".join(dict.fromkeys(refused.values()))
            parts = f"parts of {weights} would be no multiple of {BLOCK}"
            lines.append(f"vLLM cannot divide it over {gpus} GPUs by tensor parallelism: {parts}")
        return lines

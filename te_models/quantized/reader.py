"""Reader of the FP8 tensors in a checkpoint's safetensors files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.te_models.quantized.formats import Block, dequantize, describe_block, scale_grid
from fp8_suite.te_models.quantized.methods import Quantization
from torch import Tensor

# Names are safetensors' dtypes. Bytes of U8 are read as E8M0 exponents.
VALUES, SCALES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0", "U8")
OTHER_FORMS = "F8_E5M2", "F4", "I8", "U8", "I32"
SUFFIXES = "_scale_inv", "_scale"
# Scales of activations and of the KV cache, and zero points, which are zeros in symmetric forms.
UNUSED = re.compile(r"\.(input|output|activation|prob|prob_output|[qkv])_scale(_inv)?$|_zero_point$")


@dataclass(frozen=True)
class QuantizedRows:
    """Rows `first_row` and following of an FP8 weight as stored, and all scales of the weight, in FP32."""

    values: Tensor
    scales: Tensor
    block: Block
    first_row: int = 0

    def dequantize(self) -> Tensor:
        return dequantize(self.values, self.scales, self.block, first_row=self.first_row)


class QuantizedReader:
    """Reader of the FP8 tensors among `tensors`, slices of safetensors files by name, with their scales.

    `name` identifies the model in errors. UserError if an FP8 tensor has no scales or scales of another
    shape, or if a tensor is quantized in another way. Values of scales are checked when they are read.
    """

    def __init__(self, name: str, tensors: Mapping[str, Any], quantization: Quantization):
        self._model, self._tensors, self._form = name, tensors, quantization
        self._names = {key: key + end for key in tensors for end in SUFFIXES if key + end in tensors}
        self._scales: dict[str, Tensor] = {}
        self.hidden = {*self._names.values(), *filter(UNUSED.search, tensors)}
        self.blocks: dict[str, Block] = {}  # of the FP8 tensors
        for key, part in tensors.items():
            dtype = part.get_dtype()
            if key in self.hidden:
                continue
            if dtype == VALUES:
                self.blocks[key] = self._block_of(key)
            elif key in self._names or dtype in OTHER_FORMS:
                raise self._error(f"{key} is {dtype}, which is no known form of FP8 weights")

    def _error(self, reason: str) -> UserError:
        return bad_setting(f"{reason}; give the original model", model_name=self._model)

    def _block_of(self, key: str) -> Block:
        """Return the block whose scales have the stored shape."""
        name, shape = self._names.get(key), self._tensors[key].get_shape()
        if name is None:
            wanted = " or ".join(key + suffix for suffix in SUFFIXES)
            raise self._error(f"{key} is FP8, but its scales ({wanted}) are missing")
        if len(shape) != 2:
            raise self._error(f"{key} is FP8 with shape {shape}, and only matrices are known")
        if (dtype := self._tensors[name].get_dtype()) not in SCALES:
            raise self._error(f"{name} is {dtype}, and scales are {', '.join(SCALES)}")
        stored = self._tensors[name].get_shape()
        grids = {block: scale_grid(shape, block) for block in self._form.blocks}
        for block, grid in grids.items():
            # Scales of rows may be a vector, and the scale of a tensor a scalar.
            if stored in (grid, grid[:1] if grid[1] == 1 else grid, [] if grid == [1, 1] else grid):
                return block
        needed = " or ".join(f"{grid} (one per {describe_block(block)})" for block, grid in grids.items())
        raise self._error(f"{name} has shape {stored}, and {key} with shape {shape} needs {needed or 'none'}")

    def read(self, key: str, start: int, stop: int, device: Any) -> QuantizedRows:
        """Read rows start to stop of an FP8 tensor to `device`."""
        if key not in self._scales:
            self._scales[key] = self._read_scales(key).to(device)
        values = self._tensors[key][start:stop].to(device)
        return QuantizedRows(values, self._scales[key], self.blocks[key], start)

    def _read_scales(self, key: str) -> Tensor:
        """Return scales in FP32. UserError unless they are positive and finite."""
        scales = self._tensors[self._names[key]][...]
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        scales = scales.float().reshape(scale_grid(self._tensors[key].get_shape(), self.blocks[key]))
        if (wrong := scales[~(scales.isfinite() & (scales > 0))]).numel():
            value = wrong[0].item()
            raise self._error(f"{self._names[key]} contains {value}, and scales are positive and finite")
        return scales

    def check(self) -> dict[str, Any]:
        """Check all scales; return form, kinds of scales and number of tensors, for the run's records."""
        kinds = set()
        for key, block in self.blocks.items():
            self._read_scales(key)
            kinds.add(f"{self._tensors[self._names[key]].get_dtype()} per {describe_block(block)}")
        return {"form": self._form.method, "scales": ", ".join(sorted(kinds)), "tensors": len(self.blocks)}

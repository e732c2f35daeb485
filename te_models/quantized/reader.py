"""FP8 weights of checkpoints: E4M3 values with one scale per block, row or tensor.

A weight [rows, columns] in blocks of R x C has scales [ceil(rows / R), ceil(columns / C)], so the last blocks
may be smaller. Its values are weight x scale, computed in FP32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting
from torch import Tensor

METHODS = ("fp8", "compressed-tensors", "modelopt")  # values of quant_method
MODELOPT_FILE = "hf_quant_config.json"  # ModelOpt's, if config.json has no quantization_config
# Names are safetensors' dtypes.
VALUES, SCALES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
OTHER_FORMS = "F8_E5M2", "F4", "I8", "U8", "I32"
SUFFIXES = "_scale_inv", "_scale"
# Scales of activations and of the KV cache, and zero points, which are zeros in symmetric forms.
UNUSED = re.compile(r"\.(input|output|activation|prob|prob_output|[qkv])_scale(_inv)?$|_zero_point$")

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
TENSOR: Block = (None, None)
ROW: Block = (1, None)
SQUARE: Block = (128, 128)  # DeepSeek's and Qwen3's


def block_of(fields: Mapping[str, Any]) -> Block | None:
    """Return the blocks of a quantization_config; None if scales are per row or per tensor."""
    if fields["quant_method"] == "fp8":
        size = fields.get("weight_block_size", SQUARE)
    else:
        weights = [group.get("weights") or {} for group in fields.get("config_groups", {}).values()]
        size = next(filter(None, (settings.get("block_structure") for settings in weights)), None)
    return size and tuple(size)


def scale_grid(shape: Sequence[int], block: Block) -> list[int]:
    """Return the shape of the scales of a weight with this shape."""
    return [1 if size is None else -(-length // size) for length, size in zip(shape, block, strict=True)]


def dequantize(values: Tensor, scales: Tensor, block: Block, *, first_row: int = 0) -> Tensor:
    """Return FP8 values times scales in FP32, on the device of `values`.

    `values`, or FP32 values in their place, which are overwritten, are rows first_row to first_row + n of a
    weight [rows, columns]; `scales` are all of its scales.
    """
    rows, columns = values.shape
    height, width = block[0] or first_row + rows, block[1] or columns
    skipped, whole = first_row // height, columns // width
    scales = scales[skipped : (first_row + rows - 1) // height + 1].to(values.device, non_blocking=True)
    scales = scales.float()[:, None].expand(-1, height, -1).flatten(0, 1)
    scales = scales[first_row - skipped * height :][:rows]  # [n, ceil(columns / width)]
    product = values.float()
    product[:, : whole * width].unflatten(1, (whole, width)).mul_(scales[:, :whole, None])
    if whole * width < columns:  # the last blocks are smaller
        product[:, whole * width :].mul_(scales[:, whole:])
    return product


def rounding_intervals() -> Tensor:
    """Return the ends of the values that round to each E4M3 code: [256, 2], FP32, by the code's byte.

    Values are rounded to BF16 first, as weights are, and ties go to even codes. Zeros, and 448 upwards, have
    no width.
    """
    magnitudes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    half_steps = torch.exp2(torch.floor(torch.log2(middles)) - 8)  # of BF16
    half_steps[1::2] *= -1  # the middle above an odd code rounds away from it
    low, high = magnitudes.clone(), magnitudes.clone()
    low[1:-1], high[1:-1] = (middles + half_steps)[:-1], (middles + half_steps)[1:]
    ends = torch.cat([torch.stack([low, high], 1), torch.full((1, 2), torch.nan)])
    return torch.cat([ends, -ends])


def dither(values: Tensor, noise: Tensor) -> Tensor:
    """Return an FP32 value inside the rounding interval of each E4M3 value, by uniform int16 `noise`."""
    low, high = rounding_intervals().to(values.device, non_blocking=True).unbind(1)
    codes = values.view(torch.uint8).int()
    return torch.lerp(low[codes], high[codes], (noise.float() + (2**15 + 0.5)) / 2**16)


class QuantizedReader:
    """Reader of the FP8 tensors among `tensors`, slices of safetensors files by name, with their scales.

    `name` identifies the model in errors. UserError for an FP8 tensor without scales, for scales of another
    shape or that are not positive and finite, and for a tensor that is quantized in another way.
    """

    def __init__(self, name: str, tensors: Mapping[str, Any], fields: Mapping[str, Any]):
        self._model, self._tensors = name, tensors
        try:
            block = block_of(fields)
            scale_grid((1, 1), block or TENSOR)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise self._error(f"its quantization_config: blocks have two positive sizes ({error})") from None
        self._blocks = list(filter(None, (TENSOR, ROW, block)))
        names = {key: key + end for key in tensors for end in SUFFIXES if key + end in tensors}
        self.hidden = {*names.values(), *filter(UNUSED.search, tensors)}
        self.scales: dict[str, tuple[Tensor, Block]] = {}  # of the FP8 tensors, in FP32
        for key, part in tensors.items():
            dtype = part.get_dtype()
            if key in self.hidden:
                continue
            if dtype == VALUES:
                self.scales[key] = self._read_scales(key, names.get(key))
            elif key in names or dtype in OTHER_FORMS:
                raise self._error(f"{key} is {dtype}, which is no known form of FP8 weights")
        self.on_one_grid = {  # they have one scale, or scales that differ by powers of two
            key
            for key, (scales, _) in self.scales.items()
            if ((mantissas := scales.frexp()[0]) == mantissas[0, 0]).all()
        }

    def _error(self, reason: str) -> UserError:
        return bad_setting(f"{reason}; give the original model", model_name=self._model)

    def _read_scales(self, key: str, name: str | None) -> tuple[Tensor, Block]:
        """Return scales and the block that the shape of the scales stands for."""
        if name is None:
            raise self._error(f"{key} is FP8, but its scales ({key}_scale_inv or _scale) are missing")
        part, shape = self._tensors[name], self._tensors[key].get_shape()
        if (dtype := part.get_dtype()) not in SCALES:
            raise self._error(f"{name} is {dtype}, and scales are {', '.join(SCALES)}")
        grids = {block: scale_grid(shape, block) for block in self._blocks if len(shape) == 2}
        # Scales of rows may be a vector, and the scale of a tensor a scalar.
        stored = part.get_shape() + [1] * (2 - len(part.get_shape()))
        block = next((block for block, grid in grids.items() if grid == stored), None)
        if block is None:
            needed = f"{key} {shape} needs one of {list(grids.values())}"
            raise self._error(f"{name} has shape {part.get_shape()}, and {needed}")
        scales = part[...].float().reshape(stored)
        if (wrong := scales[~(scales.isfinite() & (scales > 0))]).numel():
            raise self._error(f"{name} contains {wrong[0].item()}, and scales are positive and finite")
        return scales, block

    def rows(self, key: str, start: int, stop: int, device: Any, noise: Tensor | None = None) -> Tensor:
        """Return rows start to stop of an FP8 tensor, dithered by `noise` and dequantized on `device`."""
        scales, block = self.scales[key]
        values = self._tensors[key][start:stop].to(device, non_blocking=True)
        if noise is not None:
            values = dither(values, noise)
        return dequantize(values, scales, block, first_row=start)

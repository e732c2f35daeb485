"""FP8 tensors that kernels of the suite write in TE's place under delayed scaling: which they can write, how
TE's tensors are made of what they write, and whether that is what TE's own kernels write.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PACKED_TOKENS = 4  # the kernels take a multiple of this


def can_cast(quantizer: Any, *read: Tensor) -> bool:
    """Whether a kernel that reads these, the first one's rows being tokens, can cast for this quantizer."""
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    return (
        type(quantizer) is tensors.Float8Quantizer
        and all(t.ndim == 2 and t.dtype == torch.bfloat16 and t.is_contiguous() and t.numel() for t in read)
        and read[0].shape[0] % PACKED_TOKENS == 0
    )


def write(launch: Callable[..., None], shape: tuple[int, ...], quantizer: Any, device: torch.device) -> Any:
    """The quantizer's tensor of this shape, written by `launch`."""
    out = quantizer.make_empty(shape, dtype=torch.bfloat16, device=device)
    launch(
        rows=out._data if quantizer.rowwise_usage else None,
        columns=out._transpose if quantizer.columnwise_usage else None,
        scale=quantizer.scale,
        scale_inverse=out._scale_inv,
        amax=quantizer.amax,
        e5m2=quantizer.dtype.name == "kFloat8E5M2",
    )
    out._transpose_invalid = not quantizer.columnwise_usage
    return out


def trial_quantizer(dtype: Any) -> Any:
    """Its scale and amax lie among those of other tensors, as in training: Triton compiles by alignment."""
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    scale, amax = torch.full((4,), 37.3, device="cuda"), torch.zeros(4, device="cuda")
    made = tensors.Float8Quantizer(scale[3:], amax[3:], dtype)
    made.internal = True
    return made


# Parts of the values that may differ from TE's, whose functions and sums round otherwise, by one FP8 number.
OTHERWISE_ROUNDED = 1e-3


def differs(found: Any, expected: Any, mine: Any, theirs: Any) -> str | None:
    """Which part of a quantized tensor, or of its quantizer, is not the expected one, or None."""
    if not torch.allclose(mine.amax, theirs.amax, rtol=1e-6):
        return "amax"
    if not torch.equal(found._scale_inv.flatten(), expected._scale_inv.flatten()):
        return "scale"
    for name, wanted in (("_data", mine.rowwise_usage), ("_transpose", mine.columnwise_usage)):
        if not wanted:
            continue
        a, b = (getattr(t, name).view(torch.uint8) for t in (found, expected))
        # FP8 bits of one sign count up with the magnitude, so neighbours differ by 1.
        distance = (a.to(torch.int16) - b.to(torch.int16)).abs()
        if a.shape != b.shape or distance.max() > 1 or distance.float().mean() > OTHERWISE_ROUNDED:
            return name.strip("_")
    return None

"""Adam's moments in 8 or 16 bits, with one shared exponent per block of 64 values of a row.

A code holds the distance of a value's exponent from the largest one in its block, and the leading bits of
its mantissa (for 8 bits: 3, as in E4M3). The first moment has a sign and spans 16 binades, the second has no
sign and spans 32; with 16 bits, there are 10 mantissa bits and twice the binades. FP32 bits are cut off after
random bits are added below the cut (stochastic rounding), so the expected value is exact: a decay of 0.1 % a
step (--adam_beta2 0.999) reaches the second moment, although neighbouring codes differ by 6 to 12 %. Only a
power of two is shared, so a block's other values stay on their codes when its largest value changes.

Below the range, a first moment becomes the smallest code or zero, at random. A second moment becomes the
smallest code, never zero, which would divide by epsilon alone. Vectors (norms and biases), and matrices whose
rows are no multiple of 64, keep FP32 moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BLOCK = 64
MOMENTS = FIRST, SECOND = "exp_avg", "exp_avg_sq"  # names in torch.optim.AdamW
# Random bits are hashed from an element's index times the first; the second is added for the second moment.
INDEX_FACTOR, NEXT_BITS = 0x9E3779B1, 0x7F4A7C15
CONVERTED_AT_ONCE = 2**24  # elements
EXPONENTS = "_exponents"  # suffix of the name of a moment's block exponents, uint8


class Format(NamedTuple):
    """Storage of a moment, by its name in --moment_dtype."""

    dtype: torch.dtype
    bytes: float  # per parameter, with the block exponents
    mantissa: int = 0  # mantissa bits of a code; 0: stored as `dtype`, without blocks


FORMATS = {
    "fp32": Format(torch.float32, 4),
    "bf16": Format(torch.bfloat16, 2),
    "fp16": Format(torch.int16, 2 + 1 / BLOCK, mantissa=10),
    "fp8": Format(torch.uint8, 1 + 1 / BLOCK, mantissa=3),
}


def allocate(parameter: Tensor, moment: str, name: str) -> dict[str, Tensor]:
    """Return zeros for `moment` of a parameter in the format `name`, sharded like the parameter."""
    form = FORMATS[name]
    if form.mantissa and (parameter.ndim < 2 or parameter.shape[-1] % BLOCK):
        form = FORMATS["fp32"]
    stored = {moment: torch.zeros_like(parameter, dtype=form.dtype)}
    if form.mantissa:
        stored[moment + EXPONENTS] = _zero_exponents(parameter)
    return stored


def _zero_exponents(parameter: Tensor) -> Tensor:
    """Return zeros, uint8 [..., n / 64] for a parameter [..., n], sharded like it."""
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    shape = (*shard.shape[:-1], shard.shape[-1] // BLOCK)
    exponents = torch.zeros(shape, dtype=torch.uint8, device=shard.device)
    if not isinstance(parameter, DTensor):
        return exponents
    unsharded = torch.empty(*parameter.shape[:-1], parameter.shape[-1] // BLOCK, device="meta")
    sizes = {"shape": unsharded.shape, "stride": unsharded.stride(), "run_check": False}
    layout = DTensor.from_local(exponents.to("meta"), parameter.device_mesh, parameter.placements, **sizes)
    return with_layout(exponents, layout)


def with_layout(shard: Tensor, layout: Tensor) -> Tensor:
    """Return `shard` as a DTensor that is sharded like `layout`, or `shard` itself if `layout` is no DTensor.

    It stays on its device. `DTensor.from_local` would move a shard in host memory to the mesh's GPU.
    """
    return DTensor(shard, layout._spec, requires_grad=False) if isinstance(layout, DTensor) else shard


def read(state: dict[str, Tensor], moment: str) -> Tensor:
    """Return a moment in FP32. `state` holds this rank's shards by name."""
    codes, exponents = state[moment], state.get(moment + EXPONENTS)
    return codes.float() if exponents is None else decode(codes, exponents, signed=moment == FIRST)


def write_(state: dict[str, Tensor], moment: str, values: Tensor, noise: Tensor | None = None) -> None:
    """Store FP32 `values` in place. `noise` [like values] int32: 32 random bits; None: round to nearest."""
    exponents = state.get(moment + EXPONENTS)
    if exponents is None:
        state[moment].copy_(values)
        return
    codes, shared = encode(values, state[moment].dtype, signed=moment == FIRST, noise=noise)
    state[moment].copy_(codes)
    exponents.copy_(shared)


def convert_(target: dict[str, Tensor], source: dict[str, Tensor], moment: str, device: torch.device) -> None:
    """Store the values of `source`, a moment in another format, in `target`; compute on `device`.

    Rows are converted in parts, which take up to 40 bytes of temporary memory per element.
    """
    columns = _columns(target[moment])
    rows = max(1, CONVERTED_AT_ONCE // columns)
    for first in range(0, target[moment].numel() // columns, rows):
        here, there = (_rows(tensors, slice(first, first + rows)) for tensors in (target, source))
        result = {name: part.to(device) for name, part in here.items()}
        write_(result, moment, read({name: part.to(device) for name, part in there.items()}, moment))
        for name, part in here.items():
            part.copy_(result[name])


def _rows(tensors: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Return these rows of tensors [..., n], counted over all leading dimensions."""
    return {name: tensor.view(-1, _columns(tensor))[rows] for name, tensor in tensors.items()}


def _columns(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim and tensor.numel() else 1


def mantissa_of(dtype: torch.dtype) -> int:
    """Return the mantissa bits of codes stored in `dtype`."""
    return next(form.mantissa for form in FORMATS.values() if form.mantissa and form.dtype == dtype)


def encode(
    values: Tensor, dtype: torch.dtype, *, signed: bool, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes in `dtype`, FP32 exponent fields uint8 [..., n / 64]) of FP32 values [..., n].

    The last binade of a block is the one of its largest value after rounding.
    """
    mantissa, levels = mantissa_of(dtype), 2 ** (8 * dtype.itemsize - signed)
    cut = 23 - mantissa
    bits = values.contiguous().view(torch.int32)
    low = torch.full_like(bits, 1 << cut - 1) if noise is None else noise & ((1 << cut) - 1)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + low) >> cut
    blocks = rounded.unflatten(-1, (-1, BLOCK))
    exponents = blocks.amax(-1) >> mantissa
    base = _base(exponents, mantissa, levels)
    codes = rounded - base
    if signed:
        # Below the smallest code: that code with a probability that keeps the expected value, else zero.
        smallest = (base + 1) << cut
        kept = values.abs() > low.float() * 2.0**-cut * smallest.view(torch.float32)
        codes = torch.where(magnitude < smallest, kept.int(), codes) | ((bits >> 31) & 1) * levels
    return codes.clamp(min=0).to(dtype), exponents.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor, *, signed: bool) -> Tensor:
    """Invert `encode`, up to its rounding. Returns FP32."""
    mantissa, bits = mantissa_of(codes.dtype), 8 * codes.dtype.itemsize
    levels = 2 ** (bits - signed)
    codes = codes.to(torch.int32) & ((1 << bits) - 1)
    magnitude = codes & (levels - 1)
    base = _base(exponents.to(torch.int32), mantissa, levels)
    values = ((magnitude + base) << (23 - mantissa)).view(torch.float32)
    return (
        torch.where(magnitude == 0, 0.0, torch.where(codes >= levels, -values, values)) if signed else values
    )


def _base(exponents: Tensor, mantissa: int, levels: int) -> Tensor:
    """Return the rounded bits that code 0 represents, [..., n] from block exponents [..., n / 64]."""
    binades = levels >> mantissa
    return ((exponents - (binades - 1)) << mantissa).clamp(min=0).repeat_interleave(BLOCK, -1)


def random_bits(count: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return two int32 tensors of random bits for elements 0 to count - 1 from an int64 scalar seed.

    MurmurHash3's finalizer of index and seed, so that kernel and reference draw the same, and so does a
    resumed run with the same shards.
    """
    index = torch.arange(count, dtype=torch.int64, device=seed.device)
    first = _mix((index * INDEX_FACTOR + seed) & 0xFFFFFFFF)
    return first.to(torch.int32), _mix((first + NEXT_BITS) & 0xFFFFFFFF).to(torch.int32)


def seed_at(seed: Tensor, first: int) -> Tensor:
    """Return the seed of a part that starts at element `first`, for the same bits as in the whole tensor."""
    return seed + (first * INDEX_FACTOR & 0xFFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)

"""Random numbers of a tensor, which depend only on a seed, its name and the kind of device."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def seed_of(seed: int, key: str) -> int:
    """Return a seed of 32 bits for the tensor `key`; torch's CPU generator ignores the upper half of 64."""
    return zlib.crc32(f"{seed}/{key}".encode())


def generator_of(seed: int, key: str, device: Any) -> torch.Generator:
    """Return a generator for the tensor `key`."""
    return torch.Generator(device).manual_seed(seed_of(seed, key))


def noise_of(seed: int, key: str, shape: Sequence[int], device: Any) -> Tensor:
    """Return uniform int16 values for the tensor `key`."""
    options = {"device": device, "generator": generator_of(seed, key, device), "dtype": torch.int16}
    return torch.randint(-(2**15), 2**15, shape, **options)

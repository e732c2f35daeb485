"""Table of GPUs: peaks, memory and bandwidths; opening one. Importing this module must not import torch."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Literal, NamedTuple

AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities; BF16 needs Ampere
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_* in <cuda.h>


class Gpu(NamedTuple):
    """GPU specifications. Those that only the planner reads are None where no run needed them."""

    bf16_tflops: float  # dense peak with FP32 accumulation
    fp8_tflops: float | None  # None: no FP8 tensor cores
    memory_gb: float | None = None
    memory_bandwidth: float | None = None  # bytes/s
    link_bandwidth: float | None = None  # bytes/s to the other GPUs of a node, one direction
    architecture: str | None = None  # name used by `core.recipes`
    card_gb: int | None = None  # memory by which the card is known, in NVIDIA's GB


def _gpu(bf16: float, fp8: float | None, memory: tuple[int, float, float], link_gbs: float, chip: str) -> Gpu:
    """Make an entry from its memory: (GB by which the card is known, GB, TB/s)."""
    card_gb, gb, tbs = memory
    return Gpu(bf16, fp8, gb, tbs * 1e12, link_gbs * 1e9, chip, card_gb)


# A key matches if CUDA's device name contains all its words. The first match wins, so variants come before
# the plain name. Peaks with sparsity are halved, and so are bandwidths of NVLink and PCIe, for one direction.
# The H200's memory is what CUDA reports; all other values are from NVIDIA's datasheets.
GPUS: dict[str, Gpu] = {
    "A100": _gpu(312, None, (80, 85.1, 2.04), 300, "Ampere"),  # NVIDIA A100 datasheet; SXM, 80 GB
    "A800": Gpu(312, None),  # an A100 with slower NVLink
    "H100 PCIe": Gpu(756, 1513),  # NVIDIA H100 datasheet, PCIe column
    "H100 NVL": _gpu(835, 1671, (94, 100.0, 3.9), 300, "Hopper"),  # NVIDIA H100 NVL datasheet, per GPU
    # NVIDIA H100 datasheet, SXM column; "NVIDIA H100 80GB HBM3"
    "H100": _gpu(989, 1979, (80, 85.1, 3.35), 450, "Hopper"),
    "H800 PCIe": Gpu(756, 1513),  # an H100 PCIe with slower NVLink
    "H800": Gpu(989, 1979),  # an H100 SXM with slower NVLink
    "H200 NVL": Gpu(835, 1671),  # NVIDIA H200 datasheet, NVL column
    "H200": _gpu(989, 1979, (141, 150.1, 4.8), 450, "Hopper"),  # NVIDIA H200 datasheet, SXM column
    "GH200": _gpu(989, 1979, (144, 150.1, 4.9), 450, "Hopper"),  # NVIDIA GH200 datasheet, 144 GB HBM3e
    "H20": Gpu(148, 296),  # NVIDIA H20 product brief
    "B100": Gpu(1750, 3500),  # NVIDIA Blackwell architecture brief, HGX B100 / 8
    "B200": _gpu(2250, 4500, (180, 191.0, 8.0), 900, "Blackwell"),  # same brief, HGX B200 / 8
    "GB200": _gpu(2500, 5000, (186, 198.0, 8.0), 900, "Blackwell"),  # NVIDIA GB200 NVL72 datasheet / 72
    "B300": _gpu(2250, 4500, (288, 288.0, 8.0), 900, "Blackwell"),  # NVIDIA HGX B300 datasheet / 8
    "GB300": Gpu(2500, 5000),  # NVIDIA GB300 NVL72 datasheet / 72
    "L4": Gpu(121, 242),  # NVIDIA L4 datasheet
    "L40": Gpu(181, 362),  # NVIDIA L40 datasheet
    "L40S": _gpu(362, 733, (48, 47.7, 0.864), 32, "Ada"),  # NVIDIA L40S datasheet
    "RTX 6000 Ada": Gpu(364, 728),  # NVIDIA Ada professional GPU architecture whitepaper
    "RTX PRO 6000 Max Q": Gpu(439, 878),  # NVIDIA RTX Blackwell PRO GPU architecture whitepaper
    "RTX PRO 6000": Gpu(504, 1008),  # NVIDIA RTX Blackwell PRO GPU architecture whitepaper
    # NVIDIA Ada GPU architecture whitepaper, appendix A
    "RTX 4090": _gpu(165.2, 330.3, (24, 25.3, 1.008), 32, "Ada"),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A
    "RTX 5090": _gpu(209.5, 419, (32, 33.7, 1.792), 64, "RTX Blackwell"),
}
PLANNED = {name: gpu for name, gpu in GPUS.items() if gpu.memory_gb}  # GPUs with all values

# Stands in for a GPU without all values: choices depend only on ratios of rates.
REFERENCE_GPU = GPUS["H100"]
# Words in names of MIG slices and cut-down variants, whose peaks are lower.
_LOWER_PEAK_VARIANTS = {"MIG", "LAPTOP", "D"}


def installed_gpu(device_name: str) -> Gpu | None:
    """Return the GPU with CUDA's name, such as "NVIDIA H100 80GB HBM3"; None if it is not in the table."""
    words = set(re.findall(r"\w+", device_name.upper()))
    if words & _LOWER_PEAK_VARIANTS:
        return None
    return next((gpu for key, gpu in GPUS.items() if words.issuperset(key.upper().split())), None)


def planned_gpu(device_name: str) -> Gpu | None:
    """Return the GPU with CUDA's name; None if it is not in the table with all values."""
    gpu = installed_gpu(device_name)
    return gpu if gpu and gpu.memory_gb else None


def peak_tflops(device_name: str, precision: Literal["bf16", "fp8"]) -> float | None:
    """Return the dense peak of one GPU in TFLOP/s; None for an unknown GPU or an unsupported precision."""
    gpu = installed_gpu(device_name)
    return getattr(gpu, f"{precision}_tflops") if gpu else None


def open_gpu(index: int) -> tuple[int, int] | None:
    """Open the context on a GPU, for PyTorch to use later. Return its compute capability, or None."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch sets it before it opens a GPU
    device, context, major, minor = (ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int())
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), index),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    )
    failed = any(call() for call in calls)  # the first error code ends it; PyTorch will report it
    return None if failed else (major.value, minor.value)

"""Peaks by CUDA's device names."""

import pytest
from fp8_suite.core.gpus import GPUS, peak_tflops


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H20-3e", 148, 296),
        ("NVIDIA GH200 480GB", 989, 1979),
        ("NVIDIA A100-SXM4-80GB", 312, None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504, 1008),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 439, 878),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 5090 D", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("Quadro RTX 6000", None, None),
        *((f"NVIDIA {key}", *gpu[:2]) for key, gpu in GPUS.items()),  # no entry hides another
    ],
)
def test_peak_by_device_name(name, bf16, fp8):
    assert (peak_tflops(name, "bf16"), peak_tflops(name, "fp8")) == (bf16, fp8)

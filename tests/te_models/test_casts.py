"""FP8 casts against values computed by hand and torchao."""

import math

import pytest
import torch
from fp8_suite.te_models.emulation import casts
from fp8_suite.te_models.emulation.casts import E4M3, E5M2, amax_of, saturate, scale_of

INF, NAN, FLOAT32_MAX = float("inf"), float("nan"), torch.finfo(torch.float32).max


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_casts_saturate_and_keep_nan(dtype, largest):
    rounded = saturate(torch.tensor([1e9, -INF, INF, largest * 1.01, NAN]), dtype).float()
    assert rounded[:4].tolist() == [largest, -largest, largest, largest] and rounded[4].isnan()


def test_scales_and_amaxes_by_hand():
    amax = torch.tensor([3.5, 3.0, 0.0, INF, 1e-45, 448.0])
    exact = [128.0, torch.tensor(448 / 3).item(), 1.0, 1.0, FLOAT32_MAX, 1.0]
    assert scale_of(amax, E4M3, power_of_two=False).tolist() == exact
    assert scale_of(amax, E4M3, power_of_two=True).tolist() == [128.0, 128.0, 1.0, 1.0, 2.0**127, 1.0]
    assert scale_of(torch.tensor(7.0), E5M2, power_of_two=False) == 8192.0
    x = torch.tensor([[NAN, -3.0], [2.0, 1.0]], dtype=torch.bfloat16)
    assert amax_of(x) == 3.0 and amax_of(x).dtype == torch.float32
    assert amax_of(torch.tensor([-INF, 1.0])) == INF
    assert amax_of(x, (1,)).tolist() == [3.0, 2.0]


def test_per_tensor_casts_by_hand():
    x = torch.tensor([[1.0, -2.0], [3.5, 0.2]], dtype=torch.bfloat16)  # 0.2 is 0.2002 in BF16
    current = casts.cast_tensor(x, E4M3)
    assert current.data.float().tolist() == [[128.0, -256.0], [448.0, 26.0]]
    assert current.scale_inv == 1 / 128 and current.dequantize()[1, 1] == 26 / 128
    # With the amax of the unrounded value, which is smaller, the rounded value saturates.
    assert casts.cast_tensor(x, E4M3, amax=torch.tensor(3.4)).data.float()[1, 0] == 448.0
    delayed = casts.cast_with_scale(x, torch.tensor(256.0), E5M2)
    assert delayed.data.float().tolist() == [[256.0, -512.0], [896.0, 48.0]]
    assert casts.cast_with_scale(x, torch.tensor(256.0), E4M3).data.float()[1, 0] == 448.0  # 896 saturates


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("shape", [(256, 384), (160, 200)], ids=["full", "partial"])
def test_each_block_has_its_own_scale(shape, block, power_of_two):
    generator = torch.Generator().manual_seed(shape[0])
    row, column = torch.arange(shape[0])[:, None] // 128, torch.arange(shape[1])[None] // 128
    x = (torch.randn(shape, generator=generator) * 2.0 ** (3 * row - 2 * column)).bfloat16()
    quantized = casts.cast_blocks(x, E4M3, block, power_of_two=power_of_two)
    counts = [math.ceil(size / length) for size, length in zip(shape, block, strict=True)]
    assert quantized.data.shape == shape and list(quantized.scale_inv.shape) == counts
    dequantized = quantized.dequantize()
    for i in range(0, counts[0], 37):
        for j in range(0, counts[1], 29):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            values = x[part].float()
            scale = torch.tensor(448.0) / values.abs().max()
            if power_of_two:
                scale = 2.0 ** scale.log2().floor()
            assert quantized.scale_inv[i, j] == scale.reciprocal()
            expected = saturate(values * scale, E4M3).float() * scale.reciprocal()
            assert torch.equal(dequantized[part], expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_mx_matches_torchao(dtype, dim, source):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    generator = torch.Generator().manual_seed(1)
    powers = torch.randint(-30, 30, (96, 160), generator=generator)
    x = torch.randn(96, 160, generator=generator) * 2.0**powers
    x[:, :32] = 0.0
    x[:32] = 0.0
    x[40, 40], x[64:, 64:] = 448.0 * 2**29, 448.0
    x = x.to(source)
    rows = x if dim == 1 else x.T.contiguous()
    scale, data = mx.to_mx(rows, dtype, 32, scaling_mode=config.ScaleCalculationMode.RCEIL)
    ours = casts.cast_mx(x, dtype, dim=dim)
    ours_data, ours_scale = (ours.data, ours.scale_inv) if dim == 1 else (ours.data.T, ours.scale_inv.T)
    assert torch.equal(ours_data.contiguous().view(torch.uint8), data.view(torch.uint8).reshape(rows.shape))
    exponents = scale.view(torch.uint8).reshape(ours_scale.shape).double() - 127
    assert torch.equal(ours_scale, exponents.exp2().float())


def test_mx_blocks_at_the_smallest_scale_are_scaled():
    """TE multiplies by 2^127 for E8M0 exponent 0 (since 2.14; torchao 0.18 by 1, which underflows)."""
    x = torch.full((32, 64), 3 * 2.0**-125)
    x[:, 32:] = 0.0
    quantized = casts.cast_mx(x, E4M3, dim=1)
    assert torch.equal(quantized.scale_inv, torch.full((32, 2), 2.0**-127))
    assert quantized.data.float()[0, [0, 63]].tolist() == [12.0, 0.0]
    assert torch.equal(quantized.dequantize(), x)

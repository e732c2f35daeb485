"""FP8 forms of exports have the numerics of TE and of compressed-tensors, and keep vLLM's GEMMs whole."""

import pytest
import torch
from fp8_suite.te_models.quantized.forms import (
    FORMS,
    fp8_weights,
    quantize_channels,
)
from fp8_suite.te_models.quantized.reader import ROW, dequantize


def weight(rows=384, columns=256, dtype=torch.bfloat16):
    """Random values with a zero block, a tiny one, a large one, and one with a single large value."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    values[:128, :128] = 0
    values[:128, 128:] *= 2.0**-120
    values[128:256, :128] *= 2.0**100
    values[130, 200] = 3.0
    return values.to(dtype)


def as_bytes(values):
    return values.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_are_those_of_compressed_tensors(dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = FORMS["channel"].config["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    source = weight(dtype=dtype)
    source[5] = 0
    values, scales = quantize_channels(source.float())
    low, high = source.bfloat16().aminmax(dim=1, keepdim=True)
    expected, _ = calculate_qparams(low, high, QuantizationArgs(**group["weights"]))
    if dtype == torch.bfloat16:
        assert torch.equal(scales, expected) and scales.dtype == torch.bfloat16
    state = {"weight": source.float(), "weight_scale": scales.float()}
    compressed = FloatQuantizationCompressor.compress(state, scheme)["weight"]
    assert torch.equal(as_bytes(values), as_bytes(compressed))
    state = {"weight": values, "weight_scale": scales.float()}
    theirs = FloatQuantizationCompressor.decompress(state, scheme)["weight"]
    assert torch.equal(dequantize(values, scales, ROW), theirs.float())


def layer(**sizes):
    names = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    sizes = dict.fromkeys([*names, "gate_proj", "up_proj", "down_proj"], (256, 256)) | sizes
    return {f"model.layers.7.{names.get(leaf, 'mlp')}.{leaf}.weight": shape for leaf, shape in sizes.items()}


OTHERS = {
    "model.embed_tokens.weight": (256, 256),
    "lm_head.weight": (256, 256),
    "model.layers.7.input_layernorm.weight": (256,),
    "model.layers.7.self_attn.q_proj.bias": (256,),
    "model.layers.7.mlp.gate.weight": (256, 256),
    "model.layers.7.mlp.experts.gate_up_proj": (4, 256, 256),
}


@pytest.mark.parametrize(
    ("sizes", "bf16", "kept"),
    [
        ({}, (), ""),
        ({"v_proj": (64, 256)}, (), "q_proj k_proj v_proj"),
        ({"down_proj": (256, 192)}, (), "down_proj"),
        ({}, ["model.layers.7.mlp.up_proj"], "gate_proj up_proj"),
    ],
)
def test_gemms_that_vllm_fuses_have_one_precision(sizes, bf16, kept):
    shapes = layer(**sizes)
    chosen = fp8_weights(shapes | OTHERS, FORMS["block"], bf16)
    assert {name.split(".")[-2] for name in shapes.keys() - chosen} == set(kept.split())
    assert chosen <= shapes.keys()

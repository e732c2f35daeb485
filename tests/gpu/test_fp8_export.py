"""FP8 exports on a GPU: the bytes that native TE multiplied, the files' loss, time and memory of an 8B."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.build import export_tensors
from fp8_suite.te_models.quantized.forms import FORMS, Quantizer
from fp8_suite.te_models.spec import find_model, on_meta, parameter_shapes
from fp8_suite.te_models.weights import layer_to_hf
from fp8_suite.training.export.quantize import quantize_export
from fp8_suite.training.export.write import export_hf
from fp8_suite.training.precision.fp8_inspect import read_cast
from fp8_suite.training.precision.recipes import why_not
from safetensors.torch import load_file

from tests.gpu.models import DEVICE, batch, build, spec
from tests.gpu.test_run import SMALL, train
from tests.gpu.test_te_model import fp8

pytestmark = pytest.mark.gpu
GEMMS = ("self_attention.layernorm_qkv.weight", "self_attention.proj.weight")
GEMMS += ("layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight")
NORMS = ("self_attention.layernorm_qkv.layer_norm_weight", "layernorm_mlp.layer_norm_weight")
NORMS += ("self_attention.q_norm.weight", "self_attention.k_norm.weight")


def test_exported_bytes_are_the_operands_of_native_te(tmp_path, monkeypatch):
    if reason := why_not("block"):
        pytest.skip(reason)
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    operands, quantize = [], Float8BlockQuantizer.quantize_impl

    def recorded(self, tensor):
        result = quantize(self, tensor)
        if self.block_scaling_dim == 2:  # weights
            operands.append(read_cast(result))
        return result

    monkeypatch.setattr(Float8BlockQuantizer, "quantize_impl", recorded)
    model_spec = spec(family="qwen3", layers=2)  # heads of 128: no block has rows of two projections
    model = build(model_spec, use_te=True, packed=False)
    with torch.no_grad(), fp8("block")():
        model(**batch([[256]] * 8, packed=False))
    assert len(operands) == 8
    quantizer = Quantizer(FORMS["block"])
    export_hf(tmp_path / "export", export_tensors(model), config=model_spec.config, quantizer=quantizer)
    stored = load_file(tmp_path / "export" / "model.safetensors")
    for layer in range(2):
        casts = dict(zip(GEMMS, operands[4 * layer : 4 * layer + 4], strict=True))
        te = {name: cast.data.view(torch.uint8) for name, cast in casts.items()}
        scales = {name: cast.scale_inv.repeat_interleave(128, 0) for name, cast in casts.items()}
        for suffix, expected in (("weight", te), ("weight_scale_inv", scales)):
            converted = layer_to_hf(expected | dict.fromkeys(NORMS), model_spec.config)
            for name, tensor in converted.items():
                if tensor is None:
                    continue
                exported = stored[f"model.layers.{layer}.{name.removesuffix('weight')}{suffix}"]
                if suffix == "weight":
                    assert torch.equal(exported.view(torch.uint8), tensor.cpu()), name
                else:
                    assert torch.equal(exported, tensor[::128].cpu()), name


@pytest.mark.parametrize("layers", ["--fp8_scenario block", "--fp8_scenario delayed"])
def test_the_loss_of_the_files_is_that_of_the_run(layers, tmp_path):
    if (reason := why_not(layers.split()[-1])) is not None:
        pytest.skip(reason)
    output = train(tmp_path / "run", f"{SMALL} --mixed_precision fp8 {layers} --export_dtype both")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for name in ("eval_loss_bf16", "export_loss_bf16", "export_loss_fp8"):
        assert summary[name] == pytest.approx(summary["eval_loss"], rel=0.01)
    assert summary["eval_loss_bf16"] == pytest.approx(summary["export_loss_bf16"], rel=1e-3)
    assert "export_fp8: eval loss" in output


def resident() -> int:
    """Return the bytes of this process in host memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_8b_is_exported_in_a_minute_with_the_host_memory_of_two_shards(tmp_path):
    model_spec = find_model("meta-llama/Llama-3.1-8B", init="random", use_te=True)
    shapes, generator = parameter_shapes(on_meta(model_spec)), torch.Generator(DEVICE).manual_seed(0)

    def tensors():
        for name, shape in shapes.items():
            weight = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)
            yield name, weight.normal_(0, 0.02, generator=generator)

    seconds, before, most = {}, resident(), 0

    def watched():
        nonlocal most
        for pair in tensors():
            yield pair
            most = max(most, resident() - before)

    for name, quantizer in (("fp8", Quantizer(FORMS["block"])), ("bf16", None)):
        started = time.perf_counter()
        export_hf(tmp_path / name, watched(), config=model_spec.config, quantizer=quantizer)
        seconds[name] = time.perf_counter() - started
    for form in FORMS:
        started = time.perf_counter()
        quantize_export(f"{tmp_path}/bf16", tmp_path / form, FORMS[form])
        seconds[f"command, {form}"] = time.perf_counter() - started
    print(f"seconds {seconds}, host memory {most / 1e9:.1f} GB")
    assert max(seconds.values()) < 60 and most < 8e9

"""Starts from FP8 weights on a GPU: dequantized as on a CPU, and exact in the masters of every optimizer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.quantized import forms
from fp8_suite.te_models.spec import ModelSpec, find_model, weight_source
from fp8_suite.te_models.weights import fill_named, load_te

from tests.fp8_checkpoints import (
    assert_exact_masters,
    compressed,
    fine_grained,
    modelopt,
    power_of_two,
    save_fp8,
)
from tests.gpu.models import DEVICE
from tests.gpu.test_run import SMALL, losses, train
from tests.training.parallel.jobs import curve

pytestmark = pytest.mark.gpu
E8M0 = torch.float8_e8m0fnu
FORMS = {
    "block": (fine_grained(), torch.float32),
    "block-e8m0": (fine_grained(), E8M0),
    "channel": (compressed("channel"), torch.bfloat16),
    "modelopt": (modelopt(), torch.float32),
}


def find(folder: Path, backend: str | None = None, **changes) -> ModelSpec:
    return replace(find_model(str(folder), init="auto", use_te=backend is not None), **changes)


def build(spec: ModelSpec, backend: str | None, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    options = {"dtype": dtype, "device": device, "packed": True, "max_positions": 256}
    return build_model(spec, BuildOptions(te_backend=backend, **options))


@pytest.mark.parametrize("backend", ["native", None], ids=["te", "hf"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_a_cpu(form, backend, tmp_path):
    fields, scale = FORMS[form]
    save_fp8(tmp_path, fields, model="tiny-qwen3", scale=scale, files=2)
    source = weight_source(find(tmp_path), seed=0, device=torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = dict(export_tensors(build(find(tmp_path, backend), backend, DEVICE, dtype)))
        assert tensors.keys() == source.shapes().keys()
        assert all(torch.equal(t.cpu(), source.get(name).to(dtype)) for name, t in tensors.items())


@pytest.mark.parametrize(
    "flags",
    [
        *(
            f"--use_te --mixed_precision fp8 --fp8_scenario {name}"
            for name in ("delayed", "current", "block")
        ),
        "--use_te --mixed_precision fp8 --fp8_scenario current --offload_optimizer --fp8_weights",
        "--no_use_te --mixed_precision bf16",
        "--no_use_te --mixed_precision fp8 --fp8_scenario tensorwise",
        "--no_use_te --mixed_precision bf16 --offload_optimizer --moment_dtype fp8",
    ],
)
def test_masters_of_a_run_are_exact(flags, tmp_path):
    """A learning rate this small changes no bit, of zeros either."""
    save_fp8(tmp_path / "model", fine_grained())
    start = f"{SMALL.replace('--use_te', '')} --model_name {tmp_path}/model --tokenizer_name demo {flags}"
    train(tmp_path / "run", f"{start} --max_steps 1 --save_interval 1 --learning_rate 1e-300 --no_export")
    assert_exact_masters(tmp_path / "run", tmp_path / "model", use_te="--no_use_te" not in flags)
    environment = json.loads((tmp_path / "run" / "env.json").read_text())
    assert environment["dequantized_weights"] == "21 tensors (fp8)"
    train(tmp_path / "trained", f"{start} --no_save_checkpoints")
    assert losses(tmp_path / "trained")[12] < losses(tmp_path / "trained")[1]


def test_dithered_weights_round_to_the_checkpoints_values(tmp_path):
    tensors = save_fp8(tmp_path, fine_grained(), scale=E8M0, rule=power_of_two)
    source = weight_source(find(tmp_path, dithers=True), seed=0, device=DEVICE)
    for key in source.fp8:
        values, _ = forms.quantize_blocks(source.get(key).bfloat16().float())
        assert torch.equal(values.cpu().float(), tensors[key].float()), key


def test_a_run_from_dithered_weights_starts_with_the_checkpoints_loss(tmp_path):
    save_fp8(tmp_path / "model", fine_grained(), rule=power_of_two)
    flags = f"{SMALL} --model_name {tmp_path}/model --tokenizer_name demo --no_export --no_save_checkpoints"
    flags = f"{flags} --mixed_precision fp8 --fp8_scenario block --eval_at_start --eval_split test"
    assert ", dithered" in train(tmp_path / "run", f"{flags} --max_steps 1")
    assert ", dithered" not in train(tmp_path / "exact", f"{flags} --max_steps 0")
    start, exact = (curve(tmp_path / name, "eval/loss")[0] for name in ("run", "exact"))
    assert start == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("backend", ["native", None], ids=["te", "hf"])
def test_loading_does_not_wait_for_the_gpu(backend, tmp_path):
    save_fp8(tmp_path, fine_grained(), scale=E8M0, rule=power_of_two)
    spec = find(tmp_path, backend, dithers=True)
    model = build(spec, backend, DEVICE, torch.bfloat16)
    expected = {name: tensor.clone() for name, tensor in export_tensors(model)}
    source, parameters = weight_source(spec, seed=0, device=DEVICE), list(model.parameters())
    assert all(tensor.is_cuda for tensor in (*parameters, *model.buffers()))
    torch._foreach_zero_([p.detach() for p in parameters])
    torch.cuda.set_sync_debug_mode("error")
    try:
        load_te(model, source) if backend else fill_named(dict(model.model.named_parameters()), source)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(expected[name], tensor) for name, tensor in export_tensors(model))

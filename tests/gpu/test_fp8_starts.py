"""Starts from FP8 weights on a GPU: dequantized as on a CPU, and exact in the masters of every optimizer."""

import json
from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import find_model, weight_source
from fp8_suite.te_models.weights import fill_named, load_te

from tests.fp8_checkpoints import assert_exact_masters, compressed, fine_grained, modelopt, save_fp8
from tests.gpu.models import DEVICE
from tests.gpu.test_run import SMALL, losses, train

pytestmark = pytest.mark.gpu
E8M0 = torch.float8_e8m0fnu
FORMS = {
    "block": (fine_grained(), torch.float32),
    "block-e8m0": (fine_grained(), E8M0),
    "channel": (compressed("channel"), torch.bfloat16),
    "modelopt": (modelopt(), torch.float32),
}


def build(folder: Path, backend: str | None, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    options = {"dtype": dtype, "device": device, "packed": True, "max_positions": 256}
    spec = find_model(str(folder), init="auto", use_te=backend is not None)
    return build_model(spec, BuildOptions(te_backend=backend, **options))


@pytest.mark.parametrize("backend", ["native", None], ids=["te", "hf"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_a_cpu(form, backend, tmp_path):
    fields, scale = FORMS[form]
    save_fp8(tmp_path, fields, model="tiny-qwen3", scale=scale, files=2)
    source = weight_source(
        find_model(str(tmp_path), init="auto", use_te=False), seed=0, device=torch.device("cpu")
    )
    for dtype in (torch.float32, torch.bfloat16):
        tensors = dict(export_tensors(build(tmp_path, backend, DEVICE, dtype)))
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


@pytest.mark.parametrize("backend", ["native", None], ids=["te", "hf"])
def test_loading_does_not_wait_for_the_gpu(backend, tmp_path):
    save_fp8(tmp_path, fine_grained(), scale=torch.bfloat16)
    spec = find_model(str(tmp_path), init="auto", use_te=backend is not None)
    model = build(tmp_path, backend, DEVICE, torch.bfloat16)
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

"""FP8 with torchao on GPUs: kernels, packed attention, compiled layers, sharding."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from fp8_suite.core.recipes import TORCHAO_RECIPES
from fp8_suite.te_models.kernels.packed_attention import why_no_kernel
from fp8_suite.training.precision import torchao_fp8
from fp8_suite.training.precision.coverage import coverage
from fp8_suite.training.run import main

from tests.gpu.models import DEVICE, batch, build, spec
from tests.gpu.test_multi_gpu import launch, logged

ROWS = [[100, 60, 96], [256], [31, 200]]  # 256 tokens each; the last row is padded
# Calls of _scaled_mm per linear layer and step; the last recipe computes weight gradients in BF16.
FP8_GEMMS = {"tensorwise": 3, "rowwise": 3, "rowwise_with_gw_hp": 2}


def convert(recipe: str):
    return lambda model: torchao_fp8.convert(model, lambda name: recipe, emulated=False)


def step(model, inputs) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**inputs).loss / (inputs["labels"] != -100).sum()
    loss.backward()
    grads = {name: p.grad.float().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


def worst(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(((grads[n] - g).norm() / g.norm()).item() for n, g in reference.items())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
def test_a_recipe_runs_fp8_kernels_and_is_close_to_bf16(recipe):
    inputs = batch([[100, 156]] * 8, packed=True)
    model = build(spec(), use_te=False, packed=True, convert=convert(recipe))
    reference, reference_grads = step(build(spec(), use_te=False, packed=True), inputs)
    step(model, inputs)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        loss, grads = step(model, inputs)
        torch.cuda.synchronize()
    ran = [e for e in profile.events() if e.name == "aten::_scaled_mm" and e.device_time_total > 0]
    error = worst(grads, reference_grads)
    assert len(ran) == FP8_GEMMS[recipe] * 4 * 7
    assert abs(loss - reference) / reference < 0.01 and error < 0.35
    table = coverage(model)
    head = next(row for row in table.rows if row.modules.endswith("lm_head"))
    assert table.fp8_modules == 4 * 7 and head.precision == "bf16"
    assert table.fp8_gemm_share == pytest.approx((1 - head.gemm_share) * FP8_GEMMS[recipe] / 3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # head sizes 64, 64, 128; all grouped
def test_the_flash_kernel_matches_a_block_diagonal_mask(family):
    inputs = batch(ROWS, packed=True)
    model = build(spec(family=family), use_te=False, packed=True)
    assert model.attention == "packed_causal"
    assert why_no_kernel(torch.empty(1, 64, device=DEVICE, dtype=torch.bfloat16)) is None
    loss, grads = step(model, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, inputs)
        torch.cuda.synchronize()
    kernels = {e.name for e in profile.events() if "flash" in e.name.lower() or "fmha" in e.name.lower()}
    assert kernels
    model.model.set_attn_implementation("sdpa")
    model.attention_fallback = "the mask, for comparison"
    masked_loss, masked_grads = step(model, inputs)
    assert loss == pytest.approx(masked_loss, rel=1e-3)
    assert worst(grads, masked_grads) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_share_a_graph_and_compute_the_same(recompute):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {"convert": convert("tensorwise"), "recompute": "layer" if recompute else "none"}
    eager = build(spec(), use_te=False, packed=True, **options)
    compiled = build(spec(), use_te=False, packed=True, compile_layers=True, **options)
    for rows in ([[100, 156]] * 4, [[50, 50, 156]] * 4, [[10, 46, 100, 100]] * 4):
        inputs = batch(rows, packed=True)
        (reference, reference_grads), (loss, grads) = step(eager, inputs), step(compiled, inputs)
        error = worst(grads, reference_grads)
        assert loss == pytest.approx(reference, rel=5e-3) and error < 0.3
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()


SMALL = (
    "--num_of_samples 400 --max_seq_length 256 --eval_samples 20 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --log_interval 1 --eval_interval 5 --save_interval 0 --model_name tiny-qwen3"
)


@pytest.mark.gpu
def test_a_whole_run_compiled_is_close_to_bf16(tmp_path):
    runs = {"fp8": "--mixed_precision fp8", "bf16": "--mixed_precision bf16 --no_compile"}
    losses = {}
    for name, options in runs.items():
        flags = f"{SMALL} {options} --max_steps 12 --batch_size 8 --output_dir {tmp_path / name}"
        assert main(shlex.split(flags), description="test", start=lambda cfg: DEVICE) == 0
        losses[name] = logged(tmp_path / name, "train/loss")
    environment = json.loads((tmp_path / "fp8" / "env.json").read_text())
    assert (environment["recipe"], environment["emulated"]) == ("tensorwise", False)
    assert environment["attention_backend"] == "packed_causal"
    assert environment["coverage"]["fp8_modules"] == 21
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=2e-2)


GPUS = min(4, torch.cuda.device_count())
MODES = {
    "ddp": "ddp",
    "fsdp": "fsdp_full",
    "gathered": "fsdp_full --fp8_all_gather",
    "kept": "fsdp_grad --fp8_all_gather --gradient_checkpointing",
    "rowwise": "fsdp_full --fp8_scenario rowwise",
    "zero": "ds_zero2",
}


@pytest.mark.multi_gpu
def test_many_gpus_have_the_losses_of_one(tmp_path: Path):
    """Layers are compiled except under DeepSpeed; FP8 and BF16 all-gather have the same losses."""
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    flags = f"{SMALL} --mixed_precision fp8 --max_steps 12 --no_export"
    (tmp_path / "one").mkdir()
    launch(tmp_path / "one", {"single": f"{flags} --batch_size {2 * GPUS}"}, 1)
    launch(tmp_path, {n: f"{flags} --batch_size 2 --sharding_mode {m}" for n, m in MODES.items()}, GPUS)
    expected = logged(tmp_path / "one" / "single", "train/loss")
    for name in MODES:
        actual = logged(tmp_path / name, "train/loss")
        gaps = [abs(actual[step] - expected[step]) / expected[step] for step in expected]
        print(f"{name}: largest loss gap {max(gaps):.1e}")
        assert gaps[0] < 3e-3 and max(gaps) < 2e-2, name
        environment = json.loads((tmp_path / name / "env.json").read_text())
        assert environment["coverage"]["fp8_modules"] == 21

"""FP8 tensor statistics of Transformer Engine's and torchao's layers on a GPU."""

import json
from pathlib import Path

import pytest
import torch
from fp8_suite.te_models.emulation.casts import Quantized
from fp8_suite.training.precision.fp8_counts import cast_counts
from fp8_suite.training.precision.fp8_inspect import read_cast
from fp8_suite.training.precision.recipes import why_not

from tests.gpu.test_run import SMALL, losses, train

pytestmark = pytest.mark.gpu
STATISTICS = {"underflow", "overflow", "amax", "scale_min", "scale_max"}
LARGEST = {"activation": 448.0, "weight": 448.0, "gradient": 57344.0}
FLAGS = f"{SMALL} --mixed_precision fp8 --no_export --no_save_checkpoints --max_steps 6"


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """FP8 statistics by step, for the steps that have them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if name.startswith("fp8/")}
        for line in lines
        if any(name.startswith("fp8/") for name in line)
    }


def check_shares(statistics: dict[str, float]) -> None:
    for name, value in statistics.items():
        if name.endswith(("/underflow", "/overflow")):
            assert 0 <= value < 0.5, name
        else:
            assert 0 < value < float("inf"), name


def check_current_scaling(statistics: dict[str, float], module: str) -> None:
    """Check that each scale maps the amax to the format's maximum."""
    for tensor, largest in LARGEST.items():
        shares = {k.rpartition("/")[2]: v for k, v in statistics.items() if f"{module}/{tensor}/" in k}
        assert shares["scale_min"] * shares["amax"] == pytest.approx(largest, rel=1e-3), tensor
        assert shares["scale_max"] >= shares["scale_min"]


def test_cast_statistics_match_the_cpus_without_a_sync():
    original = torch.randn(9000, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    original *= torch.linspace(1e-6, 10, len(original))[:, None].bfloat16()
    scale_inv = torch.rand(9000, 32, generator=torch.Generator().manual_seed(1)) / 100
    for block, scales in ((None, torch.tensor([0.01])), ((1, 128), scale_inv), ((128, 128), scale_inv[:71])):
        data = (original * 100.0).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        on_gpu = original.cuda(), Quantized(data.cuda(), scales.cuda(), block)
        cast_counts(*on_gpu)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            counts = cast_counts(*on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 200e6
        expected = cast_counts(original, Quantized(data, scales, block))
        assert counts.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def quantizers() -> dict[str, tuple]:
    """TE's quantizers by name, each with its recipe and constructor."""
    pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.pytorch import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    both = {"rowwise": True, "columnwise": True}
    return {
        "current": (
            "current",
            lambda: Float8CurrentScalingQuantizer(DType.kFloat8E5M2, torch.device("cuda"), **both),
        ),
        "tiles": ("block", lambda: Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2, **both)),
        "rows": ("block", lambda: Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=1, **both)),
        "mx": ("mxfp8", lambda: MXFP8Quantizer(DType.kFloat8E4M3, **both)),
    }


@pytest.mark.parametrize("name", ["current", "tiles", "rows", "mx"])
def test_statistics_of_quantized_tensors_match_tes_own_dequantization(name):
    recipe, make = quantizers()[name]
    if reason := why_not(recipe):
        pytest.skip(reason)
    x = torch.randn(3, 96, 416, device="cuda", dtype=torch.bfloat16)  # sizes are not multiples of 128
    x *= torch.linspace(1e-3, 10, 416, device="cuda").bfloat16()
    quantized = make()(x)
    expected = quantized.dequantize(dtype=torch.float32).reshape(-1, 416)
    torch.testing.assert_close(read_cast(quantized).dequantize(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(expected, x.reshape(-1, 416).float(), rtol=0.13, atol=0.01)


def test_te_statistics_are_logged_and_do_not_change_training(tmp_path):
    pytest.importorskip("nvdlfw_inspect")
    rest = "delayed" if why_not("block") else "block"
    maps = f"--precision_map layers.0=bf16,layers.1.*.proj=current,layers.1.layernorm_mlp={rest}"
    train(tmp_path / "watched", f"{FLAGS} {maps} --fp8_stats_interval 2")
    train(tmp_path / "plain", f"{FLAGS} {maps}")
    by_step = logged(tmp_path / "watched")
    assert sorted(by_step) == [2, 4, 6]
    modules = {name.split("/")[1] for name in by_step[6]}
    parts = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    assert modules == {f"layers.{layer}.{part}" for layer in (1, 2) for part in parts}
    for statistics in by_step.values():
        check_shares(statistics)
        check_current_scaling(statistics, "layers.1.self_attention.proj")
        tensors = {tuple(name.split("/")[1:3]) for name in statistics}
        assert len(tensors) == len(modules) * 3 and len(statistics) == len(tensors) * len(STATISTICS)
        assert {name.rpartition("/")[2] for name in statistics} == STATISTICS
        assert all(statistics[f"fp8/layers.1.self_attention.proj/{t}/overflow"] == 0 for t in LARGEST)
    # With statistics, TE does not fuse norm and cast, so such a step differs in its last bits.
    watched, plain = losses(tmp_path / "watched"), losses(tmp_path / "plain")
    assert watched[1] == plain[1]
    assert all(watched[step] == pytest.approx(plain[step], rel=0.01) for step in plain)
    logs = list((tmp_path / "watched").rglob("*statistics*"))
    assert not logs, "the numbers belong to metrics.jsonl alone"


def test_te_statistics_with_recomputation_and_micro_batches(tmp_path):
    pytest.importorskip("nvdlfw_inspect")
    flags = "--gradient_checkpointing --gradient_accumulation_steps 2"
    train(tmp_path / "run", f"{FLAGS} --fp8_scenario current --fp8_stats_interval 3 --max_steps 3 {flags}")
    by_step = logged(tmp_path / "run")
    assert sorted(by_step) == [3]
    check_shares(by_step[3])
    check_current_scaling(by_step[3], "layers.1.self_attention.proj")


def test_torchao_statistics_require_uncompiled_layers(tmp_path):
    pytest.importorskip("torchao")
    flags = f"{FLAGS.replace('--use_te', '')} --fp8_stats_interval 2 --max_steps 2"
    assert "add --no_compile" in train(tmp_path / "compiled", flags, code=2)
    train(tmp_path / "run", f"{flags} --no_compile")
    by_step = logged(tmp_path / "run")
    assert sorted(by_step) == [2]
    check_shares(by_step[2])
    check_current_scaling(by_step[2], "layers.1.self_attn.o_proj")

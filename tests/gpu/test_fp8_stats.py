"""FP8 tensor statistics of Transformer Engine's own layers, and of torchao's, on a GPU."""

import json
from pathlib import Path

import pytest

from tests.gpu.test_run import SMALL, losses, train
from training.precision import why_not

pytestmark = pytest.mark.gpu
LARGEST = {"activation": 448.0, "weight": 448.0, "gradient": 57344.0}
FLAGS = f"{SMALL} --mixed_precision fp8 --no_export --no_save_checkpoints --max_steps 6"


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """The FP8 statistics of each step that has them; other lines of the step stand by themselves."""
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


def check_scales_of_the_largest_value(statistics: dict[str, float], module: str) -> None:
    """Current scaling: the largest value becomes the format's largest."""
    for tensor, largest in LARGEST.items():
        own = {k.rpartition("/")[2]: v for k, v in statistics.items() if f"{module}/{tensor}/" in k}
        assert own["scale_min"] * own["amax"] == pytest.approx(largest, rel=1e-3), tensor
        assert own["scale_max"] >= own["scale_min"]


def test_te_s_statistics_are_logged_and_change_nothing(tmp_path):
    pytest.importorskip("nvdlfw_inspect")
    rest = "delayed" if why_not("block") else "block"
    maps = f"--precision_map layers.0=bf16,layers.1.*.proj=current,layers.1.layernorm_mlp={rest}"
    train(tmp_path / "watched", f"{FLAGS} {maps} --fp8_stats_interval 2")
    train(tmp_path / "plain", f"{FLAGS} {maps}")
    found = logged(tmp_path / "watched")
    assert sorted(found) == [2, 4, 6]
    modules = {name.split("/")[1] for name in found[6]}
    parts = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    assert modules == {f"layers.{layer}.{part}" for layer in (1, 2) for part in parts}
    for statistics in found.values():
        check_shares(statistics)
        check_scales_of_the_largest_value(statistics, "layers.1.self_attention.proj")
        tensors = {tuple(name.split("/")[1:3]) for name in statistics}
        assert len(tensors) == len(modules) * 3
        with_overflow = {name.split("/")[1] for name in statistics if name.endswith("/overflow")}
        assert {f"layers.2.{part}" for part in parts} <= with_overflow  # delayed scaling
        assert "layers.1.self_attention.proj" not in with_overflow
    # TE computes norm and cast apart where it watches, so that a watched step differs in its last bits.
    watched, plain = losses(tmp_path / "watched"), losses(tmp_path / "plain")
    assert watched[1] == plain[1]
    assert all(watched[step] == pytest.approx(plain[step], rel=0.01) for step in plain)
    logs = list((tmp_path / "watched").rglob("*statistics*"))
    assert not logs, "the numbers belong to metrics.jsonl alone"


def test_te_s_statistics_with_recomputation_and_micro_batches(tmp_path):
    pytest.importorskip("nvdlfw_inspect")
    flags = "--gradient_checkpointing --gradient_accumulation_steps 2"
    train(tmp_path / "run", f"{FLAGS} --fp8_scenario current --fp8_stats_interval 3 --max_steps 3 {flags}")
    found = logged(tmp_path / "run")
    assert sorted(found) == [3]
    check_shares(found[3])
    check_scales_of_the_largest_value(found[3], "layers.1.self_attention.proj")


def test_torchao_s_statistics_need_layers_that_are_not_compiled(tmp_path):
    pytest.importorskip("torchao")
    flags = f"{FLAGS.replace('--use_te', '')} --fp8_stats_interval 2 --max_steps 2"
    assert "add --no_compile" in train(tmp_path / "compiled", flags, code=2)
    train(tmp_path / "run", f"{flags} --no_compile")
    found = logged(tmp_path / "run")
    assert sorted(found) == [2]
    check_shares(found[2])
    check_scales_of_the_largest_value(found[2], "layers.1.self_attn.o_proj")

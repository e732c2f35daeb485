"""Whole runs on a GPU with Transformer Engine, as subprocesses of the command line."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fp8_suite.core.recipes import TE_RECIPES
from fp8_suite.training.precision.recipes import why_not
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--use_te --num_of_samples 200 --max_seq_length 256 --batch_size 4 --eval_samples 20 --num_workers 0 "
    "--num_proc 1 --learning_rate 1e-3 --log_interval 1 --eval_interval 5 --save_interval 6 --max_steps 12 "
    "--deterministic"
)
LONG = 40  # steps; enough that a signal arrives before the run ends


def start(folder: Path, flags: str, *, without_gpu: bool = False) -> subprocess.Popen:
    command = [sys.executable, "train_fp8.py", *shlex.split(flags), "--output_dir", str(folder)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if without_gpu else {})
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def train(folder: Path, flags: str, *, code: int = 0, without_gpu: bool = False) -> str:
    process = start(folder, flags, without_gpu=without_gpu)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoints" / f"step_{LONG:06}").glob("*.safetensors"))
    return {k: t for f in files for k, t in load_file(f).items()}


def test_saves_by_time_come_late_where_no_step_is_logged_and_change_no_losses(tmp_path):
    """Step 2 is the first that begins 6 ms after training did; its flags are read after step 3."""
    flags = f"{SMALL} --mixed_precision bf16 --no_export --eval_interval 0 --log_interval 100 --keep_last 20"
    for name, interval in (("plain", "0"), ("timed", "0.0001m")):
        train(tmp_path / name, f"{flags} --save_interval {interval}")
    steps = {int(path.name[5:]) for path in (tmp_path / "timed/checkpoints").glob("step_*")}
    assert min(steps) >= 3 and max(steps) == 12 and len(steps) > 2
    assert losses(tmp_path / "timed") == losses(tmp_path / "plain")


def test_a_memory_limit_is_kept(tmp_path):
    large = "--batch_size 64 --max_seq_length 1024 --memory_limit_gb"
    assert "out of memory" in train(tmp_path / "small", f"{SMALL} {large} 0.2", code=3)
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    output = train(tmp_path / "large", f"{SMALL} {large} {total + 1:.0f}", code=2)
    assert f"the GPU has {total:.1f} GB; give less" in output


@pytest.mark.parametrize(
    "precision",
    [
        "bf16",
        "fp8 --fp8_scenario delayed",
        "fp8 --fp8_scenario current",
        "fp8 --moment_dtype bf16 --gradient_accumulation_steps 3",
        "fp8 --moment_dtype fp8,fp16",
        "fp8 --batch_ramp '1Ki:0 2Ki:4Ki 4Ki:16Ki'",
    ],
)
def test_a_stopped_and_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, precision):
    flags = f"{SMALL} --mixed_precision {precision} --max_steps {LONG}"
    uninterrupted, stopped = tmp_path / "whole", tmp_path / "stopped"
    output = train(uninterrupted, flags)
    assert ("FP8 ran in 9 modules" in output) == precision.startswith("fp8")
    process = start(stopped, flags)
    while process.poll() is None:
        if (stopped / "metrics.jsonl").exists() and len(losses(stopped)) >= 3:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.01)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert 3 <= max(losses(stopped)) < LONG
    train(stopped, flags)
    assert losses(stopped) == losses(uninterrupted)
    expected, actual = checkpoint(uninterrupted), checkpoint(stopped)
    assert expected.keys() == actual.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, actual[name])]
    assert not different
    delayed = precision.startswith("fp8") and "current" not in precision
    assert any(name.startswith("fp8/") for name in expected) == delayed


def test_the_export_has_the_runs_evaluation_loss_on_a_cpu(tmp_path):
    small = f"{SMALL} --eval_split test"
    train(tmp_path / "run", f"{small} --mixed_precision fp8 --fp8_scenario current")
    flags = small.replace("--use_te", "").replace("--max_steps 12", "--max_steps 0")
    train(tmp_path / "scored", f"{flags} --model_name {tmp_path}/run/export", without_gpu=True)
    ran, scored = (json.loads((tmp_path / f / "summary.json").read_text()) for f in ("run", "scored"))
    assert scored["eval_loss"] == pytest.approx(ran["eval_loss"], rel=5e-3)
    assert ran["mfu_bf16"] > 0 and ran["mfu_fp8"] > 0 and ran["peak_memory_gb"] > 0
    by_kind = ran["wall_seconds_by_kind"]
    assert sum(by_kind.values()) == pytest.approx(ran["runtime_seconds"])
    assert by_kind["steps"] + by_kind["data"] > 0.9 * ran["train_seconds"], "saving has no queued step's work"


def test_mxfp8_on_hopper_falls_back_with_a_warning_or_stops(tmp_path):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU runs MXFP8")
    flags = f"{SMALL} --mixed_precision fp8 --fp8_scenario mxfp8 --max_steps 1 --no_export"
    output = train(tmp_path / "run", flags)
    assert "WARNING: --fp8_scenario mxfp8 cannot run here" in output
    for name in ("env.json", "summary.json"):
        record = json.loads((tmp_path / "run" / name).read_text())
        assert (record["requested_recipe"], record["recipe"]) == ("mxfp8", "delayed")
    output = train(tmp_path / "error", f"{flags} --fp8_fallback error", code=1)
    assert "This machine runs: delayed, current, block" in output and "Traceback" not in output


@pytest.mark.parametrize("options", ["", "--no_deterministic --compile"], ids=["eager", "compiled"])
def test_hugging_face_model_on_a_gpu_has_master_weights(tmp_path, options):
    flags = SMALL.replace("--use_te", "")
    output = train(tmp_path / "run", f"{flags} --mixed_precision bf16 --no_export {options}")
    assert "fused AdamW, BF16 weights with FP32 masters" in output
    curve = losses(tmp_path / "run")
    assert curve[12] < 0.8 * curve[1]


@pytest.mark.parametrize("packing", ["packing", "no_packing"])
def test_the_first_step_of_every_recipe_is_close_to_bf16(tmp_path, packing):
    """Compare loss and gradient norm; without calibration, gradients underflow in delayed scaling."""
    flags = f"{SMALL} --max_steps 2 --no_export --no_save_checkpoints --{packing}"

    def first(name, precision):
        train(tmp_path / name, f"{flags} --mixed_precision {precision}")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return next(line for line in map(json.loads, lines) if "train/loss" in line)

    reference = first("bf16", "bf16")
    for name in TE_RECIPES:
        if why_not(name):
            continue
        row = first(name, f"fp8 --fp8_scenario {name}")
        assert row["train/loss"] == pytest.approx(reference["train/loss"], rel=0.01), name
        assert row["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=0.05), name

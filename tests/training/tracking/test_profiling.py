"""GPU time by kind of kernel, with times added up by hand, and the choice of profiled steps."""

import json
import shlex
import time
from unittest.mock import Mock

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.training.observers import Observers
from fp8_suite.training.run import main
from fp8_suite.training.tracking import profiling
from fp8_suite.training.tracking.meter import Meter
from fp8_suite.training.tracking.profiling import IDLE, KernelLaunch, breakdown, kind_of, profiled_steps

NAMES = {  # several kinds' words are in these
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128": "attention",
    "void transformer_engine::normalization::rmsnorm_bwd_tuned_kernel<>": "norm",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<>>": "gradient norm",
    "something_new": "other",
}


def test_kernels_are_classified_by_name():
    assert {name: kind_of(name) for name in NAMES} == NAMES


def test_times_add_up_by_kind_and_gaps_are_idle():
    kernels = [
        KernelLaunch("nvjet_a", 0, 4000),
        KernelLaunch("adamw_kernel", 3000, 5000),  # overlaps by 1 ms
        KernelLaunch("nvjet_b", 7000, 8000),  # 2 ms after everything ended
        KernelLaunch("cast", 7200, 7400),  # inside another
        KernelLaunch("nvjet_a", 8000, 10000),
    ]
    profile = breakdown(reversed(kernels), steps=2)
    assert profile["step_ms"] == 5.0
    times = {kind: of["ms"] for kind, of in profile["kinds"].items()}
    assert times == {"GEMM": 3.5, "optimizer": 1.0, "cast": 0.1, IDLE: 1.0}
    assert profile["kinds"]["GEMM"]["launches"] == 1.5
    assert profile["kernels"][0] == {"name": "nvjet_a", "kind": "GEMM", "ms": 3.0}


@pytest.mark.parametrize(
    ("count", "done", "total", "steps"),
    [
        (3, 0, 40, [9, 10, 11]),
        (3, 0, 10, [8, 9, 10]),
        (3, 0, 4, [2, 3, 4]),
        (3, 10, 13, [12, 13]),  # never the first step of a launch
        (3, 0, 1, []),
    ],
)
def test_warm_steps_are_profiled(count, done, total, steps):
    assert list(profiled_steps(count, done=done, total=total)) == steps


def test_profiling_without_a_gpu_is_refused():
    profiling.check(0, torch.device("cpu"))
    with pytest.raises(UserError, match=r"^--profile_steps 2: times GPU kernels, and this run is on cpu"):
        profiling.check(2, torch.device("cpu"))


def test_profiled_steps_do_not_count_in_rates(monkeypatch):
    """A step takes 1 s, writing the profile 10,000 s. Steps 3 and 4 are profiled, every second is logged."""
    now = 0.0

    def finish() -> list[str]:
        nonlocal now
        now += 10_000
        return []

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    meter, assembly = Meter(None, world_size=1, peaks={}), Mock()
    assembly.fp8_stats.after_step.return_value = {}
    profiler, logs = Mock(steps=range(3, 5), finish=finish), Mock(meter=meter)
    observers = Observers(Mock(), None, assembly, logs, environment={}, wall_time=None, profiler=profiler)
    observers.first_step_done = True
    batch = Mock(padded_tokens=9, sum_squared_lengths=9)
    batch.real_tokens = batch.label_tokens = 8
    for step in range(1, 7):
        observers.before_step(step)
        now += 1
        meter.end_step([batch], waited=0.0)
        observers.after_step(step)
        if step % 2 == 0:
            assert meter.read(lambda counts: counts, lambda times: times, warm=True)["perf/step_seconds"] == 1
    assert profiler.start.call_count == 1
    assert [rates["perf/tokens_per_second"] for rates in meter.rates] == [8, 8]


@pytest.mark.gpu
def test_a_run_on_a_gpu_writes_its_kernel_times(tmp_path, capsys):
    flags = (
        "--mixed_precision bf16 --no_compile --log_interval 8 --max_steps 24 --profile_steps 3 "
        "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --num_workers 0 --num_proc 1 "
        f"--eval_samples 0 --no_save_checkpoints --no_export --output_dir {tmp_path / 'run'}"
    )
    assert main(shlex.split(flags), description="test", start=lambda cfg: torch.device("cuda")) == 0
    assert "GPU time of a step, mean of 3:" in capsys.readouterr().out
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    # 7 GEMMs a layer and the LM head's, forward and twice backward, of 3 layers.
    assert profile["steps"] == 3 and profile["kinds"]["GEMM"]["launches"] >= 3 * 3 * 7 + 3
    busy = sum(of["ms"] for kind, of in profile["kinds"].items() if kind != IDLE)
    assert busy + profile["kinds"][IDLE]["ms"] >= profile["step_ms"] * 0.999
    assert json.loads((tmp_path / "run" / "profile_trace.json").read_text())["traceEvents"]

"""benchmarks.throughput: a real run on a CPU, the schedule of intervals, and what is refused."""

import shlex

import pytest
from fp8_suite.benchmarks import throughput
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.throughput import main
from fp8_suite.training.tracking import profiling


def test_synthetic_rows_are_full_and_flops_follow_the_formula(tmp_path, capsys):
    flags = "--model_name tiny-llama --max_seq_length 72 --batch_size 2 --gradient_accumulation_steps 2"
    flags += f" --num_workers 0 --num_proc 1 --steps 16 --output_dir {tmp_path}"
    assert main(shlex.split(flags)) == 0
    printed = capsys.readouterr()
    assert "| run-1 " in printed.out and (tmp_path / "report.html").exists()
    assert "no speed is reported" in printed.err
    run = read_run(tmp_path / "run-1")
    assert (run.value("steps"), run.logged("train/epoch")[-1]) == (16, (16, 1.0)), "no row is seen twice"
    layer = 2 * 256 * 4 * 64 + 2 * 256 * 2 * 64 + 3 * 256 * 512  # q and o, k and v, the MLP
    per_token = 6 * (3 * layer + 256 * 2048) + 6 * 3 * 4 * 64 * 72
    rate = run.summary["tokens_per_second"]
    assert rate == run.summary["padded_tokens_per_second"] > 0
    assert run.summary["model_tflops_per_gpu"] * 1e12 == pytest.approx(rate * per_token, rel=1e-9)


@pytest.mark.parametrize(
    ("accumulation", "length", "profile", "expected"),
    [
        *[(1, 8192, False, (8, 0, 8)), (1, 8192, True, (8, 3, 16)), (2, 8192, True, (4, 1, 12))],
        *[(3, 8192, False, (2, 0, 6)), (1, 131_072, False, (1, 0, 2)), (16, 8192, False, (1, 0, 2))],
    ],
)
def test_an_interval_has_eight_micro_batches_or_one_long_step(accumulation, length, profile, expected):
    assert throughput.schedule(accumulation, profile, accumulation * length) == expected
    assert profiling.profiled_steps(3, done=0, total=40)[0] == throughput.PROFILED_FROM


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max_steps 3", "--max_steps 3: python -m benchmarks.throughput sets this"),
        ("--steps 15", "--steps 15: the first 8 steps are not measured; use at least 16"),
    ],
)
def test_measurements_that_cannot_be_are_refused(tmp_path, capsys, flags, message):
    assert main(["--output_dir", str(tmp_path / "out"), *shlex.split(flags)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()

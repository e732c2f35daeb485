"""benchmarks.throughput: records of real runs on a CPU, and of written ones."""

import json
import shlex
from pathlib import Path

import pytest
from fp8_suite.benchmarks import throughput
from fp8_suite.benchmarks.records.launch import Outcome
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.throughput import main, record
from fp8_suite.core.errors import UserError
from fp8_suite.training import trainer
from fp8_suite.training.tracking import profiling

PROFILE = {"steps": 3, "step_ms": 5.0, "kinds": {"GEMM": {"ms": 4.0}}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Folder and records of a run in BF16 with Hugging Face layers."""
    folder = tmp_path_factory.mktemp("throughput")
    flags = "--model_name tiny-llama --max_seq_length 72 --batch_size 2 --gradient_accumulation_steps 2"
    key = "a" * 40
    flags += f" --num_workers 0 --num_proc 1 --wandb_run_name {key} --commit {key.replace('a', 'b')}"
    own = f"--steps 16 --results {folder}/new/records.jsonl --output_dir {folder}"
    assert main(shlex.split(f"{flags} {own}")) == 0
    return folder, [json.loads(line) for line in (folder / "new/records.jsonl").read_text().splitlines()]


def test_a_run_is_a_record(measured):
    folder, records = measured
    expected = {
        **{"model_name": "tiny-llama", "num_layers": 3, "max_seq_length": 72, "batch_size": 2, "gpus": 1},
        **{"gradient_accumulation_steps": 2, "mixed_precision": "bf16", "recipe": "bf16", "use_te": False},
        **{"packing": True, "sharding_mode": "single", "moment_dtype": "fp32", "master_weights": "fp32"},
        **{"gpu_name": None, "mfu_bf16": None, "steps": 16, "dataset": "synthetic", "repeats": 1},
    }
    for found in records:
        assert found | expected | {"repeat": 1} == found
        assert found["seconds_to_first_step"] > 0 and 0 < found["data_wait_share"] < 1
        assert found["versions"]["torch"] and found["date"].startswith("20") and "commit" in found
        assert found["command"].startswith("python -m benchmarks.throughput --model_name tiny-llama")
        assert "b" * 40 in found["command"] and "a" * 40 not in found["command"], "a commit, and no key"
    last = json.loads((folder / "run-1/metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["train/epoch"]) == (16, 1.0), "no synthetic row is seen twice"


def test_every_synthetic_row_is_full_and_flops_follow_the_formula(measured):
    layer = 2 * 256 * 4 * 64 + 2 * 256 * 2 * 64 + 3 * 256 * 512  # q and o, k and v, the MLP
    per_token = 6 * (3 * layer + 256 * 2048) + 6 * 3 * 4 * 64 * 72
    for found in measured[1]:
        rate = found["tokens_per_second_per_gpu"]
        assert rate == found["padded_tokens_per_second_per_gpu"] == found["useful_tokens_per_second"] > 0
        assert found["model_tflops_per_gpu"] * 1e12 == pytest.approx(rate * per_token, rel=1e-9)


def test_intervals_and_rows_follow_from_the_global_batch(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(throughput, "launch", lambda cfg, **_: started.append(cfg) or Outcome(9, tmp_path))
    monkeypatch.setattr(throughput, "write_text", lambda path, **sizes: started.append(sizes))
    flags = f"--batch_size 2 --global_batch_size 32 --gpus 2 --results {tmp_path}/records.jsonl"
    assert main(shlex.split(flags)) == 9
    sizes, cfg = started
    assert (cfg.log.log_interval, cfg.optim.gradient_accumulation_steps) == (1, None)
    assert sizes["rows"] == 32 * cfg.optim.max_steps


@pytest.mark.parametrize(
    ("accumulation", "profile", "expected"),
    [(1, False, (8, 0, 8)), (1, True, (8, 3, 16)), (2, True, (4, 1, 12)), (3, False, (2, 0, 6))],
)
def test_an_interval_has_eight_micro_batches(accumulation, profile, expected):
    assert throughput.schedule(accumulation, profile) == expected
    assert throughput.WARMUP == trainer.WARMUP_STEPS, "as in a run"
    assert profiling.profiled_steps(3, done=0, total=40)[0] == throughput.PROFILED_FROM


def written(folder: Path, **changes) -> Path:
    """A finished run on four GPUs."""
    config = {name: 1 for name in throughput.CONFIG} | {"moment_dtype": "bf16", "profile_steps": 3}
    environment = {"git": None, "python": "3.12", "cuda": "13.0", "versions": {"torch": "2.11.0"}}
    summary = {
        "emulated": False,
        "world_size": 4,
        "tokens_per_second": 1e3,
        "padded_tokens_per_second": 1.6e3,
    }
    files = {
        "config": config,
        "env": environment,
        "summary": summary | changes,
        "profile": PROFILE | {"kernels": []},
    }
    folder.mkdir(exist_ok=True)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_a_record_is_per_gpu_and_has_the_profile_by_kind(tmp_path):
    found = record(read_run(written(tmp_path)), "abc")
    assert (found["tokens_per_second_per_gpu"], found["padded_tokens_per_second_per_gpu"]) == (250.0, 400.0)
    assert found["useful_tokens_per_second"] == 1000.0 and found["profile"] == PROFILE
    assert (found["commit"], found["moment_dtype"]) == ("abc", "bf16")
    assert found["versions"] == {"torch": "2.11.0", "python": "3.12", "cuda": "13.0"}
    with pytest.raises(UserError, match="emulated"):
        record(read_run(written(tmp_path, emulated=True)), None)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--max_steps 3", 2, "--max_steps 3: python -m benchmarks.throughput sets this"),
        ("--steps 15", 2, "--steps 15: the first 8 steps are not measured; use at least 16"),
        ("--steps 23 --profile", 2, "use at least 24"),
        ("--batch_siz 3", 2, "unknown flag --batch_siz; did you mean '--batch_size'"),
        ("--stteps 30", 2, "unknown flag --stteps; did you mean '--steps'"),
        ("--gpus 0", 2, "--gpus 0: must be at least 1"),
        ("--repeats 0", 2, "--repeats 0: must be at least 1"),
        ("--model_name tiny-lama", 2, "did you mean 'tiny-llama'?"),
        ("--tokenizer_name other", 2, "--tokenizer_name other: synthetic text needs the demo"),
        ("--results /dev/null/x", 2, "exists: '/dev/null'"),
        ("--use_te --te_backend emulated", 1, "--te_backend emulated, or --use_te"),
        ("--mixed_precision fp8", 1, "without a CUDA GPU: the run would be emulated"),
    ],
)
def test_measurements_that_cannot_be_are_refused(tmp_path, capsys, monkeypatch, flags, code, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--results", str(tmp_path / "records.jsonl"), *shlex.split(flags)]) == code
    assert message in capsys.readouterr().err and not (tmp_path / "records.jsonl").exists()


def test_repeats_end_with_the_exit_code_of_the_first_that_fails(tmp_path, monkeypatch):
    def launch(cfg, *, gpus, log):
        folder = Path(cfg.checkpoint.output_dir)
        return Outcome(0 if folder.name == "run-1" else 7, written(folder), "it broke")

    monkeypatch.setattr(throughput, "launch", launch)
    results = tmp_path / "records.jsonl"
    assert main(shlex.split(f"--steps 16 --repeats 3 --output_dir {tmp_path} --results {results}")) == 7
    (found,) = map(json.loads, results.read_text().splitlines())
    assert (found["repeat"], found["repeats"], found["mfu_bf16"]) == (1, 3, None)

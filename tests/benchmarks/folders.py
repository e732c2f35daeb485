"""Run folders as training writes them, for tests of reports and comparisons; runs in this process."""

import io
import json
import math
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from fp8_suite.benchmarks.launch.process import Outcome, to_flags
from fp8_suite.benchmarks.records.runs import RunRecord, read_run
from fp8_suite.core.errors import EXIT_INTERRUPTED
from fp8_suite.core.files import to_json
from fp8_suite.training import run
from fp8_suite.training.config import Config

ENVIRONMENT = {
    "gpu_name": "NVIDIA H200",
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.11.0", "transformer_engine": "2.20.2", "transformers": None},
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
    "requested_recipe": "mxfp8",
    "recipe": "delayed",
    "fallback_reason": "needs compute capability 10.0",
}
SUMMARY = {
    "model_name": "org/some | model",
    "mixed_precision": "fp8",
    "use_te": True,
    **{name: ENVIRONMENT[name] for name in ("requested_recipe", "recipe", "fallback_reason", "gpu_name")},
    "steps": 1200,
    "train_loss": 1.23456,
    "train_loss_tail_mean": 1.3,
    "eval_loss": 1.5,
    "eval_perplexity": 4.4817,
    "eval_token_accuracy": 0.61234,
    "tokens_per_second": 14376.4,
    "model_tflops_per_gpu": 739.94,
    "mfu_bf16": 0.7482,
    "mfu_fp8": 0.3739,
    "goodput": 0.9312,
    "peak_memory_gb": 91.26,
    "gpu_hours": 2.456,
    "gpus": 2,
    "world_size": 2,
    "sharding_mode": "fsdp_full",
}
COVERAGE = {
    "rows": [
        {"modules": "layers.*.proj", "count": 2, "precision": "fp8 delayed", "gemm_share": 0.75, "note": ""},
        {"modules": "layers.*.attention", "count": 2, "precision": "bf16", "gemm_share": 0.0, "note": ""},
        {"modules": "lm_head", "count": 1, "precision": "bf16", "gemm_share": 0.25, "note": ""},
    ]
}


def append(folder: Path, **record: Any) -> None:
    """Log one more line."""
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(to_json(record) + b"\n")


def write_run(
    folder: Path,
    *,
    losses: Sequence[float] = (),
    summary: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a run with a loss every 10 steps, an evaluation of half that loss every 20, and growing speed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(Config().to_dict() | settings))
    (folder / "env.json").write_text(json.dumps(environment or {}))
    (folder / "metrics.jsonl").write_bytes(b"")
    for i, loss in enumerate(losses, 1):
        rates = {"perf/tokens_per_second": 100.0 * i, "perf/peak_memory_gb": 10.0 - i}
        append(folder, step=10 * i, **{"train/loss": loss}, **rates)
        if i % 2 == 0:
            rate = {"eval/loss": loss / 2, "eval/perplexity": math.exp(loss / 2)}
            append(folder, step=10 * i, **rate)
    if summary:
        (folder / "summary.json").write_bytes(to_json(summary))
    return folder


def trained(folder: Path, losses: Sequence[float], recipe: str = "bf16", **settings: Any) -> RunRecord:
    """Return a finished one-GPU run of a recipe."""
    values = {"recipe": recipe, "mixed_precision": "bf16" if recipe == "bf16" else "fp8"}
    summary = SUMMARY | values | {"gpus": 1, "world_size": 1}
    return read_run(write_run(folder, losses=losses, summary=summary, **settings))


def rated(folder: Path, gpus: int, rate: float, **settings: Any) -> RunRecord:
    """Return a finished run of `rate` tokens/s on `gpus` GPUs; `recipe` is its recipe."""
    recipe = settings.pop("recipe", "delayed")
    values = {"gpus": gpus, "world_size": gpus, "tokens_per_second": rate, "recipe": recipe}
    return read_run(write_run(folder, summary=SUMMARY | values, environment=ENVIRONMENT, **settings))


def launch_here(cfg: Config, *, gpus: int, log: Path) -> Outcome:
    """Run as `launch` does, but in this process, which has imported everything."""
    printed = io.StringIO()
    with redirect_stderr(printed):
        code = run.main(to_flags(cfg), description="test", start=lambda cfg: torch.device("cpu"))
    if code == EXIT_INTERRUPTED:
        name = Path(cfg.checkpoint.output_dir).name
        raise KeyboardInterrupt(f"interrupted in {name}; run the same command to resume")
    errors = [line.removeprefix("error: ") for line in printed.getvalue().splitlines() if "error: " in line]
    return Outcome(code, Path(cfg.checkpoint.output_dir), *errors[-1:])

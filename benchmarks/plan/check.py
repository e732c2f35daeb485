"""Recorded runs beside what the plan predicts for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.plan.job import Job, build_job, read_model
from benchmarks.plan.memory import peak
from benchmarks.plan.time import GPUS, step_seconds
from benchmarks.records.runs import BEFORE
from benchmarks.report.markdown import table
from training.config import ALSO_CALLED, Config, all_settings, config_from_dict

# Folders of `benchmarks/results` whose runs are compared.
GROUPS = ("calibration", "h200", "h200-fused-adamw", "h200-flash-attention", "h200-models")
GROUPS += ("h200-profile", "h200-memory", "h200-compare/1b", "h200-recipes", "h200-multi")
GROUPS += ("h200-modes", "h200-eight", "h200-root-gather", "fsdp_finetuning")
GROUPS += ("thousand_steps/te", "thousand_steps/hf")
RESULTS = Path(__file__).resolve().parents[1] / "results"
# A model of the recorded runs that is no preset: Llama 3.1 70B cut to 20 layers.
CUT_MODELS = {"llama-70b-20-layers": ("meta-llama/Llama-3.1-70B", {"num_hidden_layers": 20})}
RENAMED = {older: name for name, older in ALSO_CALLED.items()}  # as older runs have them
# Date of the first recorded run whose LM head holds one chunk of logits at a time.
ONE_CHUNK_SINCE = "2026-11-21T21:00"
# Of the first after which no gradients of delayed scaling's calibration stay in ZeRO 1 and 2.
CALIBRATION_FREED_SINCE = "2026-11-22T15:45"
# And of the first whose ZeRO 1 keeps no gradients beside their sums over micro-batches.
SUMMED_AT_ONCE_SINCE = "2026-11-22T17:30"
# Whose speed says nothing, by a pattern of the folder's name, and why (benchmarks/results/README.md).
UNTIMED = {
    "calibration/*": "logged without waiting for the optimizer",
    "h200-multi/gsm-4gpu-ddp*": "ran beside others",
    "h200-multi/qwen14b-*": "ran beside others",
    "h200-modes/Llama-3.2-1B-2gpu-fsdp_offload": "one thread stepped the optimizer",
    "h200-modes/Llama-3.2-1B-2gpu-ds_zero3_offload": "one thread stepped the optimizer",
    "h200-modes/Meta-Llama-3.1-8B-2gpu-ds_zero3": "fell from interval to interval",
    "h200-modes/same-*": "ran beside others",
    "h200-modes/*-accumulation-freed": "ran beside others",
    "h200-eight/1b-8gpu-*": "an epoch ended, with a smaller step, among the few steps that were timed",
    "thousand_steps/*": "ran beside others",
}
UNPLANNED = {
    "1b-deterministic": "attention ran unfused",
    "1b-export": "evaluation only",
    "emulated": "plans are for TE's own layers",
    "1B-padded": "padded to the longest row of each batch; plans are for full ones",
    "-before": "gradients of micro-batches added up otherwise",
    "fp32-traffic": "a path that was switched off by hand",
}


@dataclass(frozen=True)
class Check:
    """A recorded run: measured and predicted peak in GB and step time in seconds (None: not comparable)."""

    name: str
    memory: tuple[float, float]
    seconds: tuple[float, float] | None

    @staticmethod
    def error(pair: tuple[float, float]) -> float:
        measured, predicted = pair
        return predicted / measured - 1


def _read(folder: Path, file: str) -> dict[str, Any]:
    return json.loads((folder / file).read_text(encoding="utf-8"))


def recorded_job(folder: Path) -> Job:
    """The job of a recorded run, with what its code did, older perhaps, as env.json says."""
    stored, environment, summary = (_read(folder, f"{n}.json") for n in ("config", "env", "summary"))
    known = all_settings()
    settings = BEFORE | {RENAMED.get(k, k): v for k, v in stored.items() if RENAMED.get(k, k) in known}
    cfg: Config = config_from_dict(settings)
    gpus = summary.get("world_size", 1)
    mode = summary.get("sharding_mode", "single")
    name, changes = CUT_MODELS.get(cfg.model.model_name, (cfg.model.model_name, {}))
    job = build_job(cfg, read_model(name, **changes), mode=mode, gpus=gpus, gpus_per_node=gpus)
    slow_adam = not environment.get("optimizer", "TE FusedAdam").startswith("fused AdamW")
    return replace(job, slow_adam=slow_adam, two_chunks=environment["date"] < ONE_CHUNK_SINCE)


def kept_by_older_code(job: Job, date: str) -> float:
    """Bytes of a recorded run's peak memory that were gradients which nothing had a use for any more."""
    if job.zero == 1 and job.accumulation > 1:
        return 2.0 * job.model.parameters * (date < SUMMED_AT_ONCE_SINCE)
    calibrated = job.zero in (1, 2) and job.recipe == "delayed" and job.accumulation == 1
    return 2 * job.model.parameters / job.gpus * (calibrated and date < CALIBRATION_FREED_SINCE)


def held_before(folder: Path) -> float:
    """GB of a recorded run's peak memory that earlier runs of its process had left."""
    known = folder.parent / "held_before_gb.json"
    return _read(folder.parent, known.name).get(folder.name, 0.0) if known.exists() else 0.0


def check_runs(results: Path = RESULTS) -> tuple[list[Check], list[str]]:
    """Every finished run under `results`, and a line for each that is left out, with the reason."""
    checks, left_out = [], []
    found = [path.parent for group in GROUPS for path in sorted((results / group).glob("*/config.json"))]
    if not found:
        raise ValueError(f"--check {results}: holds none of the folders {', '.join(GROUPS)} with run folders")
    for folder in found:
        name = folder.relative_to(results).as_posix()
        reason = next((why for part, why in UNPLANNED.items() if part in name), None)
        finished = (folder / "summary.json").exists()
        environment = _read(folder, "env.json") if finished else {}
        if not finished:
            reason = reason or "did not finish"
        elif environment.get("gpu_name") != "NVIDIA H200":
            reason = reason or "on no H200"
        if reason:
            left_out.append(f"{name}: {reason}")
            continue
        job = recorded_job(folder)
        summary = _read(folder, "summary.json")
        seconds = None
        if not any(fnmatch(name, pattern) for pattern in UNTIMED) and summary.get("tokens_per_second"):
            tokens = job.tokens * job.accumulation * job.gpus
            predicted = sum(step_seconds(job, GPUS["H200"]).values())
            seconds = (tokens / summary["tokens_per_second"], predicted)
        memory = sum(peak(job).values()) / 1e9
        memory += kept_by_older_code(job, environment["date"]) / 1e9
        measured = summary["peak_memory_gb"] - held_before(folder)
        checks.append(Check(name, (measured, memory), seconds))
    return checks, left_out


def check_table(checks: list[Check], left_out: list[str]) -> str:
    """A Markdown table of prediction beside measurement, and what was left out of it."""
    headings = ["run", "peak GB, measured", "predicted", "error", "step ms, measured", "predicted", "error"]
    rows = []
    for check in checks:
        cells = [
            check.name,
            f"{check.memory[0]:.1f}",
            f"{check.memory[1]:.1f}",
            f"{Check.error(check.memory):+.1%}",
        ]
        if check.seconds:
            cells += [f"{1e3 * value:.1f}" for value in check.seconds]
            cells += [f"{Check.error(check.seconds):+.1%}"]
        else:
            cells += ["-"] * 3
        rows.append(cells)
    return "\n".join([table(headings, rows), "", "Left out:", "", *(f"- {line}" for line in left_out)])

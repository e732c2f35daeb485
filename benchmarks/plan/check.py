"""Compare the planner's predictions with recorded runs, and with published ones on more GPUs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fp8_suite.benchmarks.plan.inputs import size_run
from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.records.table import read_table
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.gpus import PLANNED, Gpu, planned_gpu
from fp8_suite.core.readers import read_yaml
from fp8_suite.training.config import all_settings, config_from_dict
from fp8_suite.training.estimate.memory import peak
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.parallel.settings import MODES

Pair = tuple[float, float]  # (measured, predicted)

# Settings of published runs. Recomputation is the least that fits, unless set; attention is cuDNN's.
COMMON = {"use_te": True, "mixed_precision": "bf16", "flash_attention": False, "sharding_mode": "fsdp_grad"}
COMMON |= {"batch_size": 1, "max_seq_length": 8192, "recompute": "auto"}
PUBLISHED: list[dict[str, Any]] = read_yaml(Path(__file__).with_name("published.yaml"))


class Check(NamedTuple):
    """Measured and predicted memory and step time of a run."""

    name: str
    memory: Pair  # peak in GB
    seconds: Pair | None  # per step; None if not comparable


def error(pair: Pair) -> float:
    """Return the relative error of a prediction."""
    measured, predicted = pair
    return predicted / measured - 1


def recorded_setup(run: RunRecord, gpu: Gpu) -> TrainingSetup:
    """Return the setup of a run recorded on this GPU."""
    known = all_settings()
    settings = {name: value for name, value in run.config.items() if name in known}
    if recomputes_as_before(run):
        settings |= {"gradient_checkpointing": False, "recompute": "full"}
    mode = {"sharding_mode": "auto"} if run.mode == "single" else {"sharding_mode": run.mode}
    cfg = config_from_dict(settings | mode)
    return size_run(cfg, gpu=gpu, gpus=run.gpus, gpus_per_node=run.gpus).chosen


def recomputes_as_before(run: RunRecord) -> bool:
    """True for a run that recomputed whole layers, as versions without --recompute did."""
    return bool(run.config.get("gradient_checkpointing")) and "recompute" not in run.config


def why_not(run: RunRecord, gpu: Gpu | None) -> str | None:
    """Return the reason to leave out a recorded run, or None."""
    if run.summary is None:
        return "did not finish"
    if run.mode not in MODES:
        return "in a mode that this version no longer has"
    if gpu is None:
        return "not on a GPU that the planner knows"
    return run.remarks.get("plan") or run.remarks.get("older_code")


def check_runs() -> tuple[list[Check], dict[str, list[str]]]:
    """Return the checks of all comparable runs, and the names of the runs left out by reason."""
    checks, left_out = [], {}
    for run in read_table():
        name, seconds = run.folder.as_posix(), None
        gpu = planned_gpu(run.environment.get("gpu_name") or "CPU")
        if reason := why_not(run, gpu):
            left_out.setdefault(reason, []).append(name)
            continue
        setup = recorded_setup(run, gpu)
        comparable = "speed" not in run.remarks and not (recomputes_as_before(run) and run.config["use_te"])
        if comparable and (rate := run.value("tokens_per_second")):
            predicted = sum(step_seconds(setup, gpu).values())
            seconds = (setup.step_tokens / rate, predicted)
        measured = run.summary["peak_memory_gb"] - run.remarks.get("held_before_gb", 0.0)
        checks.append(Check(name, (measured, sum(peak(setup).values()) / 1e9), seconds))
    return checks, left_out


def check_table(checks: list[Check], left_out: dict[str, list[str]]) -> str:
    """Return the output of --check: a table of the checks, the runs left out, and the errors by study."""
    headings = ["run", "peak GB, measured", "predicted", "error", "step ms, measured", "predicted", "error"]
    rows = [[check.name, *_cells(check.memory, 1), *_cells(check.seconds, 1e3)] for check in checks]
    reasons = [f"- {reason}: {', '.join(names)}" for reason, names in left_out.items()]
    runs = [markdown(headings, rows), "Left out:", "\n".join(reasons)]
    return "\n\n".join([*runs, published_table(), summary_table(checks)])


def _cells(pair: Pair | None, scale: float) -> list[str]:
    if pair is None:
        return ["-"] * 3
    return [*(f"{scale * value:.1f}" for value in pair), f"{error(pair):+.1%}"]


def plan_published(run: dict[str, Any]) -> Plan:
    """Predict a run of PUBLISHED."""
    settings = {name: value for name, value in run.items() if name not in ("name", "gpus", "tflops")}
    return make_plan(config_from_dict(COMMON | settings), PLANNED["H100"], gpus=run["gpus"])


def published_table() -> str:
    """Return a table of published and predicted TFLOP/s per GPU."""
    headings = ["published run", "H100", "CP x TP x PP (stages per rank)", "TFLOP/s", "predicted", "error"]
    rows = []
    for run in PUBLISHED:
        plan = plan_published(run)
        layout = plan.setup.layout
        sizes = f"{layout.cp} x {layout.tp} x {layout.pp} ({layout.virtual})"
        rates = f"{run['tflops']:.0f}", f"{plan.tflops:.0f}", f"{error((run['tflops'], plan.tflops)):+.1%}"
        rows.append([run["name"], f"{run['gpus']:,}", sizes, *rates])
    return markdown(headings, rows)


def summary_table(checks: list[Check]) -> str:
    """Return a table with the median and the largest errors of each study."""
    studies: dict[str, list[Check]] = {}
    for check in checks:
        studies.setdefault(check.name.rpartition("/")[0], []).append(check)
    headings = ["study", "runs", "peak: median error", "worst", "timed runs", "step: median error", "worst"]
    rows = []
    for study, checked in studies.items():
        timed = [error(check.seconds) for check in checked if check.seconds]
        peaks = [error(check.memory) for check in checked]
        rows.append([study, str(len(peaks)), *_extremes(peaks), str(len(timed)), *_extremes(timed)])
    return markdown(headings, rows)


def _extremes(errors: list[float]) -> tuple[str, str]:
    if not errors:
        return "-", "-"
    return f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"

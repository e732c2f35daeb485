"""Compare the planner's predictions with published runs on more GPUs than any recorded run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.gpus import PLANNED
from fp8_suite.core.readers import read_yaml
from fp8_suite.training.config import config_from_dict

# Unless set, recomputation is the least that fits; attention is cuDNN's.
COMMON = {"use_te": True, "mixed_precision": "bf16", "flash_attention": False, "sharding_mode": "fsdp_grad"}
COMMON |= {"batch_size": 1, "max_seq_length": 8192, "recompute": "auto"}
PUBLISHED: list[dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))


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
        rates = f"{run['tflops']:.0f}", f"{plan.tflops:.0f}", f"{plan.tflops / run['tflops'] - 1:+.1%}"
        rows.append([run["name"], f"{run['gpus']:,}", sizes, *rates])
    return markdown(headings, rows)

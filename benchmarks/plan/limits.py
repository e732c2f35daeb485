"""Find the smallest GPU for a job, and the largest preset and the longest sequence for its GPU."""

from __future__ import annotations

from typing import Any

from fp8_suite.benchmarks.plan.job import read_model
from fp8_suite.benchmarks.plan.predict import Plan, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.errors import UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.sizes import global_batch

# Sizes by which cards with FP8 are known, and one card of each size.
CARDS = {24: "RTX 4090", 32: "RTX 5090", 48: "L40S", 80: "H100", 141: "H200", 180: "B200"}
STEP = 1024  # the longest sequence is a multiple of this many tokens


def limits_table(plans: list[Plan]) -> str:
    """Return a table of the three limits by number of GPUs; other settings stay as they are."""
    rows = [[f"{p.job.gpus:,}", smallest_card(p), _largest_preset(p), _longest_sequence(p)] for p in plans]
    return markdown(["GPUs", "smallest GPU", "largest preset", "longest sequence, micro-batch of one"], rows)


def _fitting(plan: Plan, changes: dict[str, Any], memory_gb: float | None = None) -> Plan | None:
    """Return the plan with other settings or memory; None if it is refused."""
    gpu = plan.gpu._replace(memory_gb=memory_gb or plan.gpu.memory_gb)
    try:
        cfg = config_from_dict(plan.sizing.requested.cfg.to_dict() | changes)
        other = make_plan(cfg, gpu, gpus=plan.job.gpus, gpus_per_node=plan.job.gpus_per_node)
    except UserError:
        return None
    return other if other.fits and not other.refusal else None


def smallest_card(plan: Plan) -> str:
    for size, card in CARDS.items():
        if _fitting(plan, {"memory_limit_gb": None}, GPUS[card].memory_gb):
            return f"{size} GB"
    return f"above {max(CARDS)} GB"


def _largest_preset(plan: Plan) -> str:
    sizes = {name: read_model(name).size.parameters for name in PRESETS if name not in LOCAL_PRESETS}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if _fitting(plan, {"model_name": name}):
            return name
    return "none"


def _longest_sequence(plan: Plan) -> str:
    total = global_batch(plan.job.cfg.optim, plan.job.gpus)
    one = {"batch_size": 1, "gradient_accumulation_steps": None, "global_batch_size": total}

    def fits(steps: int) -> bool:
        return _fitting(plan, one | {"max_seq_length": steps * STEP}) is not None

    low, high = 0, (read_model(plan.job.cfg.model.model_name).positions or 2**20) // STEP
    if high and fits(high):
        return f"{high * STEP:,}, the model's limit"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return f"{low * STEP:,}" if low else f"below {STEP:,}"

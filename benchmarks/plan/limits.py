"""Find the smallest GPU for a run, and the largest preset and the longest sequence for its GPU."""

from __future__ import annotations

from bisect import bisect_left

from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.benchmarks.plan.predict import Plan, changed_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.gpus import PLANNED
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS
from fp8_suite.training.estimate.sizes import global_batch

STEP = 1024  # the longest sequence is a multiple of this many tokens


def limits_table(plans: list[Plan]) -> str:
    """Return a table of the three limits by number of GPUs; other settings stay as they are."""
    rows = [[f"{p.setup.gpus:,}", smallest_card(p), _largest_preset(p), _longest_sequence(p)] for p in plans]
    return markdown(["GPUs", "smallest GPU", "largest preset", "longest sequence"], rows)


def smallest_card(plan: Plan) -> str:
    """Return the size of the smallest card with FP8 whose memory is enough."""
    cards = sorted((gpu for gpu in PLANNED.values() if gpu.fp8_tflops), key=lambda gpu: gpu.memory_gb)
    for card in cards:
        gpu = plan.sizing.gpu._replace(memory_gb=card.memory_gb)
        if changed_plan(plan, {"memory_limit_gb": None}, gpu):
            return f"{card.card_gb} GB"
    return f"above {cards[-1].card_gb} GB"


def _largest_preset(plan: Plan) -> str:
    sizes = {name: read_model(name).size.parameters for name in PRESETS if name not in LOCAL_PRESETS}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if changed_plan(plan, {"model_name": name}):
            return name
    return "none"


def _longest_sequence(plan: Plan) -> str:
    """Return the longest sequence with as many sequences per step, in micro-batches of any size."""
    total = global_batch(plan.setup.cfg, plan.setup.data_ranks)
    batch = {"batch_size": AUTO, "gradient_accumulation_steps": None, "global_batch_size": total}
    batch |= {"batch_ramp": None}

    def is_too_long(length: int) -> bool:
        return changed_plan(plan, batch | {"max_seq_length": length}) is None

    limit = read_model(plan.setup.cfg.model.model_name).positions or 2**20
    lengths = range(STEP, limit + 1, STEP)
    fitting = bisect_left(lengths, True, key=is_too_long)
    if not fitting:
        return f"below {STEP:,}"
    return f"{lengths[fitting - 1]:,}" + ", the model's limit" * (fitting == len(lengths))

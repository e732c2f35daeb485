"""Rows of a verdict: loss gap, quality, speed and cost of each variant relative to its baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.records.runs import RunRecord, tail_mean
from benchmarks.report import gaps
from benchmarks.report.tables import Columns, metric_columns, provenance
from training.tracking.metrics import summary_name

FEW_LOSSES = 100
QUALITY = ("eval/loss", "eval/perplexity", "eval/token_accuracy")
COSTS = (
    *("perf/tokens_per_second", "perf/model_tflops_per_gpu", "perf/mfu_bf16", "perf/mfu_fp8"),
    "perf/peak_memory_gb",
)
Pair = tuple[RunRecord, RunRecord]  # (run, its baseline)


@dataclass(frozen=True)
class Row:
    """Verdict on one variant. Gaps are in percent; missing values are None."""

    variant: str
    status: str  # REFERENCE, PASS, FAIL, SKIPPED
    against: str | None = None
    reason: str | None = None
    values: dict[str, float | None] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        return self.values.get(name)


COLUMNS: Columns = {
    "variant": (lambda row: row.variant, "{}"),
    "verdict": (lambda row: row.status, "{}"),
    "against": (lambda row: row.against, "{}"),
    "train loss, mean of last 10 %": ("tail_loss", "{:.4f}"),
    "gap": ("gap", "{:+.2f} %"),
    "lowest gap": ("gap_low", "{:+.2f} %"),
    "highest gap": ("gap_high", "{:+.2f} %"),
    "eval loss": ("eval_loss", "{:.4f}"),
    "eval gap": ("eval_gap", "{:+.2f} %"),
    **metric_columns(*QUALITY[1:], COSTS[0]),
    "speed": ("speedup", "{:.2f}x"),
    **metric_columns(*COSTS[1:]),
    "GPU-hours": ("gpu_hours", "{:.3f}"),
    "cost": ("cost", "{:,.2f}"),
}


def judge(
    variant: str, pairs: Sequence[Pair], *, against: str, max_loss_gap: float, price: float | None
) -> Row:
    """Return a variant's row: PASS if its tail loss is at most `max_loss_gap` percent above the baseline's.

    `pairs` has (run, baseline) for every seed, the main seed first; gaps are means over the seeds. `price` is
    per GPU-hour.
    """
    run, baseline = pairs[0]
    values = measure(run, price)
    found = [gaps.tail_gap(*pair) for pair in pairs]
    if None not in found:
        values["gap"] = 100 * fmean(found)
        if len(pairs) > 1:
            values |= {"gap_low": 100 * min(found), "gap_high": 100 * max(found)}
    evaluations = [[each.value("eval_loss") for each in pair] for pair in pairs]
    if all(ours is not None and theirs for ours, theirs in evaluations):
        values["eval_gap"] = 100 * (fmean(ours / theirs for ours, theirs in evaluations) - 1)
    rates = [values["tokens_per_second"], measure(baseline, price)["tokens_per_second"]]
    values["speedup"] = rates[0] / rates[1] if all(rates) else None
    reason = _why_fail(pairs, against, values.get("gap"), max_loss_gap)
    return Row(variant, "FAIL" if reason else "PASS", against, reason, values)


def measure(run: RunRecord, price: float | None) -> dict[str, float | None]:
    """Return the values of a row that need no baseline; speed, memory and cost only of runs on real GPUs."""
    real = bool(run.gpus) and not run.emulated
    hours = run.value("gpu_hours") if real else None
    losses = [loss for _, loss in run.series("train/loss")]
    return {
        "tail_loss": tail_mean(losses) if losses else None,
        **{name: run.value(name) for name in map(summary_name, QUALITY)},
        **{name: run.value(name) if real else None for name in map(summary_name, COSTS)},
        "gpu_hours": hours,
        "cost": None if hours is None or price is None else hours * price,
    }


def _why_fail(pairs: Sequence[Pair], against: str, gap: float | None, max_loss_gap: float) -> str | None:
    evaluated = [loss for run, _ in pairs if (loss := run.value("eval_loss")) is not None]
    if not all(gaps.ends_finite(baseline) for _, baseline in pairs):
        return f"the training loss of its baseline {against} does not end finite"
    if not all(gaps.ends_finite(run) for run, _ in pairs):
        return "its training loss does not end finite"
    if gap is None:
        return f"it has no step in common with {against}, or a baseline of 0"
    if not all(map(math.isfinite, evaluated)):
        return "its evaluation loss is not finite"
    if gap > max_loss_gap:
        mean = f", on the mean of {len(pairs)} seeds," if len(pairs) > 1 else ""
        return f"its loss is{mean} {gap:.2f} % above {against}'s, more than --max_loss_gap {max_loss_gap:g} %"
    return None


def caveats(
    runs: dict[str, RunRecord], seeds: list[RunRecord], band: tuple[float, float] | None
) -> list[str]:
    """Return notes on `runs` (by variant, the reference first) and on their noise `band` in percent."""
    notes, reference = [], next(iter(runs.values()))
    if emulated := [name for name, run in runs.items() if run.emulated]:
        notes.append(
            f"EMULATED: {', '.join(emulated)}. TE layers or FP8 GEMMs were computed in plain PyTorch: losses "
            "are meaningful; speed, memory and hours are not and are left out."
        )
    if band:
        numbers = ", ".join(str(run.config["seed"]) for run in (reference, *seeds))
        notes.append(
            f"BF16's noise over seeds {numbers}: {band[0]:+.2f} % to {band[1]:+.2f} % of {reference.name}'s "
            "loss. A gap inside that band is no larger than the effect of another seed."
        )
    else:
        notes.append("No noise band: BF16 ended with one seed only, so a gap may be chance.")
    count = len(reference.series("train/loss"))
    if count < FEW_LOSSES:
        notes.append(f"Only {count} losses were logged: the last 10 % are {max(1, count // 10)}.")
    epochs = [epoch for _, epoch in reference.series("train/epoch")]
    if epochs and epochs[-1] > 1:
        notes.append(
            f"The runs saw their data {epochs[-1]:.1f} times. From the second pass on the training loss also "
            "measures memorisation, where precisions differ more: compare the evaluation."
        )
    if gaps.initial_loss(reference) is None:
        notes.append("No evaluation before the first step: only the settings show that weights are equal.")
    machines = sorted({provenance(run, date=False) for run in [*runs.values(), *seeds]})
    warning = "MACHINES OR VERSIONS DIFFER, so compare speeds with care: "
    notes.append(f"{warning if len(machines) > 1 else 'All runs: '}{'; '.join(machines)}.")
    skipped = {name: run.value("skipped_steps") for name, run in runs.items()}
    return notes + [
        f"{name} skipped {n} steps (loss or gradient not finite)." for name, n in skipped.items() if n
    ]

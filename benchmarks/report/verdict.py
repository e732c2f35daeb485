"""Verdict on a precision: which runs are comparable, how far apart their losses are, PASS or FAIL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.records.runs import RunRecord, tail_mean
from benchmarks.report import gaps
from benchmarks.report.tables import provenance
from training.tracking.metrics import METRICS, summary_name

SPLIT = ("batch_size", "gradient_accumulation_steps")  # runs may split their global batch differently
WEIGHTS = ("model_name", "init", "tokenizer_name", "seed")
# Another seed changes these too, by data order and held-out part.
BY_SEED = {"--seed", "steps", "label_tokens", "eval_label_tokens"}
FEW_LOSSES = 100
MAX_LOSS_GAP = 0.5  # percent, default of --max_loss_gap

# Largest relative difference of two evaluations of equal weights before the first step: same layers and
# precision, and others (FP8 stays within 0.03 % on a 1B; tiny models round more).
SAME_PRECISION, OTHER_PRECISION = 1e-3, 1e-2


def _must_match(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return what two comparable runs share, by the word that an error uses."""

    def settings(names: Sequence[str]) -> dict[str, Any]:
        return {f"--{name}": run.setting(name) for name in names}

    def others(section: str) -> list[str]:
        apart = {"deterministic", *SPLIT, *WEIGHTS}
        return [name for name in gaps.settings_of(section) if name not in apart]

    return {
        "data": settings(others("data")),
        "global batch": {"sequences a step": run.global_batch},
        "steps": {"steps": run.value("steps")},
        "tokens": {name: run.value(name) for name in ("label_tokens", "eval_label_tokens")},
        "weights": settings(WEIGHTS),
        "optimizer": settings(others("optim")),
    }


def what_differs(reference: RunRecord, run: RunRecord, *, other_seed: bool = False) -> str | None:
    """Return the differences other than precision that forbid a comparison, or None.

    With `other_seed` the seed and what follows from it may differ.
    """
    differences = []
    there = _must_match(reference)
    for what, here in _must_match(run).items():
        names = [n for n in here if here[n] != there[what][n] and not (other_seed and n in BY_SEED)]
        if names:
            pairs = ", ".join(f"{n} {there[what][n]} there, {here[n]} here" for n in names)
            differences.append(f"{what} ({pairs})")
    if not other_seed:
        differences += _different_samples(reference, run) + _different_weights(reference, run)
    if not differences:
        return None
    return f"{run.name} and {reference.name} cannot be compared, they differ in {'; '.join(differences)}"


def _different_samples(reference: RunRecord, run: RunRecord) -> list[str]:
    parts = [
        f"{part} samples {gaps.fingerprint(reference, part)} there, {gaps.fingerprint(run, part)} here"
        for part in ("train", "eval")
        if gaps.other_samples(run, reference, part)
    ]
    return [f"the data's content ({', '.join(parts)})"] if parts else []


def _initial_loss(run: RunRecord) -> float | None:
    return dict(run.series("eval/loss")).get(0)


def _different_weights(reference: RunRecord, run: RunRecord) -> list[str]:
    there, here = _initial_loss(reference), _initial_loss(run)
    if there is None or here is None:
        return []
    same = all(reference.value(name) == run.value(name) for name in ("use_te", "mixed_precision", "recipe"))
    if abs(here - there) <= (SAME_PRECISION if same else OTHER_PRECISION) * abs(there):
        return []
    return [f"weights (evaluation loss before the first step {there:.5f} there, {here:.5f} here)"]


@dataclass(frozen=True)
class Row:
    """Verdict on one variant; gaps are in percent, missing values None."""

    variant: str
    status: str  # REFERENCE, PASS, FAIL, SKIPPED
    against: str | None = None
    reason: str | None = None
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Verdict on a comparison, as a report shows it."""

    rows: list[Row]
    limit: str  # meaning of PASS
    notes: list[str]
    baselines: dict[Path, RunRecord | None]  # by run folder, see `gaps.comparison`


Pair = tuple[RunRecord, RunRecord]  # (run, its baseline)
QUALITY = ("eval/loss", "eval/perplexity", "eval/token_accuracy")
COSTS = (
    *("perf/tokens_per_second", "perf/model_tflops_per_gpu", "perf/mfu_bf16", "perf/mfu_fp8"),
    "perf/peak_memory_gb",
)


def tail_loss(run: RunRecord) -> float | None:
    """Return the mean of the last 10 % of the logged training losses."""
    losses = [loss for _, loss in run.series("train/loss")]
    return tail_mean(losses) if losses else None


def passes(run: RunRecord) -> float | None:
    """Return how many times a run saw its data; None if it was not recorded."""
    series = run.series("train/epoch")
    return series[-1][1] if series else None


def incomplete(run: RunRecord) -> str | None:
    """Return what is missing of a finished run's losses, or None. The last step is always logged."""
    logged = max((step for step, _ in run.logged("train/loss")), default=0)
    if logged == run.value("steps"):
        return None
    return f"{run.folder / 'metrics.jsonl'}: ends at step {logged} of {run.value('steps')}"


def percent_above(value: float | None, reference: float | None) -> float | None:
    """Return the distance of `value` from `reference` in percent of it."""
    if value is None or not reference:
        return None
    return 100 * (value / reference - 1)


def gap_percent(run: RunRecord, reference: RunRecord) -> float | None:
    """Return the gap of the tail means over common steps, in percent of the reference's."""
    gap = gaps.tail_gap(run, reference)
    return None if gap is None else 100 * gap


def noise_band(reference: RunRecord, seeds: list[RunRecord]) -> tuple[float, float] | None:
    """Return the lowest and highest tail loss of BF16 over its seeds, in percent above the reference's."""
    known = [gap for run in seeds if (gap := gap_percent(run, reference)) is not None]
    return (min(0.0, *known), max(0.0, *known)) if known else None


def judge(
    variant: str,
    pairs: Sequence[Pair],
    *,
    against: str | None,
    max_loss_gap: float,
    price: float | None,
) -> Row:
    """Judge a variant: PASS if its tail loss is at most `max_loss_gap` percent above its baseline's.

    `pairs`: the variant's run and its baseline, then those of other seeds; gaps are means over them. `price`
    is that of a GPU-hour.
    """
    run, baseline = pairs[0]
    values = measured(run, price)
    gap = [gap_percent(*pair) for pair in pairs]
    values["gap"] = _mean(gap)
    if len(pairs) > 1 and None not in gap:
        values |= {"gap_low": min(gap), "gap_high": max(gap)}
    values["eval_gap"] = _mean([percent_above(a.value("eval_loss"), b.value("eval_loss")) for a, b in pairs])
    rates = [values["tokens_per_second"], measured(baseline, price)["tokens_per_second"]]
    values["speedup"] = rates[0] / rates[1] if all(rates) else None
    reason = _why_fail(pairs, against, values["gap"], max_loss_gap)
    return Row(variant, "FAIL" if reason else "PASS", against, reason, values)


def measured(run: RunRecord, price: float | None) -> dict[str, float | None]:
    """Return the values of a row that need no baseline; speed, memory and cost only of runs on real GPUs."""
    real = bool(run.gpus) and not run.emulated
    hours = run.value("gpu_hours") if real else None
    return {
        "tail_loss": tail_loss(run),
        **{name: run.value(name) for name in map(summary_name, QUALITY)},
        **{name: run.value(name) if real else None for name in map(summary_name, COSTS)},
        "gpu_hours": hours,
        "cost": None if hours is None or price is None else hours * price,
    }


def _why_fail(
    pairs: Sequence[Pair], against: str | None, gap: float | None, max_loss_gap: float
) -> str | None:
    evaluated = [loss for run, _ in pairs if (loss := run.value("eval_loss")) is not None]
    if not all(gaps.ends_finite(baseline) for _, baseline in pairs):
        return f"the training loss of its baseline {against} does not end finite"
    if not all(tail_loss(baseline) for _, baseline in pairs):
        return f"the training loss of its baseline {against} ends at 0"
    if gap is None or not all(gaps.ends_finite(run) for run, _ in pairs):
        return "its training loss does not end finite"
    if not all(map(math.isfinite, evaluated)):
        return "its evaluation loss is not finite"
    if gap > max_loss_gap:
        mean = f", on the mean of {len(pairs)} seeds," if len(pairs) > 1 else ""
        return f"its loss is{mean} {gap:.2f} % above {against}'s, more than --max_loss_gap {max_loss_gap:g} %"
    return None


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else fmean(values)


# Heading -> (value, format); a column that no row has a value for is left out.
COLUMNS: dict[str, tuple[str, str]] = {
    "train loss, mean of last 10 %": ("tail_loss", "{:.4f}"),
    "gap": ("gap", "{:+.2f} %"),
    "lowest gap": ("gap_low", "{:+.2f} %"),
    "highest gap": ("gap_high", "{:+.2f} %"),
    "eval loss": ("eval_loss", "{:.4f}"),
    "eval gap": ("eval_gap", "{:+.2f} %"),
    **{METRICS[n].label: (summary_name(n), METRICS[n].format) for n in (*QUALITY[1:], COSTS[0])},
    "speed": ("speedup", "{:.2f}x"),
    **{METRICS[n].label: (summary_name(n), METRICS[n].format) for n in COSTS[1:]},
    "GPU-hours": ("gpu_hours", "{:.3f}"),
    "cost": ("cost", "{:,.2f}"),
}


def cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and a line of text per variant."""
    columns = {h: c for h, c in COLUMNS.items() if any(row.values.get(c[0]) is not None for row in rows)}
    lines = []
    for row in rows:
        found = [(row.values.get(name), form) for name, form in columns.values()]
        text = ["-" if value is None else form.format(value) for value, form in found]
        lines.append([row.variant, row.status, row.against or "-", *text])
    return ["variant", "verdict", "against", *columns], lines


def notes(runs: dict[str, RunRecord], seeds: list[RunRecord], band: tuple[float, float] | None) -> list[str]:
    """Return the caveats of a verdict. `runs` by variant, the reference first."""
    found, reference = [], next(iter(runs.values()))
    if emulated := [name for name, run in runs.items() if run.emulated]:
        found.append(
            f"EMULATED: {', '.join(emulated)}. TE layers or FP8 GEMMs were computed in plain PyTorch: losses "
            "are meaningful; speed, memory and hours are not and are left out."
        )
    if band:
        numbers = ", ".join(str(run.config["seed"]) for run in (reference, *seeds))
        found.append(
            f"BF16's noise over seeds {numbers}: {band[0]:+.2f} % to {band[1]:+.2f} % of {reference.name}'s "
            "loss. A gap inside that band is no larger than the effect of another seed."
        )
    else:
        found.append("No noise band: BF16 ended with one seed only, so a gap may be chance.")
    count = len(reference.series("train/loss"))
    if count < FEW_LOSSES:
        found.append(f"Only {count} losses were logged: the last 10 % are {max(1, count // 10)}.")
    if (passed := passes(reference) or 0) > 1:
        found.append(
            f"The runs saw their data {passed:.1f} times. From the second pass on the training loss also "
            "measures memorisation, where precisions differ more: compare the evaluation."
        )
    if _initial_loss(reference) is None:
        found.append("No evaluation before the first step: only the settings show that weights are equal.")
    machines = sorted({provenance(run, date=False) for run in [*runs.values(), *seeds]})
    if len(machines) > 1:
        found.append("MACHINES OR VERSIONS DIFFER, so compare speeds with care: " + "; ".join(machines))
    else:
        found.append(f"All runs: {machines[0]}.")
    skipped = {name: run.value("skipped_steps") for name, run in runs.items()}
    return found + [
        f"{name} skipped {steps} steps (loss or gradient not finite)."
        for name, steps in skipped.items()
        if steps
    ]

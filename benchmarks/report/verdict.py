"""Is FP8 as good as BF16: which runs may be compared, how far apart they are, PASS or FAIL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.records.runs import RunRecord, provenance, tail_mean
from benchmarks.report import gaps, markdown

# How a global batch is split may differ between runs that are compared.
_SPLIT = ("batch_size", "gradient_accumulation_steps")
_WEIGHTS = ("model_name", "init", "tokenizer_name", "seed")
_OF_THE_SEED = ("seed", "steps", "label_tokens", "eval_label_tokens")  # data order and held-out part
FEW_LOSSES = 100
MAX_LOSS_GAP = 0.5  # percent, unless told otherwise

# Largest relative distance of two evaluations before the first step, if the weights are the same: of the same
# layers in the same precision, and of others (FP8 stays within 0.03 % on a 1B; tiny models round more).
SAME_PRECISION, OTHER_PRECISION = 1e-3, 1e-2


def _of_section(wanted: str) -> list[str]:
    without = {"deterministic", *_SPLIT, *_WEIGHTS}
    return [name for name in gaps.settings_of(wanted) if name not in without]


def _settings(names: list[str]) -> Callable[[RunRecord], dict[str, Any]]:
    return lambda run: {f"--{name}": run.setting(name) for name in names}


def _values(*names: str) -> Callable[[RunRecord], dict[str, Any]]:
    return lambda run: {name: run.value(name) for name in names}


# What two runs must share, by the word that a refusal uses.
MUST_MATCH: dict[str, Callable[[RunRecord], dict[str, Any]]] = {
    "data": _settings(_of_section("data")),
    "global batch": lambda run: {"sequences a step": run.global_batch},
    "steps": _values("steps"),
    "tokens": _values("label_tokens", "eval_label_tokens"),
    "weights": _settings(list(_WEIGHTS)),
    "optimizer": _settings(_of_section("optim")),
}


def what_differs(reference: RunRecord, run: RunRecord, *, other_seed: bool = False) -> str | None:
    """What differs between two runs beside precision; None if nothing does.

    With `other_seed` what follows from the seed may differ too.
    """
    found = []
    for what, read in MUST_MATCH.items():
        here, there = read(run), read(reference)
        different = [n for n in here if here[n] != there[n]]
        if other_seed:
            different = [n for n in different if n.removeprefix("--") not in _OF_THE_SEED]
        if different:
            pairs = ", ".join(f"{n} {there[n]} there, {here[n]} here" for n in different)
            found.append(f"{what} ({pairs})")
    if not other_seed:
        found += filter(None, [_other_samples(reference, run), _initial_difference(reference, run)])
    if not found:
        return None
    return f"{run.name} and {reference.name} cannot be compared, they differ in {'; '.join(found)}"


def _other_samples(reference: RunRecord, run: RunRecord) -> str | None:
    found = [
        f"{part} samples {gaps.fingerprint(reference, part)} there, {gaps.fingerprint(run, part)} here"
        for part in ("train", "eval")
        if gaps.other_samples(run, reference, part)
    ]
    return f"what the data holds ({', '.join(found)})" if found else None


def _initial_loss(run: RunRecord) -> float | None:
    return next((loss for step, loss in run.series("eval/loss") if step == 0), None)


def _initial_difference(reference: RunRecord, run: RunRecord) -> str | None:
    there, here = _initial_loss(reference), _initial_loss(run)
    if there is None or here is None:
        return None
    same = all(reference.value(n) == run.value(n) for n in ("use_te", "mixed_precision", "recipe"))
    tolerance = SAME_PRECISION if same else OTHER_PRECISION
    if abs(here - there) <= tolerance * abs(there):
        return None
    return f"weights (evaluation loss before the first step {there:.5f} there, {here:.5f} here)"


@dataclass(frozen=True)
class Row:
    """One variant's verdict; `values` are those of `VALUES`, gaps in percent, None for what it lacks."""

    variant: str
    status: str  # REFERENCE, PASS, FAIL, SKIPPED
    against: str | None = None
    reason: str | None = None
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a report shows of a comparison: its rows, what PASS means, notes, what runs were held against."""

    rows: list[Row]
    limit: str
    notes: list[str]
    baselines: dict[Path, RunRecord | None]  # by the folder of a run, see `gaps.comparison`


Pair = tuple[RunRecord, RunRecord]  # a run, and what it is held against
VALUES = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
# Of runs whose speed says something of FP8's.
RATES = (
    "tokens_per_second",
    "model_tflops_per_gpu",
    "mfu_bf16",
    "mfu_fp8",
    "peak_memory_gb",
    "gpu_hours",
)


def _says_speed(run: RunRecord) -> bool:
    return bool(run.gpus) and not run.emulated


def tail_loss(run: RunRecord) -> float | None:
    """Mean of the last 10 % of the logged training losses."""
    losses = [loss for _, loss in run.series("train/loss")]
    return tail_mean(losses) if losses else None


def passes(run: RunRecord) -> float | None:
    """How many times a run went over its data; None where it was not recorded."""
    series = run.series("train/epoch")
    return series[-1][1] if series else None


def incomplete(run: RunRecord) -> str | None:
    """What of a finished run's losses is missing; None if nothing is: its last step is always logged."""
    logged = max((record["step"] for record in run.records if "train/loss" in record), default=0)
    if logged == run.value("steps"):
        return None
    return f"{run.folder / 'metrics.jsonl'}: ends at step {logged} of {run.value('steps')}"


def gap_percent(run: RunRecord, reference: RunRecord) -> float | None:
    """How far the tail mean of the steps that both logged lies above the reference's, in percent of it."""
    gap = gaps.tail_gap(run, reference)
    return None if gap is None else 100 * gap


def percent_above(value: float | None, reference: float | None) -> float | None:
    """How far `value` lies above `reference`, in percent of it."""
    if value is None or not reference:
        return None
    return 100 * (value / reference - 1)


def noise_band(reference: RunRecord, seeds: list[RunRecord]) -> tuple[float, float] | None:
    """Lowest and highest tail-mean loss of BF16 over its seeds, in percent above the reference's."""
    found = [gap_percent(run, reference) for run in seeds]
    known = [gap for gap in found if gap is not None]
    return (min(0.0, *known), max(0.0, *known)) if known else None


def judge(
    variant: str,
    run: RunRecord,
    reference: RunRecord | None,
    *,
    max_loss_gap: float,
    price: float | None,
    against: str | None = None,
    pairs: Sequence[Pair] = (),
) -> Row:
    """A variant's row: PASS if its tail-mean loss is at most `max_loss_gap` percent above the reference's.

    `reference` None: it is the reference itself. `price` is that of a GPU-hour. `pairs`: runs of the variant
    with other seeds, and their references; then gaps are means over the seeds, with the lowest and highest.
    """
    values = {"tail_loss": tail_loss(run)} | {name: run.value(name) for name in VALUES}
    values |= {name: run.value(name) if _says_speed(run) else None for name in RATES}
    hours = values["gpu_hours"]
    values["cost"] = None if hours is None or price is None else hours * price
    if reference is None:
        return Row(variant, "REFERENCE", values=values)
    both = [(run, reference), *pairs]
    found = [gap_percent(*pair) for pair in both]
    values["gap"] = _mean(found)
    values["eval_gap"] = _mean([percent_above(a.value("eval_loss"), b.value("eval_loss")) for a, b in both])
    if pairs and None not in found:
        values |= {"gap_low": min(found), "gap_high": max(found)}
    if _says_speed(run) and _says_speed(reference):
        rates = values["tokens_per_second"], reference.value("tokens_per_second")
        values["speedup"] = rates[0] / rates[1] if all(rates) else None
    gap, reason = values["gap"], None
    evaluated = [loss for loss in (of.value("eval_loss") for of, _ in both) if loss is not None]
    if not all(gaps.ends_finite(baseline) for _, baseline in both):
        reason = f"{against}'s training loss, which it is held against, does not end finite"
    elif not all(tail_loss(baseline) for _, baseline in both):
        reason = f"{against}'s training loss, which it is held against, ends at 0"
    elif gap is None or not all(gaps.ends_finite(own) for own, _ in both):
        reason = "its training loss does not end finite"
    elif not all(map(math.isfinite, evaluated)):
        reason = "its evaluation loss is not finite"
    elif gap > max_loss_gap:
        mean = f", on the mean of {len(both)} seeds," if pairs else ""
        reason = (
            f"its loss is{mean} {gap:.2f} % above {against}'s, more than --max_loss_gap {max_loss_gap:g} %"
        )
    return Row(variant, "FAIL" if reason else "PASS", against, reason, values)


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
    "perplexity": ("eval_perplexity", "{:.2f}"),
    "token accuracy": ("eval_token_accuracy", "{:.2%}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "speed": ("speedup", "{:.2f}x"),
    "TFLOP/s per GPU": ("model_tflops_per_gpu", "{:,.1f}"),
    "MFU of BF16 peak": ("mfu_bf16", "{:.1%}"),
    "MFU of FP8 peak": ("mfu_fp8", "{:.1%}"),
    "peak GB": ("peak_memory_gb", "{:.1f}"),
    "GPU-hours": ("gpu_hours", "{:.3f}"),
    "cost": ("cost", "{:,.2f}"),
}


def as_text(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line for each variant."""
    columns = {h: c for h, c in COLUMNS.items() if any(row.values.get(c[0]) is not None for row in rows)}
    lines = []
    for row in rows:
        values = [(row.values.get(name), format_) for name, format_ in columns.values()]
        shown = ["-" if value is None else format_.format(value) for value, format_ in values]
        lines.append([row.variant, row.status, row.against or "-", *shown])
    return ["variant", "verdict", "against", *columns], lines


def table(rows: list[Row]) -> str:
    """Markdown, one row a variant."""
    return markdown.table(*as_text(rows))


def notes(runs: dict[str, RunRecord], seeds: list[RunRecord], band: tuple[float, float] | None) -> list[str]:
    """What a reader must know beside the table. `runs` by variant, the reference first."""
    found = []
    reference, emulated = next(iter(runs.values())), [n for n, r in runs.items() if r.emulated]
    if emulated:
        found.append(
            f"EMULATED: {', '.join(emulated)}. TE's layers or FP8's GEMMs were computed in plain PyTorch: "
            "losses are meaningful; speed, memory and hours are not and are left out."
        )
    if band:
        names = ", ".join(str(run.config["seed"]) for run in (reference, *seeds))
        found.append(
            f"BF16's noise over seeds {names}: {band[0]:+.2f} % to {band[1]:+.2f} % of {reference.name}'s "
            "loss. A gap inside that band is no more than another seed makes."
        )
    else:
        found.append("No noise band: BF16 ended with one seed, so a gap cannot be told from chance.")
    count = len(reference.series("train/loss"))
    if count < FEW_LOSSES:
        found.append(
            f"Only {count} losses were logged: the mean of the last 10 % is over {max(1, count // 10)}."
        )
    if (passed := passes(reference) or 0) > 1:
        found.append(
            f"The runs went {passed:.1f} times over their data. From the second time on the training loss "
            "also says how well the text is memorised, where precisions differ more: see the evaluation."
        )
    if _initial_loss(reference) is None:
        found.append("No evaluation before the first step: equal weights are known from settings alone.")
    machines = sorted({provenance(run, date=False) for run in [*runs.values(), *seeds]})
    if len(machines) > 1:
        found.append("MACHINES OR VERSIONS DIFFER, so compare rates with care: " + "; ".join(machines))
    else:
        found.append(f"All runs: {machines[0]}.")
    for name, run in runs.items():
        if run.value("skipped_steps"):
            found.append(f"{name} skipped {run.value('skipped_steps')} steps (loss or gradient not finite).")
    return found

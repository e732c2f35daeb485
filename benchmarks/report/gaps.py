"""Loss gaps between runs: which runs are comparable, with which baseline, and how far they are apart."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate, pairwise
from statistics import fmean

from fp8_suite.benchmarks.records.runs import DEFAULT, EFFECTS, RunRecord, Series
from fp8_suite.training.config import all_settings
from fp8_suite.training.tracking.metrics import tail_mean

# Prefixes of precision settings, whose effect the gaps measure.
PRECISION = ("mixed_precision", "fp8_", "bf16_", "te_backend", "precision_map")
# Settings that are equal in runs with comparable losses.
SAME_TASK = ["model_name", "init"]
SAME_TASK += [
    name
    for name, setting in all_settings().items()
    if setting.section == "data" and not (setting.field.metadata["resumable"] or name.startswith("eval_"))
]
# Largest relative difference between evaluations of the same initial weights, with the same layers and
# precision, and with others. FP8 is within 0.03 % on a 1B; tiny models differ more.
SAME_PRECISION, OTHER_PRECISION = 1e-3, 1e-2


def differences(run: RunRecord, reference: RunRecord, *, experiment: bool = False) -> list[str]:
    """Return the differences, other than precision, that make the losses of two runs incomparable.

    With `experiment`, steps, tokens, evaluation data and initial weights of one seed must be equal, too.
    """
    pairs = {f"--{name}": (run.setting(name), reference.setting(name)) for name in SAME_TASK}
    pairs["sequences per step"] = run.global_batch, reference.global_batch
    if all(run.setting(name) == reference.setting(name) for name in ("tokenizer_name", "seed")):
        for part in ("train", "eval") if experiment else ("train",):
            prints = fingerprint(run, part), fingerprint(reference, part)
            pairs |= {f"{part} samples": prints} if all(prints) else {}
        counts = ("steps", "label_tokens", "eval_label_tokens") if experiment else ()
        pairs |= {name: (run.value(name), reference.value(name)) for name in counts}
        losses = tuple(dict(r.series("eval/loss")).get(0) for r in (run, reference))
        if experiment and None not in losses:
            names = ("use_te", "mixed_precision", "recipe")
            same = all(run.value(name) == reference.value(name) for name in names)
            if abs(losses[0] - losses[1]) > (SAME_PRECISION if same else OTHER_PRECISION) * abs(losses[1]):
                pairs["evaluation loss before the first step"] = losses
    return [
        f"{name} {value} instead of {wanted}" for name, (value, wanted) in pairs.items() if value != wanted
    ]


def fingerprint(run: RunRecord, part: str) -> str | None:
    """Return the fingerprint of the `train` or `eval` samples; None if it was not recorded."""
    return ((run.environment.get("data") or {}).get(part) or {}).get("fingerprint")


def pick_reference(runs: list[RunRecord]) -> RunRecord:
    """Return the first BF16 run with losses, else the first run.

    Of the runs that are comparable with that one, it is the first with the fewest precision settings, such as
    --moment_dtype.
    """
    trained = [run for run in runs if run.value("recipe") == "bf16" and run.series("train/loss")]
    first, *further = trained or runs[:1]
    candidates = [first, *(run for run in further if why_not_comparable(run, first) is None)]
    names = [name for name, setting in all_settings().items() if setting.section == "precision"]
    return min(candidates, key=lambda run: sum(run.setting(name) != DEFAULT[name] for name in names))


def why_not_comparable(run: RunRecord, reference: RunRecord) -> str | None:
    """Return why a run's loss cannot be compared with the reference's, or None."""
    if different := differences(run, reference):
        return "; ".join(different)
    return None if run.series("train/loss") else "no finite training loss was logged"


def ends_finite(run: RunRecord) -> bool:
    """True if the last logged training loss is finite."""
    logged = run.logged("train/loss")
    return bool(logged) and math.isfinite(logged[-1][1])


def other_settings(run: RunRecord, reference: RunRecord, *, precision: bool = False) -> list[str]:
    """Return the settings that may affect the loss and differ between the runs.

    Precision settings are included only with `precision`.
    """
    return [
        name
        for name, effect in EFFECTS.items()
        if effect in ("step", "learning")
        and (precision or not name.startswith(PRECISION))
        and run.setting(name) != reference.setting(name)
    ]


def seed_runs(runs: list[RunRecord], reference: RunRecord) -> dict[int, RunRecord]:
    """Return the reference and its repetitions with other seeds, by seed, without diverged runs."""
    by_seed = {reference.setting("seed"): reference}
    for run in runs:
        if repeats(run, reference) and ends_finite(run) and why_not_comparable(run, reference) is None:
            by_seed.setdefault(run.setting("seed"), run)
    return by_seed


def repeats(run: RunRecord, first: RunRecord) -> bool:
    """True if the runs differ in nothing but the seed."""
    same = run.value("recipe") == first.value("recipe") and run.emulated == first.emulated
    return same and other_settings(run, first, precision=True) == ["seed"]


def smooth(values: list[float]) -> list[float]:
    """Return the centred moving average over a twentieth of the values; the window narrows at both ends."""
    widest = len(values) // 40
    halves = [min(widest, i, len(values) - 1 - i) for i in range(len(values))]
    sums = [0.0, *accumulate(values)]
    return [(sums[i + half + 1] - sums[i - half]) / (2 * half + 1) for i, half in enumerate(halves)]


def smoothed(run: RunRecord) -> dict[int, float]:
    """Return {step: smoothed training loss}."""
    series = run.series("train/loss")
    return dict(zip([step for step, _ in series], smooth([loss for _, loss in series]), strict=True))


def loss_gap(run: RunRecord, reference: RunRecord) -> Series:
    """Return (step, relative gap of the smoothed losses) for all steps that both runs logged."""
    baseline = smoothed(reference)
    return [(step, loss / baseline[step] - 1) for step, loss in smoothed(run).items() if baseline.get(step)]


def common_losses(run: RunRecord, baseline: RunRecord) -> tuple[list[int], list[float], list[float]]:
    """Return the steps at which both runs logged finite training losses, and the losses of each."""
    losses, bases = dict(run.series("train/loss")), dict(baseline.series("train/loss"))
    steps = sorted(losses.keys() & bases.keys())
    return steps, [losses[step] for step in steps], [bases[step] for step in steps]


def final_gap(run: RunRecord, baseline: RunRecord) -> float | None:
    """Return the relative gap of the mean losses over the last 10 % of common steps.

    None if there is no common step, or if the last loss of either run is not finite.
    """
    if not (ends_finite(run) and ends_finite(baseline)):
        return None
    _, losses, bases = common_losses(run, baseline)
    return tail_mean(losses) / base - 1 if losses and (base := tail_mean(bases)) else None


def window_gaps(run: RunRecord, baseline: RunRecord, windows: int) -> dict[tuple[int, int], float]:
    """Return {(first step, last step): relative gap of the mean losses} for equal windows of the run.

    Empty if there are fewer common steps with losses than windows.
    """
    steps, *curves = common_losses(run, baseline)
    if len(steps) < windows:
        return {}
    ends = [steps[-1] * number // windows for number in range(windows + 1)]
    gaps = {}
    for before, end in pairwise(ends):
        inside = slice(bisect_right(steps, before), bisect_right(steps, end))
        if steps[inside]:
            mean, base = (fmean(curve[inside]) for curve in curves)
            gaps[before + 1, end] = mean / base - 1
    return gaps

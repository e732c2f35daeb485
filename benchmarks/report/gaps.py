"""Losses of runs against those of a reference run, and what another seed alone does to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records.runs import INDIFFERENT, RunRecord, Series, labels, smooth, tail_mean
from training.config import all_settings


def pick_reference(runs: list[RunRecord]) -> RunRecord:
    """The run that the others' losses are set against: in BF16, with a loss, if there is one.

    Of those the first whose seed a run in another precision shares, else the first.
    """
    found = [run for run in runs if run.value("recipe") == "bf16" and run.series("train/loss")]
    seeds = {run.config.get("seed") for run in runs if run.value("recipe") != "bf16"}
    shared = [run for run in found if run.config.get("seed") in seeds]
    return (shared or found or runs)[0]


# Settings under which losses can be set against each other. The global batch has to match too.
SAME_WORK = (
    "model_name",
    "init",
    "dataset_name",
    "split_name",
    "max_seq_length",
    "packing",
    "train_on_prompt",
)
# Settings that neither the seed's noise nor the loss depends on.
ANY_VALUE = {*INDIFFERENT, "log_interval", "fp8_stats_interval", "profile_steps", "empty_cache_freq"}
ANY_VALUE |= {"eval_interval", "eval_at_start", "eval_batch_size"}

# Settings, beside those of the data, that decide which samples a run trains on.
OF_THE_SAMPLES = ("tokenizer_name", "seed")

PRECISION = ("mixed_precision", "fp8_", "bf16_", "te_backend", "precision_map")


def why_not_comparable(run: RunRecord, reference: RunRecord) -> str | None:
    """Why a run's loss says nothing beside the reference's; None if it does."""
    for name in SAME_WORK:
        ours, theirs = run.setting(name), reference.setting(name)
        if ours != theirs:
            return f"{name} is {ours}, the reference's {theirs}"
    if run.global_batch != reference.global_batch:
        return f"its global batch is {run.global_batch} rows, the reference's {reference.global_batch}"
    names = (*settings_of("data"), *OF_THE_SAMPLES)
    if other_samples(run, reference, "train") and all(run.setting(n) == reference.setting(n) for n in names):
        return "its data held other samples than the reference's, though settings are the same"
    if run.series("train/loss"):
        return None
    logged = any("train/loss" in record for record in run.records)
    return "none of its training losses is finite" if logged else "it logged no training loss"


def settings_of(section: str) -> list[str]:
    """The settings of a section of the configuration that a run's result depends on."""
    return [
        name for name, (own, f, _) in all_settings().items() if own == section and not f.metadata["resumable"]
    ]


def fingerprint(run: RunRecord, part: str) -> str | None:
    """Of the samples of `train` or `eval`; None where it has no such part, or is older than this record."""
    report = (run.environment.get("data") or {}).get(part) or {}
    return report.get("fingerprint")


def other_samples(run: RunRecord, reference: RunRecord, part: str) -> bool:
    """Whether two runs are known to have had other samples: a name or path may have held others."""
    here, there = fingerprint(run, part), fingerprint(reference, part)
    return bool(here and there and here != there)


def ends_finite(run: RunRecord) -> bool:
    """Whether the last training loss that was logged is a number."""
    logged = [record["train/loss"] for record in run.records if "train/loss" in record]
    return bool(logged) and math.isfinite(logged[-1])


def other_settings(run: RunRecord, reference: RunRecord, *, precision: bool = False) -> list[str]:
    """Settings in which a run and its reference differ and which losses may depend on.

    Those of precision are what is compared, and count only if asked for. A setting that only one of them
    recorded, because it is newer than the other run, tells nothing.
    """

    def counts(name: str) -> bool:
        return name not in ANY_VALUE and (precision or not name.startswith(PRECISION))

    names = [name for name in reference.config if name in run.config and counts(name)]
    return [name for name in names if run.config.get(name) != reference.config.get(name)]


def seed_runs(runs: list[RunRecord], reference: RunRecord) -> list[RunRecord]:
    """The reference and its repetitions that end finite: same precision and settings, each another seed."""
    found, seeds = [reference], {reference.config.get("seed")}
    for run in runs:
        same = run.value("recipe") == reference.value("recipe") and run.emulated == reference.emulated
        alike = same and set(other_settings(run, reference, precision=True)) <= {"seed"}
        counts = ends_finite(run) and run.config.get("seed") not in seeds
        if alike and counts and why_not_comparable(run, reference) is None:
            seeds.add(run.config.get("seed"))
            found.append(run)
    return found


def smoothed(run: RunRecord) -> dict[int, float]:
    """{step: smoothed training loss}."""
    train = run.series("train/loss")
    return dict(zip((step for step, _ in train), smooth([loss for _, loss in train]), strict=True))


def loss_gap(run: RunRecord, reference: RunRecord) -> Series:
    """(step, gap as a share of the reference's loss) of the smoothed training losses, where both have one."""
    ours, theirs = smoothed(run), smoothed(reference)
    return [(step, ours[step] / theirs[step] - 1) for step in sorted(ours) if theirs.get(step)]


def noise_band(family: list[RunRecord]) -> Series:
    """(step, half width) of what another seed alone does: the runs' spread over the first one's loss.

    The spread is the largest smoothed training loss of that step less the smallest, as a moving mean over a
    fifth of the steps: curves of two seeds cross, which makes neither less noisy. Empty for one run.
    """
    curves = [smoothed(run) for run in family]
    if len(curves) < 2:
        return []
    steps = sorted(set(curves[0]).intersection(*curves[1:]))
    at = {step: [curve[step] for curve in curves] for step in steps if curves[0][step]}
    widths = [(max(losses) - min(losses)) / losses[0] for losses in at.values()]
    return list(zip(at, smooth(widths, share=5), strict=True))


def tail_gap(run: RunRecord, reference: RunRecord) -> float | None:
    """Gap of the tail means over common steps, as a share of the reference's; None if that is 0."""
    ours, theirs = dict(run.series("train/loss")), dict(reference.series("train/loss"))
    steps = sorted(ours.keys() & theirs.keys())
    base = tail_mean([theirs[s] for s in steps]) if steps else 0.0
    return tail_mean([ours[s] for s in steps]) / base - 1 if base else None


def tail_noise(family: list[RunRecord]) -> float | None:
    """Spread of the tail gaps of a reference (first) and its repetitions; None for one run."""
    gaps = [tail_gap(run, family[0]) for run in family]
    known = [gap for gap in gaps if gap is not None]
    return max(known) - min(known) if len(known) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """Runs whose losses may be set against another's, and why each of the others may not."""

    reference: RunRecord
    pairs: list[tuple[RunRecord, RunRecord]]  # a run, and what it is set against: its baseline
    left_out: dict[str, str]  # label -> reason
    family: list[RunRecord]  # the reference and its repetitions with other seeds


def comparison(
    runs: list[RunRecord], reference: RunRecord, baselines: dict[Path, RunRecord | None] | None = None
) -> Comparison:
    """Sort the runs other than the reference into comparable ones and those left out.

    `baselines`: by folder, of runs that are set against another one than the reference, None if that has
    not run.
    """
    pairs, left_out = [], {}
    for label, run in zip(labels(runs), runs, strict=True):
        if run is not reference:
            baseline = (baselines or {}).get(run.folder, reference)
            if baseline is None:
                left_out[label] = "what it is held against has not run"
            elif reason := why_not_comparable(run, baseline):
                left_out[label] = reason
            else:
                pairs.append((run, baseline))
    return Comparison(reference, pairs, left_out, seed_runs(runs, reference))

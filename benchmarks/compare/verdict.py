"""Verdict of a comparison: a row per variant with loss gap, quality, speed and cost, and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8_suite.benchmarks.compare.jobs import Job
from fp8_suite.benchmarks.records.launch import Outcome
from fp8_suite.benchmarks.records.runs import RunRecord, bad_input
from fp8_suite.benchmarks.report import gaps
from fp8_suite.benchmarks.report.tables import Columns, make_table, markdown, metric_columns, provenance
from fp8_suite.core.files import replace_file, to_json
from fp8_suite.training.tracking.metrics import summary_name, tail_mean

FEW_LOSSES = 100
QUALITY = ("eval/loss", "eval/perplexity", "eval/token_accuracy")
SPEED = (
    *("perf/tokens_per_second", "perf/model_tflops_per_gpu", "perf/mfu_bf16", "perf/mfu_fp8"),
    "perf/peak_memory_gb",
)
Pair = tuple[RunRecord, RunRecord]  # (run, its baseline)
Band = tuple[float, float]  # lowest and highest gap between BF16 runs with different seeds, in percent


@dataclass(frozen=True)
class Row:
    """Verdict on one variant. Gaps are in percent; unknown values are None."""

    variant: str
    status: str  # REFERENCE, PASS, FAIL, SKIPPED
    against: str | None = None  # name of the baseline
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
    **metric_columns(*QUALITY[1:], SPEED[0]),
    "speed": ("speedup", "{:.2f}x"),
    **metric_columns(*SPEED[1:]),
    "GPU-hours": ("gpu_hours", "{:.3f}"),
    "cost": ("cost", "{:,.2f}"),
}


def conclude(
    jobs: list[Job],
    runs: dict[str, RunRecord],
    failed: dict[str, Outcome],
    *,
    max_loss_gap: float,
    price: float | None,
) -> tuple[dict[str, Any], list[Row]]:
    """Return the content of verdict.json, and its rows. UserError if finished runs are not comparable."""
    reference = runs[jobs[0].name]
    check_runs(jobs, runs)
    repeats = {job.name: runs[job.name] for job in jobs if job.seed_of == jobs[0].name and job.name in runs}
    diverged = [name for name, run in repeats.items() if not gaps.ends_finite(run)]
    seeds = [reference, *(run for name, run in repeats.items() if name not in diverged)]
    noise = gaps.tail_noise(seeds)
    band = (100 * noise[0], 100 * noise[1]) if noise else None
    variants = [job for job in jobs if not job.seed_of]
    rows = [_row(job, jobs, runs, failed, max_loss_gap, price) for job in variants]
    notes = _notes_on_runs({job.name: runs[job.name] for job in variants if job.name in runs}, seeds, band)
    notes += _notes_on_jobs(jobs, failed, rows, band)
    notes += [f"{name}: not in the noise band, its last training loss is not finite" for name in diverged]
    result = {
        "reference": jobs[0].name,
        "max_loss_gap_percent": max_loss_gap,
        "noise_band_percent": band,
        "seeds": [run.config["seed"] for run in seeds],
        "emulated": any(run.emulated for run in runs.values()),
        "price_per_gpu_hour": price,
        "notes": notes,
        "variants": [asdict(row) for row in rows],
    }
    return result, rows


def check_runs(jobs: list[Job], runs: dict[str, RunRecord]) -> None:
    """Raise UserError unless all runs are complete, of one experiment, and the reference did not diverge."""
    reference = jobs[0].name
    for job in jobs[1:]:
        against = job.against if job.seed_of and job.against else reference
        if {job.name, against} <= runs.keys():
            run, baseline, other_seed = runs[job.name], runs[against], job.seed_of == reference
            if found := gaps.differences(run, baseline, experiment=True, other_seed=other_seed):
                raise bad_input(
                    f"{run.name} cannot be compared with {baseline.name}: it has {'; '.join(found)}; delete "
                    f"the wrong run folder ({run.folder} or {baseline.folder}) to run it again"
                )
    for run in runs.values():  # the last step is always logged
        if (last := max((step for step, _ in run.logged("train/loss")), default=0)) != run.value("steps"):
            log, steps = run.folder / "metrics.jsonl", run.value("steps")
            raise bad_input(f"{log}: ends at step {last} of {steps}; delete the run folder to run it again")
    if not gaps.ends_finite(runs[reference]):
        reason = "the reference's last training loss is not finite; try a lower --learning_rate"
        raise bad_input(f"{runs[reference].folder}: {reason}")


def _row(
    job: Job,
    jobs: list[Job],
    runs: dict[str, RunRecord],
    failed: dict[str, Outcome],
    max_loss_gap: float,
    price: float | None,
) -> Row:
    if job.name in failed:
        status = "SKIPPED" if failed[job.name].refused else "FAIL"
        return Row(job.name, status, job.against, failed[job.name].reason)
    if job.against is None:
        return Row(job.name, "REFERENCE", values=measure(runs[job.name], price))
    if job.against not in runs:
        return Row(job.name, "FAIL", job.against, f"its baseline {job.against} failed")
    repeats = [j for j in jobs if j.seed_of == job.name and {j.name, j.against} <= runs.keys()]
    pairs = [(runs[j.name], runs[j.against]) for j in (job, *repeats)]
    return judge(job.name, pairs, against=job.against, max_loss_gap=max_loss_gap, price=price)


def judge(
    variant: str, pairs: Sequence[Pair], *, against: str, max_loss_gap: float, price: float | None
) -> Row:
    """Return a variant's row: PASS if its tail loss is at most `max_loss_gap` percent above the baseline's.

    `pairs` are the runs of all seeds with their baselines, the main seed first; gaps are means over the
    seeds. `price` is per GPU-hour.
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
    """Return a row's values that need no baseline. Speed, memory and cost are None unless on real GPUs."""
    hours = run.value("gpu_hours") if run.timed else None
    losses = [loss for _, loss in run.series("train/loss")]
    return {
        "tail_loss": tail_mean(losses) if losses else None,
        **{name: run.value(name) for name in map(summary_name, QUALITY)},
        **{name: run.value(name) if run.timed else None for name in map(summary_name, SPEED)},
        "gpu_hours": hours,
        "cost": None if hours is None or price is None else hours * price,
    }


def _why_fail(pairs: Sequence[Pair], against: str, gap: float | None, max_loss_gap: float) -> str | None:
    evaluated = [loss for run, _ in pairs if (loss := run.value("eval_loss")) is not None]
    if not all(gaps.ends_finite(baseline) for _, baseline in pairs):
        return f"the last training loss of its baseline {against} is not finite"
    if not all(gaps.ends_finite(run) for run, _ in pairs):
        return "its last training loss is not finite"
    if gap is None:
        return f"it has no step in common with {against}, or {against}'s loss is 0"
    if not all(map(math.isfinite, evaluated)):
        return "its evaluation loss is not finite"
    if gap > max_loss_gap:
        mean = f" (mean of {len(pairs)} seeds)" if len(pairs) > 1 else ""
        return f"its loss is {gap:.2f} % above {against}'s{mean}, more than --max_loss_gap {max_loss_gap:g} %"
    return None


# Notes


def _notes_on_runs(runs: dict[str, RunRecord], seeds: list[RunRecord], band: Band | None) -> list[str]:
    """Return notes that limit what the comparison shows. `runs` by variant, the reference first."""
    notes, reference = [], seeds[0]
    if emulated := [name for name, run in runs.items() if run.emulated]:
        notes.append(
            f"EMULATED: {', '.join(emulated)}. TE layers or FP8 GEMMs were computed in plain PyTorch. "
            "Losses are meaningful; speed, memory and hours are not, and are left out."
        )
    if band:
        first, *others = (str(run.config["seed"]) for run in seeds)
        notes.append(
            f"Noise band: BF16 with the {'seeds' if others[1:] else 'seed'} {', '.join(others)} differs by "
            f"{band[0]:+.2f} % to {band[1]:+.2f} % from the reference with seed {first}. A gap inside this "
            "band is no larger than the effect of another seed."
        )
    else:
        notes.append("No noise band: BF16 finished with one seed only, so a gap may be chance.")
    count = len(reference.series("train/loss"))
    if count < FEW_LOSSES:
        notes.append(
            f"Only {count} losses were logged, so means of the last 10 % are over {max(1, count // 10)}."
        )
    epochs = [epoch for _, epoch in reference.series("train/epoch")]
    if epochs and epochs[-1] > 1:
        notes.append(
            f"The runs trained for {epochs[-1]:.1f} epochs. After the first, the training loss also measures "
            "memorisation, in which precisions differ more: compare the evaluation losses."
        )
    if gaps.initial_loss(reference) is None:
        notes.append(
            "No evaluation before the first step: equal initial weights follow from the settings only."
        )
    machines = sorted({provenance(run, date=False) for run in [*runs.values(), *seeds]})
    warning = "MACHINES OR VERSIONS DIFFER, so speeds may not be comparable: "
    notes.append(f"{warning if len(machines) > 1 else 'All runs: '}{'; '.join(machines)}.")
    skipped = {name: run.value("skipped_steps") for name, run in runs.items()}
    return notes + [
        f"{name} skipped {n} steps: non-finite loss or gradient." for name, n in skipped.items() if n
    ]


def _notes_on_jobs(
    jobs: list[Job], failed: dict[str, Outcome], rows: list[Row], band: Band | None
) -> list[str]:
    """Return notes on failures, and on the pairing of runs and baselines."""
    by_name = {job.name: job for job in jobs}
    notes = [f"{row.variant}: {row.status}, {row.reason}" for row in rows if row.reason]
    for job in jobs:
        fp8 = job.against and not job.seed_of and not job.name.startswith("bf16") and job.name not in failed
        if fp8 and job.cfg.model.use_te != by_name[job.against].cfg.model.use_te:
            kinds, add = ("TE", "Hugging Face"), "bf16"
            if not job.cfg.model.use_te:
                kinds, add = kinds[::-1], "bf16_hf"
            notes.append(
                f"{job.name} has {kinds[0]} layers, its baseline {job.against} {kinds[1]} layers, so its gap "
                f"includes other effects than precision; add {add} to compare equal layers"
            )
        if job.seed_of and job.name in failed:
            average = "the noise band" if job.seed_of == jobs[0].name else "the mean"
            notes.append(f"{job.name}: not in {average}, {failed[job.name].reason}")
    repeats = [job for job in jobs if job.seed_of and job.against]
    if paired := sorted({j.cfg.optim.seed for j in repeats if not {j.name, j.against} & failed.keys()}):
        numbers = ", ".join(map(str, [jobs[0].cfg.optim.seed, *paired]))
        notes.append(f"Gaps are means over the seeds {numbers}; a run and its baseline have the same seed.")
    for row in rows if band else ():
        gap = row.value("gap")
        if gap is not None and row.status == "FAIL" and band[0] <= gap <= band[1]:
            notes.append(f"{row.variant}: FAIL, although its gap is inside the noise band")
    return notes


# Results


def exit_code(rows: list[Row], failed: dict[str, Outcome], *, strict: bool) -> int:
    """Return 1 if any run failed, or with `strict` if a variant was skipped; else 0."""
    bad = {"FAIL", "SKIPPED"} if strict else {"FAIL"}
    seeds_failed = failed.keys() - {row.variant for row in rows}
    return int(bool(seeds_failed) or any(row.status in bad for row in rows))


def write_verdict(result: dict[str, Any], rows: list[Row], folder: Path, command: str) -> str:
    """Print the verdict; write verdict.json and verdict.md. Returns the definition of PASS."""
    replace_file(folder / "verdict.json", to_json(result | {"command": command}, indent=1))
    title = "# FP8 against BF16" + (" (emulated)" if result["emulated"] else "")
    percent = result["max_loss_gap_percent"]
    limit = f"PASS: mean training loss of the last 10 % of steps at most {percent:g} % above the baseline's."
    notes = "\n".join(f"- {note}" for note in result["notes"])
    table = make_table(COLUMNS, rows)
    body = f"{markdown(table.headings, table.texts)}\n\n{limit}"
    text = f"{title}\n\n{body}\n\n{notes}\n\n```\n{command}\n```\n"
    replace_file(folder / "verdict.md", text.encode())
    print(f"\n{body}\n{notes}\n\nverdict: {folder / 'verdict.md'}", flush=True)
    return limit

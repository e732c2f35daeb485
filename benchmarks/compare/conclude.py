"""Verdict of a comparison: rows, noise band and notes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare.jobs import Job
from benchmarks.compare.verdict import COLUMNS, Row, caveats, judge, measure
from benchmarks.records.launch import Outcome
from benchmarks.records.runs import RunRecord, bad_input
from benchmarks.report import gaps, markdown
from benchmarks.report.tables import make_table
from core.files import replace_file, to_json


def conclude(
    jobs: list[Job],
    runs: dict[str, RunRecord],
    failed: dict[str, Outcome],
    *,
    max_loss_gap: float,
    price: float | None,
) -> tuple[dict[str, Any], list[Row]]:
    """Return the content of verdict.json, and the rows. UserError if finished runs are not comparable."""
    reference = runs[jobs[0].name]
    check_runs(jobs, runs)
    repeats = {job.name: runs[job.name] for job in jobs if job.seed_of == jobs[0].name and job.name in runs}
    diverged = [name for name, run in repeats.items() if not gaps.ends_finite(run)]
    seeds = [run for name, run in repeats.items() if name not in diverged]
    noise = gaps.tail_noise([reference, *seeds])
    band = (100 * noise[0], 100 * noise[1]) if noise else None
    variants = [job for job in jobs if not job.seed_of]
    rows = [_row(job, jobs, runs, failed, max_loss_gap, price) for job in variants]
    notes = caveats({job.name: runs[job.name] for job in variants if job.name in runs}, seeds, band)
    notes += _notes(jobs, failed, rows, band)
    notes += [f"{name}: not in the noise band, its training loss does not end finite" for name in diverged]
    result = {
        "reference": jobs[0].name,
        "max_loss_gap_percent": max_loss_gap,
        "noise_band_percent": band,
        "seeds": [run.config["seed"] for run in (reference, *seeds)],
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
                    f"{run.name} and {baseline.name} cannot be compared, they differ: {'; '.join(found)}; "
                    f"remove the folder of the wrong one ({baseline.folder} or {run.folder}) to run it again"
                )
    for run in runs.values():  # the last step is always logged
        if (last := max((step for step, _ in run.logged("train/loss")), default=0)) != run.value("steps"):
            log, steps = run.folder / "metrics.jsonl", run.value("steps")
            raise bad_input(f"{log}: ends at step {last} of {steps}; remove its folder to run it again")
    if not gaps.ends_finite(runs[reference]):
        folder, way_out = runs[reference].folder, "so there is no gap; try a lower --learning_rate"
        raise bad_input(f"{folder}: the reference's training loss does not end finite, {way_out}")


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
        return Row(job.name, "FAIL", job.against, f"its reference {job.against} did not run")
    repeats = [j for j in jobs if j.seed_of == job.name and {j.name, j.against} <= runs.keys()]
    pairs = [(runs[j.name], runs[j.against]) for j in (job, *repeats)]
    return judge(job.name, pairs, against=job.against, max_loss_gap=max_loss_gap, price=price)


def _notes(
    jobs: list[Job], failed: dict[str, Outcome], rows: list[Row], band: tuple[float, float] | None
) -> list[str]:
    """Return notes on failures, and on the pairing of runs and baselines."""
    by_name = {job.name: job for job in jobs}
    notes = [f"{row.variant}: {row.status}, {row.reason}" for row in rows if row.reason]
    for job in jobs:
        own = job.against and not job.seed_of and not job.name.startswith("bf16") and job.name not in failed
        if own and job.cfg.model.use_te != by_name[job.against].cfg.model.use_te:
            add = "bf16" if job.cfg.model.use_te else "bf16_hf"
            notes.append(
                f"{job.name} has other layers than {job.against}, so its gap includes theirs; add {add} for "
                "a baseline of its own layers"
            )
        if job.seed_of and job.name in failed:
            place = "the noise band" if job.seed_of == jobs[0].name else "the mean"
            notes.append(f"{job.name}: not in {place}, {failed[job.name].reason}")
    repeats = [job for job in jobs if job.seed_of and job.against]
    if paired := sorted({j.cfg.optim.seed for j in repeats if not {j.name, j.against} & failed.keys()}):
        numbers = ", ".join(map(str, [jobs[0].cfg.optim.seed, *paired]))
        notes.append(f"Gaps are means over the seeds {numbers}: each run against its baseline of that seed.")
    for row in rows if band else ():
        gap = row.value("gap")
        if gap is not None and row.status == "FAIL" and band[0] <= gap <= band[1]:
            notes.append(f"{row.variant}: its gap lies inside BF16's noise band all the same")
    return notes


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
    limit = f"PASS: the training loss, mean of the last 10 %, is at most {percent:g} % above the baseline's."
    notes = "\n".join(f"- {note}" for note in result["notes"])
    table = make_table(COLUMNS, rows)
    body = f"{markdown.table(table.headings, table.texts)}\n\n{limit}"
    text = f"{title}\n\n{body}\n\n{notes}\n\n```\n{command}\n```\n"
    replace_file(folder / "verdict.md", text.encode())
    print(f"\n{body}\n{notes}\n\nverdict: {folder / 'verdict.md'}", flush=True)
    return limit

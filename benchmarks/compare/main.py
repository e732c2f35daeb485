"""Is FP8 as good as BF16 on this model and data, and what does it gain? One command, one verdict.

python -m benchmarks.compare --variants bf16,delayed,current --output_dir DIR [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.records.launch import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Outcome,
    folder_flag,
    is_begun,
    is_finished,
    launch,
    make_folder,
    run_command,
)
from benchmarks.records.runs import RunRecord, read_run
from benchmarks.records.variants import VARIANTS, Variant, given_settings, parse_variants, resolve
from benchmarks.report import gaps, verdict
from benchmarks.report.wandb_report import upload
from core.cli import OneLineParser
from core.files import replace_file, to_json
from core.redact import redact
from training.config import Config

PROG = "python -m benchmarks.compare"
# What a comparison wants of its runs, unless the command says otherwise.
DEFAULTS: dict[str, Any] = {
    "eval_at_start": True,  # shows that the runs start from the same weights
    "eval_interval": 0,
    "log_interval": 1,  # the tail mean is over what was logged
    "export": False,
    "keep_last": 1,
}


@dataclass(frozen=True)
class Job:
    """One run of the comparison; `seed_of` names the variant that it repeats with another seed."""

    name: str
    cfg: Config
    against: str | None = None
    seed_of: str | None = None


def build_jobs(
    variants: list[Variant], given: dict[str, Any], folder: Path, noise_seeds: int, paired_seeds: int = 0
) -> list[Job]:
    """The runs, the reference first; ValueError if there is none, or for settings that cannot be.

    Of the reference there are `noise_seeds` more, of every variant `paired_seeds`, each held against its
    baseline of that seed.
    """
    by_name = {variant.name: variant for variant in variants}
    against = {name: _reference(variant, by_name) for name, variant in by_name.items()}
    reference = next(name for name in against if against[name] is None)
    ordered = [reference, *(name for name in by_name if name != reference)]
    jobs = [_job(by_name[name], given, folder, against=against[name]) for name in ordered]
    first = jobs[0].cfg.optim.seed
    for seed in range(first + 1, first + 1 + max(noise_seeds, paired_seeds)):
        repeated = ordered if seed <= first + paired_seeds else [reference]
        jobs += [
            _job(by_name[name], given | {"seed": seed}, folder, against=against[name], seed=seed)
            for name in repeated
        ]
    return jobs


def _reference(variant: Variant, by_name: dict[str, Variant]) -> str | None:
    """The BF16 run that a variant is held against: of its own layers, else of the others."""
    if variant.name == "bf16" or (variant.name == "bf16_hf" and "bf16" not in by_name):
        return None
    order = ("bf16", "bf16_hf")
    preferred = order if variant.uses_te or variant.name == "bf16_hf" else order[::-1]
    found = next((name for name in preferred if name in by_name), None)
    if found is None:
        raise ValueError(
            "--variants: needs bf16 or bf16_hf, as they are, to compare the others with; add one"
        )
    return found


def _job(
    variant: Variant,
    given: dict[str, Any],
    folder: Path,
    *,
    against: str | None,
    seed: int | None = None,
) -> Job:
    own = _of_seed(variant.folder_name, seed)
    try:
        cfg = resolve(DEFAULTS | given | variant.settings, folder / "runs" / own)
    except ValueError as error:
        raise ValueError(f"variant {variant.name}: {error}") from None
    repeats = None if seed is None else variant.name
    return Job(_of_seed(variant.name, seed), cfg, against and _of_seed(against, seed), repeats)


def _of_seed(name: str, seed: int | None) -> str:
    return name if seed is None else f"{name}-seed{seed}"


def check_before_the_start(jobs: list[Job], gpus: int) -> None:
    """ValueError for what would make the runs incomparable once hours were spent."""
    batches = {j.name: j.cfg.optim.batch_size * j.cfg.optim.gradient_accumulation_steps for j in jobs}
    first = jobs[0].name
    for name, batch in batches.items():
        if batch != batches[first]:
            raise ValueError(
                f"{name} and {first} cannot be compared: --batch_size x --gradient_accumulation_steps is "
                f"{batch} and {batches[first]}; split the same batch in both"
            )
    for job in jobs:
        if is_begun(job.cfg):
            run = read_run(Path(job.cfg.checkpoint.output_dir))
            if run.environment and run.ranks != gpus:
                raise ValueError(
                    f"{run.folder}: holds a run on {run.ranks} GPUs, here it is --gpus {gpus}; give that "
                    "number, or another --output_dir"
                )


def run_jobs(jobs: list[Job], *, gpus: int, folder: Path) -> tuple[int, dict[str, Outcome]]:
    """Run what is unfinished. Returns a code other than 0 to end with at once, and the runs that failed.

    What failed is not repeated with other seeds.
    """
    failed: dict[str, Outcome] = {}
    for number, job in enumerate(jobs, 1):
        title = f"[{number}/{len(jobs)}] {job.name}"
        if job.seed_of in failed:
            continue
        if is_finished(job.cfg):
            print(f"{title}: finished already", flush=True)
            continue
        print(f"{title}: {job.cfg.checkpoint.output_dir}", flush=True)
        own = Path(job.cfg.checkpoint.output_dir).name
        outcome = launch(job.cfg, gpus=gpus, log=folder / "logs" / f"{own}.log")
        if outcome.stopped:
            print(f"stopped in {job.name}; to go on: the same command", flush=True)
            return EXIT_INTERRUPTED, failed
        if outcome.in_use:
            raise ValueError(f"{job.name}: {outcome.error}; then the same command goes on")
        if outcome.code:
            failed[job.name] = outcome
            if number == 1:
                print(f"error: the reference {job.name} did not run: {outcome.reason}", file=sys.stderr)
                return max(outcome.code, EXIT_FAILED), failed  # a killed run's is negative
    return 0, failed


def read_runs(jobs: list[Job], failed: Container[str]) -> dict[str, RunRecord]:
    """The runs by their jobs' names, without those that failed."""
    return {j.name: read_run(Path(j.cfg.checkpoint.output_dir)) for j in jobs if j.name not in failed}


def conclude(
    jobs: list[Job],
    runs: dict[str, RunRecord],
    failed: dict[str, Outcome],
    *,
    max_loss_gap: float,
    price: float | None,
) -> tuple[dict[str, Any], list[verdict.Row]]:
    """The verdict, as verdict.json has it, and its rows; ValueError if finished runs cannot be compared."""
    reference = jobs[0].name
    repeats = {job.name: runs[job.name] for job in jobs if job.seed_of == reference and job.name in runs}
    diverged = [name for name, run in repeats.items() if not gaps.ends_finite(run)]
    seeds = [run for name, run in repeats.items() if name not in diverged]
    for job in jobs[1:]:
        against = job.against if job.seed_of and job.against else reference
        if job.name in runs and against in runs:
            refuse_difference(runs[against], runs[job.name], other_seed=job.seed_of == reference)
    if missing := next(filter(None, map(verdict.incomplete, runs.values())), None):
        raise ValueError(f"{missing}; remove its folder to run it again")
    if not gaps.ends_finite(runs[reference]):
        raise ValueError(
            f"{runs[reference].folder}: the reference's training loss does not end finite, so nothing can be "
            "held against it; try a lower --learning_rate"
        )
    if not verdict.tail_loss(runs[reference]):
        raise ValueError(
            f"{runs[reference].folder}: the reference's training loss ends at 0, so no gap is a share of it; "
            "give fewer --max_steps, or more data"
        )
    rows = [
        _row(job, jobs, runs, failed, max_loss_gap=max_loss_gap, price=price)
        for job in jobs
        if not job.seed_of
    ]
    variants = {job.name: runs[job.name] for job in jobs if job.name in runs and not job.seed_of}
    band = verdict.noise_band(runs[reference], seeds)
    notes = verdict.notes(variants, seeds, band) + _notes(jobs, failed, rows, band)
    notes += [f"{name}: not in the noise band, its training loss does not end finite" for name in diverged]
    result = {
        "reference": reference,
        "max_loss_gap_percent": max_loss_gap,
        "noise_band_percent": band,
        "seeds": [run.config["seed"] for run in (runs[reference], *seeds)],
        "emulated": any(run.emulated for run in runs.values()),
        "price_per_gpu_hour": price,
        "notes": notes,
        "variants": [asdict(row) for row in rows],
    }
    return result, rows


def _notes(
    jobs: list[Job],
    failed: dict[str, Outcome],
    rows: list[verdict.Row],
    band: tuple[float, float] | None,
) -> list[str]:
    """What a reader must know of how the runs came to be held against each other."""
    notes = [f"{row.variant}: {row.status}, {row.reason}" for row in rows if row.reason]
    notes += [
        f"{job.name} has other layers than {job.against}, so its gap is theirs too; add "
        f"{'bf16' if job.cfg.model.use_te else 'bf16_hf'} to hold it against its own"
        for job in jobs
        if job.against
        and not job.seed_of
        and not job.name.startswith("bf16")
        and job.name not in failed
        and job.cfg.model.use_te != _te(jobs, job.against)
    ]
    for job in jobs:
        if job.seed_of and job.name in failed:
            place = "the noise band" if job.seed_of == jobs[0].name else "the mean"
            notes.append(f"{job.name}: not in {place}, {failed[job.name].reason}")
    repeats = [
        job for job in jobs if job.seed_of and job.against and not {job.name, job.against} & failed.keys()
    ]
    if paired := sorted({job.cfg.optim.seed for job in repeats}):
        numbers = ", ".join(map(str, [jobs[0].cfg.optim.seed, *paired]))
        notes.append(f"Gaps are means over the seeds {numbers}: each run against its baseline of that seed.")
    if band:
        for row in rows:
            gap = row.values.get("gap")
            if gap is not None and row.status == "FAIL" and band[0] <= gap <= band[1]:
                notes.append(f"{row.variant}: its gap lies inside BF16's noise band all the same")
    return notes


def _te(jobs: list[Job], name: str) -> bool:
    return next(job.cfg.model.use_te for job in jobs if job.name == name)


def refuse_difference(reference: RunRecord, run: RunRecord, *, other_seed: bool) -> None:
    if reason := verdict.what_differs(reference, run, other_seed=other_seed):
        raise ValueError(
            f"{reason}; remove the folder of the one that is wrong ({reference.folder} or {run.folder}) to "
            "run it again, or use another --output_dir"
        )


def _row(
    job: Job,
    jobs: list[Job],
    runs: dict[str, RunRecord],
    failed: dict[str, Outcome],
    *,
    max_loss_gap: float,
    price: float | None,
) -> verdict.Row:
    if job.name in failed:
        outcome = failed[job.name]
        return verdict.Row(job.name, "SKIPPED" if outcome.refused else "FAIL", job.against, outcome.reason)
    if job.against is not None and job.against not in runs:
        return verdict.Row(job.name, "FAIL", job.against, f"its reference {job.against} did not run")
    return verdict.judge(
        job.name,
        runs[job.name],
        runs[job.against] if job.against else None,
        max_loss_gap=max_loss_gap,
        price=price,
        against=job.against,
        pairs=[
            (runs[other.name], runs[other.against])
            for other in jobs
            if other.seed_of == job.name and {other.name, other.against} <= runs.keys()
        ],
    )


def exit_code(rows: list[verdict.Row], failed: dict[str, Outcome], *, strict: bool) -> int:
    """1 if a variant failed, or a run with another seed, or with `strict` one was skipped."""
    bad = {"FAIL", "SKIPPED"} if strict else {"FAIL"}
    seeds_failed = set(failed) - {row.variant for row in rows}
    return int(bool(seeds_failed) or any(row.status in bad for row in rows))


def pass_means(result: dict[str, Any]) -> str:
    limit = f"at most {result['max_loss_gap_percent']:g} % above that of the run it is held against"
    return f"PASS: the training loss, mean of the last 10 %, is {limit}."


def forget_verdict(folder: Path) -> None:
    """An earlier one does not hold for what ran since."""
    for name in ("verdict.json", "verdict.md"):
        (folder / name).unlink(missing_ok=True)


def write_verdict(result: dict[str, Any], rows: list[verdict.Row], folder: Path, command: str) -> None:
    """verdict.json and verdict.md."""
    replace_file(folder / "verdict.json", to_json(result | {"command": command}, indent=1))
    title = "# FP8 against BF16" + (" (emulated)" if result["emulated"] else "")
    limit = pass_means(result)
    listed = "\n".join(f"- {note}" for note in result["notes"])
    text = f"{title}\n\n{verdict.table(rows)}\n\n{limit}\n\n{listed}\n\n```\n{command}\n```\n"
    replace_file(folder / "verdict.md", text.encode())
    print(f"\n{verdict.table(rows)}\n\n{limit}\n{listed}\n\nverdict: {folder / 'verdict.md'}", flush=True)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser(
        prog=PROG,
        allow_abbrev=False,
        description=__doc__.splitlines()[0],
        epilog="All other flags are train_fp8.py's (see its --help) and are given to every run.",
    )
    names = ", ".join(VARIANTS)
    parser.add_argument(
        "--variants",
        nargs="+",
        required=True,
        metavar="NAME[+SETTING=VALUE],...",
        help=f"what to compare: {names}; bf16 has TE layers beside a TE recipe or bf16_hf",
    )
    parser.add_argument(
        "--output_dir", type=folder_flag, required=True, help="runs, verdict, figures; resumes"
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of every run; over 1 through torchrun")
    parser.add_argument(
        "--noise_seeds", type=int, default=2, help="BF16 runs with further seeds (default: 2)"
    )
    parser.add_argument(
        "--paired_seeds",
        type=int,
        default=0,
        help="further seeds of every variant, each against BF16 of that seed: gaps are means (default: 0)",
    )
    parser.add_argument(
        "--max_loss_gap",
        type=float,
        default=verdict.MAX_LOSS_GAP,
        help="percent of the reference's training loss that a variant may lie above it (%(default)s)",
    )
    parser.add_argument("--price_per_gpu_hour", type=float, help="adds a column of costs, in its currency")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a variant was skipped, too")
    args, training = parser.parse_known_args(argv)
    least_of = {
        "gpus": 1,
        "noise_seeds": 0,
        "paired_seeds": 0,
        "max_loss_gap": 0.0,
        "price_per_gpu_hour": 0.0,
    }
    for name, least in least_of.items():
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"--{name} {value}: must be {least:g} or more")
    return args, training


def compare(argv: list[str]) -> int:
    args, training = parse(argv)
    variants, given = parse_variants(args.variants), given_settings(training, PROG)
    jobs = build_jobs(variants, given, args.output_dir, args.noise_seeds, args.paired_seeds)
    if jobs[0].cfg.optim.max_steps == 0:
        raise ValueError("--max_steps 0: trains nothing that could be compared; give 1 or more")
    check_before_the_start(jobs, args.gpus)
    make_folder(args.output_dir)
    code, failed = run_jobs(jobs, gpus=args.gpus, folder=args.output_dir)
    from benchmarks.report import main as report  # matplotlib takes a while; refusals do not wait for it

    if code:
        if jobs[0].name in failed and is_begun(jobs[0].cfg):
            forget_verdict(args.output_dir)
            report.main([jobs[0].cfg.checkpoint.output_dir, "--output_dir", str(args.output_dir)])
        return code
    jobs = [job for job in jobs if job.seed_of not in failed]
    runs = read_runs(jobs, failed)
    reported = list(runs.values()), runs[jobs[0].name], args.output_dir
    try:
        limits = {"max_loss_gap": args.max_loss_gap, "price": args.price_per_gpu_hour}
        result, rows = conclude(jobs, runs, failed, **limits)
    except ValueError:
        forget_verdict(args.output_dir)
        report.write(*reported)  # the curves say more than a line of error
        raise
    write_verdict(result, rows, args.output_dir, redact(shlex.join([*PROG.split(), *argv])))
    baselines = {
        runs[job.name].folder: runs.get(job.against) for job in jobs if job.against and job.name in runs
    }
    drawn = report.write(*reported, verdict.Verdict(rows, pass_means(result), result["notes"], baselines))
    if jobs[0].cfg.log.use_wandb:
        summary = {name: value for name, value in result.items() if name != "variants"}
        upload(args.output_dir, jobs[0].cfg.log, reported[0], drawn, rows, summary)
    return exit_code(rows, failed, strict=args.strict)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all variants pass; 1 one does not; 2 a setting is wrong; 75 stopped, to be gone on."""
    return run_command(compare, argv)

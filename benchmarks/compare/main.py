"""Compare FP8 recipes with BF16 on a model and data: one command, one verdict.

python -m benchmarks.compare --variants bf16,delayed,current --output_dir DIR [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks.compare.conclude import conclude, exit_code, forget_verdict, write_verdict
from benchmarks.compare.jobs import Job, build_jobs, check_before_start
from benchmarks.records.launch import (
    Outcome,
    command_parser,
    folder_flag,
    is_begun,
    is_finished,
    launch,
    make_folder,
    refuse_in_use,
    run_command,
)
from benchmarks.records.runs import RunRecord, read_run
from benchmarks.records.variants import VARIANTS, given_settings, parse_variants
from benchmarks.report import verdict
from core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_INTERRUPTED, UserError, bad_setting
from core.redact import redact

PROG = "python -m benchmarks.compare"


def run_jobs(jobs: list[Job], *, gpus: int, folder: Path) -> tuple[int, dict[str, Outcome]]:
    """Run the unfinished jobs. Returns a nonzero code to end with at once, and the jobs that failed.

    A variant that failed is not repeated with other seeds.
    """
    failed: dict[str, Outcome] = {}
    for number, job in enumerate(jobs, 1):
        title = f"[{number}/{len(jobs)}] {job.name}"
        if job.seed_of in failed:
            continue
        if is_finished(job.cfg):
            print(f"{title}: finished already", flush=True)
            continue
        print(f"{title}: {job.folder}", flush=True)
        outcome = launch(job.cfg, gpus=gpus, log=folder / "logs" / f"{job.folder.name}.log")
        if outcome.stopped:
            print(f"stopped in {job.name}; the same command resumes", flush=True)
            return EXIT_INTERRUPTED, failed
        refuse_in_use(job.name, outcome)
        if outcome.code:
            failed[job.name] = outcome
            if number == 1:
                print(f"error: the reference {job.name} did not run: {outcome.reason}", file=sys.stderr)
                wrong = outcome.code == EXIT_BAD_SETTING
                return EXIT_BAD_SETTING if wrong else EXIT_FAILED, failed
    return 0, failed


def read_runs(jobs: list[Job], failed: dict[str, Outcome]) -> dict[str, RunRecord]:
    """Return the runs that did not fail, by job."""
    return {job.name: read_run(job.folder) for job in jobs if job.name not in failed}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the comparison's own flags, and the training flags."""
    epilog = "All other flags are train_fp8.py's (see its --help) and apply to every run."
    parser = command_parser(PROG, __doc__, epilog=epilog)
    parser.add_argument(
        "--variants",
        nargs="+",
        required=True,
        metavar="NAME[+SETTING=VALUE],...",
        help=f"what to compare: {', '.join(VARIANTS)}; bf16 has TE layers next to a TE recipe or bf16_hf",
    )
    parser.add_argument(
        "--output_dir", type=folder_flag, required=True, help="runs, verdict, figures; resumes"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs per run; over 1 through torchrun (default: 1)"
    )
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
        help="percent that a variant's training loss may exceed the reference's (default: %(default)s)",
    )
    parser.add_argument("--price_per_gpu_hour", type=float, help="adds a column of costs, in its currency")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a variant was skipped, too")
    args, training = parser.parse_known_args(argv)
    for name in ("gpus", "noise_seeds", "paired_seeds", "max_loss_gap", "price_per_gpu_hour"):
        value, least = getattr(args, name), int(name == "gpus")
        if value is not None and not least <= value < float("inf"):
            raise bad_setting(f"must be at least {least}", **{name: value})
    return args, training


def compare(argv: list[str]) -> int:
    args, training = parse(argv)
    folder = args.output_dir
    variants, given = parse_variants(args.variants), given_settings(training, PROG)
    jobs = build_jobs(variants, given, folder, args.noise_seeds, args.paired_seeds)
    if jobs[0].cfg.optim.max_steps == 0:
        raise bad_setting("trains nothing that could be compared; give 1 or more", max_steps=0)
    check_before_start(jobs, args.gpus)
    make_folder(folder)
    code, failed = run_jobs(jobs, gpus=args.gpus, folder=folder)
    from benchmarks.report import main as report  # matplotlib loads slowly, and errors need no figures

    if code:
        if jobs[0].name in failed and is_begun(jobs[0].cfg):
            forget_verdict(folder)
            report.main([str(jobs[0].folder), "--output_dir", str(folder)])
        return code
    jobs = [job for job in jobs if job.seed_of not in failed]
    runs = read_runs(jobs, failed)
    reported = list(runs.values()), runs[jobs[0].name], folder
    try:
        limits = {"max_loss_gap": args.max_loss_gap, "price": args.price_per_gpu_hour}
        result, rows = conclude(jobs, runs, failed, **limits)
    except UserError:
        forget_verdict(folder)
        report.write(*reported)  # the curves show more than an error line
        raise
    limit = write_verdict(result, rows, folder, redact(shlex.join([*PROG.split(), *argv])))
    baselines = {runs[j.name].folder: runs.get(j.against) for j in jobs if j.against and j.name in runs}
    drawn = report.write(*reported, verdict.Verdict(rows, limit, result["notes"], baselines))
    if jobs[0].cfg.log.use_wandb:
        summary = {name: value for name, value in result.items() if name != "variants"}
        report.upload(folder, jobs[0].cfg.log, reported[0], drawn, rows, summary)
    return exit_code(rows, failed, strict=args.strict)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all variants pass; 1 one fails; 2 bad setting; 75 interrupted, can be resumed."""
    return run_command(compare, argv)

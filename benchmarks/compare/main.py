"""Train a model in BF16 and FP8, and compare loss, speed and memory: PASS or FAIL for each recipe.

python -m benchmarks.compare --variants bf16,delayed,current --output_dir DIR [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from pathlib import Path

from fp8_suite.benchmarks.compare.jobs import Job, build_jobs, check_before_start
from fp8_suite.benchmarks.compare.verdict import COLUMNS, conclude, exit_code, write_verdict
from fp8_suite.benchmarks.records.launch import (
    Outcome,
    command_parser,
    folder_flag,
    is_begun,
    is_finished,
    launch,
    refuse_overwriting,
    run_command,
)
from fp8_suite.benchmarks.records.runs import RunRecord, read_run
from fp8_suite.benchmarks.records.variants import VARIANTS, given_settings, parse_variants, split_flags
from fp8_suite.benchmarks.report.tables import make_table
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, UserError, bad_setting
from fp8_suite.core.redact import redact

PROG = "python -m benchmarks.compare"


def run_jobs(jobs: list[Job], *, gpus: int, folder: Path) -> dict[str, Outcome]:
    """Run all jobs that are not finished; return the failed ones by name.

    A variant that fails is not repeated with other seeds. If the reference fails, nothing else runs.
    """
    failed: dict[str, Outcome] = {}
    for number, job in enumerate(jobs, 1):
        if job.seed_of in failed or jobs[0].name in failed:
            continue
        finished = is_finished(job.cfg)
        print(
            f"[{number}/{len(jobs)}] {job.name}: {'already finished' if finished else job.folder}", flush=True
        )
        if not finished:
            outcome = launch(job.cfg, gpus=gpus, log=folder / "logs" / f"{job.folder.name}.log")
            failed |= {job.name: outcome} if outcome.code else {}
    return failed


def read_runs(jobs: list[Job], failed: dict[str, Outcome]) -> dict[str, RunRecord]:
    """Return the records of all jobs that did not fail, by job name."""
    return {job.name: read_run(job.folder) for job in jobs if job.name not in failed}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed flags of the comparison, and the remaining training flags."""
    parser = command_parser(PROG, __doc__, trains=True)
    names = f"recipes to compare: {', '.join(VARIANTS)}; include bf16 or bf16_hf"
    variant = "NAME[+SETTING=VALUE],..."
    parser.add_argument("--variants", nargs="+", required=True, metavar=variant, help=names)
    output = "folder for runs, verdict and figures; the same command resumes"
    parser.add_argument("--output_dir", type=folder_flag, required=True, metavar="DIR", help=output)
    numbers = {
        "gpus": (int, 1, "GPUs per run (default: 1)"),
        "noise_seeds": (int, 2, "further BF16 runs with other seeds, which measure the noise (default: 2)"),
        "paired_seeds": (int, 0, "further seeds for every recipe; gaps are means over seeds (default: 0)"),
        "max_loss_gap": (float, 0.5, "PASS: the loss is at most X percent above BF16's (default: 0.5)"),
        "price_per_gpu_hour": (float, None, "price in any currency; adds a column with costs"),
    }
    for name, (kind, default, text) in numbers.items():
        metavar = "N" if kind is int else "X"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 also if this machine cannot run a recipe"
    )
    args, training = split_flags(parser, argv)
    for name in numbers:
        value, least = getattr(args, name), int(name == "gpus")
        if value is not None and not least <= value < math.inf:
            raise bad_setting(f"must be at least {least}", **{name: value})
    return args, training


def compare(argv: list[str]) -> int:
    args, training = parse(argv)
    folder = args.output_dir
    variants, given = parse_variants(args.variants), given_settings(training, PROG)
    jobs = build_jobs(variants, given, folder, args.noise_seeds, args.paired_seeds)
    if jobs[0].cfg.optim.max_steps == 0:
        raise bad_setting("nothing is trained, so nothing can be compared; use at least 1", max_steps=0)
    refuse_overwriting(folder)
    check_before_start(jobs, args.gpus)
    os.environ.setdefault("WANDB_RUN_GROUP", folder.resolve().name)
    failed = run_jobs(jobs, gpus=args.gpus, folder=folder)
    from fp8_suite.benchmarks.report import main as report  # imports matplotlib, which is slow
    from fp8_suite.benchmarks.report.page import Verdict

    for name in ("verdict.json", "verdict.md"):  # delete the verdict of an earlier call
        (folder / name).unlink(missing_ok=True)
    reference = jobs[0]
    if outcome := failed.get(reference.name):
        if is_begun(reference.cfg):
            run = read_run(reference.folder)
            report.write([run], run, folder)
        code = EXIT_BAD_SETTING if outcome.code == EXIT_BAD_SETTING else EXIT_FAILED
        raise UserError(f"the reference {reference.name} failed: {outcome.reason}", exit_code=code)
    jobs = [job for job in jobs if job.seed_of not in failed]
    runs = read_runs(jobs, failed)
    reported = list(runs.values()), runs[reference.name], folder
    try:
        limits = {"max_loss_gap": args.max_loss_gap, "price": args.price_per_gpu_hour}
        result, rows = conclude(jobs, runs, failed, **limits)
    except UserError:
        report.write(*reported)  # its loss curves help to find the cause
        raise
    limit = write_verdict(result, rows, folder, redact(shlex.join([*PROG.split(), *argv])))
    baselines = {runs[j.name].folder: runs.get(j.against) for j in jobs if j.against and j.name in runs}
    table = make_table(COLUMNS, rows)
    tables, drawn = report.write(*reported, Verdict(table, limit, result["notes"], baselines))
    if (log := reference.cfg.log).use_wandb:
        summary = {name: value for name, value in result.items() if name != "variants"}
        reasons = make_table(COLUMNS | {"reason": (lambda row: row.reason, "{}")}, rows)
        report.upload(folder, log, tables | {"verdict": reasons}, drawn, summary)
    return exit_code(rows, failed, strict=args.strict)


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Exit codes: 0 all pass, 1 a variant fails, 2 bad setting, 75 interrupted."""
    return run_command(compare, argv)

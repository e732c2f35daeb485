"""Compare recipes with BF16 by loss, speed and memory: PASS, FAIL or INCONCLUSIVE for each.

python -m benchmarks.compare --variants bf16,delayed,current --output_dir DIR [any flags of train_fp8.py]
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.compare.variant_runs import build_runs, check_before_start
from fp8_suite.benchmarks.compare.verdict import conclude, exit_code, write_verdict
from fp8_suite.benchmarks.launch.grid import Failures, GridRun, train_all
from fp8_suite.benchmarks.launch.variants import VARIANTS, parse_flags, parse_variants
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.report.judge import MAX_LOSS_GAP
from fp8_suite.core.cli import add_number, as_command, command_parser
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, UserError
from fp8_suite.core.redact import redact

PROG = "python -m benchmarks.compare"


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags of the comparison, and the training settings."""
    parser = command_parser(PROG, __doc__, trains=True)
    names = f"recipes to compare: {', '.join(VARIANTS)}; include bf16 or bf16_hf"
    variant = "NAME[+SETTING=VALUE],..."
    parser.add_argument("--variants", nargs="+", required=True, metavar=variant, help=names)
    output = "folder for runs, verdict and figures; the same command resumes"
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help=output)
    paired = "further seeds for every variant; more can be added to a finished comparison"
    noise = "further seeds of the reference alone, to show how far its loss moves"
    limit = "limit in percent: PASS if the loss surely is at most X above BF16's"
    price = "price in any currency; adds a column with costs"
    add_number(parser, "gpus", 1, "GPUs per run")
    add_number(parser, "paired_seeds", 2, paired, minimum=0)
    add_number(parser, "noise_seeds", 0, noise, minimum=0)
    add_number(parser, "max_loss_gap", MAX_LOSS_GAP, limit, kind=float, minimum=0)
    add_number(parser, "price_per_gpu_hour", None, price, kind=float, minimum=0)
    strict = "exit with 1 also if a recipe cannot run here or is not decided"
    parser.add_argument("--strict", action="store_true", help=strict)
    return parse_flags(parser, argv)


@as_command
def main(argv: list[str]) -> int:
    """Run the comparison. Exit codes: 0 no variant fails, 1 one fails, 2 bad setting, 75 interrupted."""
    args, common = parse(argv)
    folder, seeds = args.output_dir, {"paired_seeds": args.paired_seeds, "noise_seeds": args.noise_seeds}
    planned = build_runs(parse_variants(args.variants), common, folder, gpus=args.gpus, **seeds)
    reference = planned[0]
    check_before_start(planned)

    def why_skip(run: GridRun, failures: Failures) -> str | None:
        """Return why a run is pointless: the reference, or the variant with its first seed, failed."""
        return next((f"{name} failed" for name in (reference.name, run.variant) if name in failures), None)

    failures = train_all(planned, folder, why_skip)
    for name in ("verdict.json", "verdict.md"):  # delete the verdict of an earlier call
        (folder / name).unlink(missing_ok=True)
    if outcome := failures.get(reference.name):
        code = EXIT_BAD_SETTING if outcome.code == EXIT_BAD_SETTING else EXIT_FAILED
        raise UserError(f"the reference {reference.name} failed: {outcome.reason}", exit_code=code)
    planned = [run for run in planned if run.first or run.variant not in failures]
    failures = {run.name: failures[run.name] for run in planned if run.name in failures}
    records = {run.name: read_run(run.folder) for run in planned if run.name not in failures}
    limit, price = args.max_loss_gap, args.price_per_gpu_hour
    verdict = conclude(planned, records, failures, limit)
    command = redact(shlex.join([*PROG.split(), *argv]))
    write_verdict(verdict, records, folder, command=command, max_loss_gap=limit, price=price)
    from fp8_suite.benchmarks.report import main as report  # imports matplotlib, which is slow

    report.write([*records.values()], verdict, folder, price)
    if (log := reference.cfg.log).use_wandb:
        config = {"answer": verdict.answer, "max_loss_gap_percent": limit}
        report.upload(folder, log, config)
    return exit_code(verdict, failures, strict=args.strict)

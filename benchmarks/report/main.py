"""Report on training runs, finished or not: tables, figures and an HTML page.

python -m benchmarks.report RUN [RUN ...] [--reference RUN] [--output_dir DIR]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from fp8_suite.benchmarks.records.runs import RunRecord, bad_input, find_runs, read_run
from fp8_suite.benchmarks.records.table import read_table, read_texts
from fp8_suite.benchmarks.report import figures, page
from fp8_suite.benchmarks.report.gaps import pick_reference
from fp8_suite.benchmarks.report.judge import Verdict, gaps_over_time, judge_runs, verdict_table, with_seeds
from fp8_suite.benchmarks.report.tables import labels, markdown, provenance, report_tables
from fp8_suite.core.cli import as_command, command_parser
from fp8_suite.training.tracking.settings import LogConfig
from fp8_suite.training.tracking.wandb_writer import start_wandb, wandb_id


def write(runs: list[RunRecord], verdict: Verdict, target: Path | None, price: float | None = None) -> None:
    """Print the table of runs; write figures and report.html to `target`. `price` is per GPU-hour."""
    tables = report_tables(runs, price)
    if (over_time := gaps_over_time(with_seeds(verdict.results))).rows:
        tables["loss_gap"] = over_time
        print(markdown(*over_time), end="\n\n")
    print(markdown(*tables["runs"]), end="\n\n")
    for run, name in labels(runs).items():
        print(f"- {name}: {provenance(run)}")
    if target is None:
        print("\nno figures and no report.html: several runs need --output_dir")
        return
    target.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(figures.STYLE):
        drawn = figures.draw_all(runs, verdict.results)
        print()
        for name, (_, caption, figure) in drawn.items():
            figure.savefig(target / f"{name}.png", dpi=150)
            print(f"{target / name}.png: {caption}")
        html = page.render(runs, tables, drawn, verdict)
    if "loss" not in drawn:
        print("\nno loss.png: no loss was logged")
    (target / "report.html").write_text(html, encoding="utf-8")
    print(f"\nreport: {target / 'report.html'}")


def upload(folder: Path, cfg: LogConfig, config: dict[str, Any] | None = None) -> None:
    """Log report.html of `folder` as a W&B run of the job type `report`.

    Uploading again updates the same W&B run. If W&B fails, it is a warning.
    """
    try:
        import wandb

        run = start_wandb(
            cfg,
            folder,
            name=f"{folder.resolve().name}-{'verdict' if config else 'report'}",
            id=wandb_id(folder, name="wandb_report_id.txt")[0],
            resume="allow",
            job_type="report",
            config=config,
        )
        run.log({"report/page": wandb.Html((folder / "report.html").read_text(encoding="utf-8"))})
        run.finish()
    except Exception as error:
        print(f"WARNING: the report of {folder} was not uploaded to W&B ({error})", file=sys.stderr)


def read_all(folders: list[Path], reference: Path | None) -> tuple[list[RunRecord], RunRecord]:
    """Read the runs in the folders. Returns all runs, the reference included, and the reference."""
    paths = [path for folder in folders for path in find_runs(folder)]
    runs = {path.resolve(): read_run(path) for path in [*paths, *([reference] if reference else [])]}
    records = list(runs.values())
    return records, runs[reference.resolve()] if reference else pick_reference(records)


@as_command
def main(argv: list[str]) -> int:
    """Write the report. Exit codes: 0 done, 2 a folder is not a run folder."""
    parser = command_parser("python -m benchmarks.report", __doc__)
    runs = "run folder, or a folder that contains runs"
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=runs)
    study = "report on a recorded study of benchmarks/results instead"
    parser.add_argument("--study", metavar="NAME", help=study)
    reference = "run to compare the other runs' losses with (default: the first BF16 run, else the first run)"
    parser.add_argument("--reference", type=Path, metavar="RUN", help=reference)
    output = "folder for figures and report.html (default: the run folder; required for several runs)"
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help=output)
    wandb = "upload the report to W&B, in the reference's project"
    parser.add_argument("--use_wandb", action="store_true", help=wandb)
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.study):
        raise bad_input("give either run folders or --study")
    if args.study:
        runs = read_table(args.study)
        for name, text in read_texts(args.study).items():
            print(f"{name}:\n\n{text}\n")
        if not runs:
            return 0
        reference = pick_reference(runs)
    else:
        runs, reference = read_all(args.runs, args.reference)
    target = args.output_dir or (args.runs[0] if len(runs) == 1 and args.runs else None)
    if target is None and args.use_wandb:
        raise bad_input("--use_wandb: several runs need --output_dir; add it")
    verdict = judge_runs(runs, reference)
    if verdict.answer:
        print(verdict.answer, markdown(*verdict_table(with_seeds(verdict.results))), sep="\n\n", end="\n\n")
    write(runs, verdict, target)
    if args.use_wandb:
        upload(target, LogConfig(use_wandb=True, wandb_project=reference.setting("wandb_project")))
    return 0

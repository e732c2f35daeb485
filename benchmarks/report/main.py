"""Table, figures and an HTML page of finished, stopped or crashed runs, read from their run folders alone.

python -m benchmarks.report RUN [RUN ...] [--reference RUN] [--output_dir DIR]
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.records.launch import folder_flag, make_folder, run_command
from benchmarks.records.runs import RunRecord, provenance, read_run, run_folders
from benchmarks.report import figures, markdown, tables
from benchmarks.report import html as html_report
from benchmarks.report.fp8_heatmap import draw_casts, last_casts
from benchmarks.report.gaps import comparison, pick_reference
from benchmarks.report.verdict import Verdict
from benchmarks.report.wandb_report import upload
from core.cli import OneLineParser
from training.tracking.settings import LogConfig


def table(runs: list[RunRecord]) -> str:
    """Markdown: one row a run, and under it where, when and with which versions each one ran."""
    names = [run.name if run.summary is not None else f"{run.name} (unfinished)" for run in runs]
    columns = {"run": names} | tables.shown(tables.RUNS, runs)
    made = markdown.table(list(columns), map(list, zip(*columns.values(), strict=True)))
    return "\n".join([made, "", *(f"- {run.name}: {provenance(run)}" for run in runs)])


def draw(
    runs: list[RunRecord], reference: RunRecord, baselines: dict[Path, RunRecord | None]
) -> dict[str, tuple[str, Figure]]:
    """{file: (what it shows, figure)}, as far as the runs have logged what they show."""
    found = {}
    if any(run.series("train/loss") or run.series("eval/loss") for run in runs):
        found["loss.png"] = ("loss curve", figures.draw_losses(runs))
        found["loss_log.png"] = ("loss curve, logarithmic", figures.draw_losses(runs, log=True))
    against = comparison(runs, reference, baselines)
    if against.pairs:
        found["gap.png"] = ("gap to the reference", figures.draw_gap(runs, against))
    for axis in figures.AXES:
        lines = figures.scaling(runs, axis)
        for rate, (_, _, word) in figures.RATES.items():
            if lines and (figure := figures.draw_scaling(lines, axis, rate)):
                found[f"{word}_by_{axis.replace(' ', '_').lower()}.png"] = (f"{rate} by {axis}", figure)
    if figures.precisions(runs):
        found["coverage.png"] = ("precision coverage", figures.draw_coverage(runs))
    for number, run in enumerate(runs, 1):
        if casts := last_casts(run.records):
            file = "fp8_stats.png" if len(runs) == 1 else f"fp8_stats_{number}_{run.name}.png"
            found[file] = ("FP8 statistics", draw_casts(run.name, *casts))
    return found


def write_figures(
    runs: list[RunRecord], reference: RunRecord, target: Path, baselines: dict[Path, RunRecord | None]
) -> list[Path]:
    """The figures as PNGs into the folder `target`; returns their paths."""
    with matplotlib.rc_context(figures.PAPER):
        found = draw(runs, reference, baselines)
        for file, (what, figure) in found.items():
            figure.savefig(target / file, dpi=150)
            print(f"\n{what}: {target / file}")
    if "loss.png" not in found:
        print("\nno loss.png: no loss was logged")
    return [target / file for file in found]


def write(
    runs: list[RunRecord], reference: RunRecord, target: Path, verdict: Verdict | None = None
) -> list[Path]:
    """Print the table; figures and report.html into the folder `target`, with a comparison's verdict.

    Returns the figures' paths.
    """
    print(table(runs))
    drawn = write_figures(runs, reference, target, verdict.baselines if verdict else {})
    page = html_report.page(runs, reference, verdict)
    (target / "report.html").write_text(page, encoding="utf-8")
    print(f"\nreport: {target / 'report.html'}")
    return drawn


def _runs_in(folder: Path) -> list[Path]:
    """`folder`, or the runs below it where it is none; what holds no run either is left to `read_run`."""
    return [folder] if (folder / "config.json").exists() else run_folders(folder) or [folder]


def read_all(folders: list[Path], reference: Path | None) -> tuple[list[RunRecord], RunRecord]:
    """The runs and their reference, which joins them if need be; ValueError for what is no run."""
    found: dict[Path, RunRecord] = {}
    for folder in [*chain.from_iterable(map(_runs_in, folders)), *([reference] if reference else [])]:
        if folder.resolve() not in found:
            found[folder.resolve()] = read_run(folder)
    runs = list(found.values())
    return runs, found[reference.resolve()] if reference else pick_reference(runs)


def report(argv: list[str]) -> int:
    parser = OneLineParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder, or one that holds some"
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="RUN",
        help="run that losses are set against; default: the first in BF16, else the first",
    )
    parser.add_argument(
        "--output_dir",
        type=folder_flag,
        help="where page and figures go; default: the folder of a single run",
    )
    parser.add_argument("--use_wandb", action="store_true", help="log tables, figures and page to W&B, too")
    parser.add_argument("--wandb_project", help="default: the reference's; the group is always its own")
    modes = ("online", "offline", "disabled")
    parser.add_argument("--wandb_mode", choices=modes, help="default: WANDB_MODE, else online")
    args = parser.parse_args(argv)
    runs, reference = read_all(args.runs, args.reference)
    target = args.output_dir or (args.runs[0] if len(runs) == 1 else None)
    if target is None:
        if args.use_wandb:
            raise ValueError("--use_wandb: several runs need --output_dir for what is uploaded; add it")
        print(table(runs))
        print("\nno report.html and loss.png: several runs need --output_dir")
        return 0
    make_folder(target)
    drawn = write(runs, reference, target)
    if args.use_wandb:
        cfg = LogConfig(
            use_wandb=True,
            wandb_project=args.wandb_project or reference.setting("wandb_project"),
            wandb_group=reference.setting("wandb_group"),
            wandb_mode=args.wandb_mode,
        )
        upload(target, cfg, runs, drawn)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Print the table, write page and figures; exit code 2 for a folder that is no run."""
    return run_command(report, argv)

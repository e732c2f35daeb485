"""Report on finished, stopped or crashed runs: a table, figures and an HTML page.

python -m benchmarks.report RUN [RUN ...] [--reference RUN] [--output_dir DIR]
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.records.launch import command_parser, folder_flag, run_command
from benchmarks.records.runs import RunRecord, bad_input, find_runs, read_run
from benchmarks.records.table import read_table
from benchmarks.report import figures, markdown, page
from benchmarks.report.gaps import compare_losses, pick_reference
from benchmarks.report.tables import Table, provenance, report_tables
from benchmarks.report.wandb_report import upload
from training.tracking.settings import LogConfig


def write(
    runs: list[RunRecord], reference: RunRecord, target: Path | None, verdict: page.Verdict | None = None
) -> tuple[dict[str, Table], list[Path]]:
    """Print the runs, and write figures and report.html to `target`. Returns tables and figure paths."""
    tables = report_tables(runs)
    print(markdown.table(tables["runs"].headings, tables["runs"].texts), end="\n\n")
    for run in runs:
        print(f"- {run.name}: {provenance(run)}")
    if target is None:
        print("\nno report.html and loss.png: several runs need --output_dir")
        return tables, []
    target.mkdir(parents=True, exist_ok=True)
    losses = compare_losses(runs, reference, verdict.baselines if verdict else {})
    with matplotlib.rc_context(figures.STYLE):
        drawn = figures.draw_all(runs, losses)
        paths = [target / f"{name}.png" for name in drawn]
        for path, (_, caption, figure) in zip(paths, drawn.values(), strict=True):
            figure.savefig(path, dpi=150)
            print(f"\n{path}: {caption}")
        html = page.render(runs, tables, drawn, losses, verdict)
    if "loss" not in drawn:
        print("\nno loss.png: no loss was logged")
    (target / "report.html").write_text(html, encoding="utf-8")
    print(f"\nreport: {target / 'report.html'}")
    return tables, paths


def read_all(folders: list[Path], reference: Path | None) -> tuple[list[RunRecord], RunRecord]:
    """Return the runs in or below the folders, including the reference, and the reference."""
    paths = [path for folder in folders for path in find_runs(folder) or [folder]]
    runs = {path.resolve(): read_run(path) for path in [*paths, *([reference] if reference else [])]}
    found = list(runs.values())
    return found, runs[reference.resolve()] if reference else pick_reference(found)


def report(argv: list[str]) -> int:
    parser = command_parser("python -m benchmarks.report", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folder, or a folder of runs")
    parser.add_argument("--study", metavar="NAME", help="recorded runs of a study, from benchmarks/results")
    reference = "baseline of the losses; default: first BF16 run, else first"
    parser.add_argument("--reference", type=Path, metavar="RUN", help=reference)
    output = "folder of page and figures; default: that of a single run"
    parser.add_argument("--output_dir", type=folder_flag, help=output)
    parser.add_argument("--use_wandb", action="store_true", help="log tables, figures and page to W&B too")
    parser.add_argument("--wandb_project", help="default: the reference's; the group is always its own")
    modes = ("online", "offline", "disabled")
    parser.add_argument("--wandb_mode", choices=modes, help="default: WANDB_MODE, else online")
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.study):
        raise bad_input("give run folders, or --study")
    if args.study:
        runs = read_table(args.study)
        reference = pick_reference(runs)
    else:
        runs, reference = read_all(args.runs, args.reference)
    target = args.output_dir or (args.runs[0] if len(runs) == 1 and args.runs else None)
    if target is None and args.use_wandb:
        raise bad_input("--use_wandb: several runs need --output_dir for the uploaded files; add it")
    tables, drawn = write(runs, reference, target)
    if args.use_wandb:
        cfg = LogConfig(
            use_wandb=True,
            wandb_project=args.wandb_project or reference.setting("wandb_project"),
            wandb_group=reference.setting("wandb_group"),
            wandb_mode=args.wandb_mode,
        )
        upload(target, cfg, tables, drawn)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Write the report. Exit code 2 if a folder is not a run folder."""
    return run_command(report, argv)

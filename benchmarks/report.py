"""Table, figures and an HTML page of finished, stopped or crashed runs, read from their run folders alone.

python -m benchmarks.report RUN [RUN ...] [--reference RUN] [--output_dir DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks import figures, html_report, markdown
from benchmarks.fp8_heatmap import draw_casts, last_casts
from benchmarks.gaps import comparison, pick_reference
from benchmarks.launch import make_folder, run_command
from benchmarks.runs import RunRecord, provenance, read_run, run_folders
from training.config import OneLineParser

Cell = Callable[[RunRecord, list[RunRecord]], str]  # of a run, beside all runs of the report


def _shown(format_: str, *names: str) -> Cell:
    """A cell of one or more values, with a dash for each that the run does not have."""

    def cell(run: RunRecord, _: list[RunRecord]) -> str:
        values = [run.value(name) for name in names]
        return " / ".join("-" if value is None else format_.format(value) for value in values)

    return cell


def _name(run: RunRecord, _: list[RunRecord]) -> str:
    return run.name if run.summary is not None else f"{run.name} (unfinished)"


def _precision(run: RunRecord, _: list[RunRecord]) -> str:
    mixed = run.value("mixed_precision")
    text = mixed if run.precision == mixed else f"{mixed} {run.precision}"
    if run.value("fallback_reason"):
        text += f" (asked for {run.value('requested_recipe')})"
    if run.value("emulated"):
        text += " (emulated)"
    return f"{text}, {'TE' if run.value('use_te') else 'HF'} layers"


def _per_gpu(run: RunRecord, _: list[RunRecord]) -> str:
    return "-" if run.tokens_per_gpu is None else f"{run.tokens_per_gpu:,.0f}"


def _scaling(run: RunRecord, runs: list[RunRecord]) -> str:
    """Tokens/s per GPU against the one-GPU run of the same work; a dash unless there is exactly one."""
    alone = [other for other in runs if other.gpus == 1 and other.work == run.work]
    if run.gpus < 2 or len(alone) != 1 or not run.tokens_per_gpu or not alone[0].tokens_per_gpu:
        return "-"
    return f"{run.tokens_per_gpu / alone[0].tokens_per_gpu:.1%}"


COLUMNS: dict[str, Cell] = {
    "run": _name,
    "model": _shown("{}", "model_name"),
    "precision": _precision,
    "GPUs": lambda run, _: str(run.gpus or "-"),
    "mode": lambda run, _: run.mode or "-",
    "steps": _shown("{:,}", "steps"),
    "train loss": _shown("{:.4f}", "train_loss"),
    "train loss, mean of last 10 %": _shown("{:.4f}", "train_loss_tail_mean"),
    "eval loss": _shown("{:.4f}", "eval_loss"),
    "perplexity": _shown("{:.2f}", "eval_perplexity"),
    "tokens/s": _shown("{:,.0f}", "tokens_per_second"),
    "tokens/s per GPU": _per_gpu,
    "scaling": _scaling,
    "TFLOP/s per GPU": _shown("{:,.1f}", "model_tflops_per_gpu"),
    "MFU (of BF16 / FP8 peak)": _shown("{:.1%}", "mfu_bf16", "mfu_fp8"),
    "peak GB": _shown("{:.1f}", "peak_memory_gb"),
    "GPU-hours": _shown("{:.2f}", "gpu_hours"),
}


def table(runs: list[RunRecord]) -> str:
    """Markdown: one row a run, and under it where, when and with which versions each one ran."""
    made = markdown.table(list(COLUMNS), [[cell(run, runs) for cell in COLUMNS.values()] for run in runs])
    return "\n".join([made, "", *(f"- {run.name}: {provenance(run)}" for run in runs)])


def draw(runs: list[RunRecord], reference: RunRecord) -> dict[str, tuple[str, Figure]]:
    """{file: (what it shows, figure)}, as far as the runs have logged what they show."""
    found = {}
    if any(run.series("train/loss") or run.series("eval/loss") for run in runs):
        found["loss.png"] = ("loss curve", figures.draw_losses(runs))
        found["loss_log.png"] = ("loss curve, logarithmic", figures.draw_losses(runs, log=True))
    against = comparison(runs, reference)
    if against.runs:
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


def write_figures(runs: list[RunRecord], reference: RunRecord, target: Path) -> None:
    """The figures as PNGs into the folder `target`."""
    with matplotlib.rc_context(figures.PAPER):
        found = draw(runs, reference)
        for file, (what, figure) in found.items():
            figure.savefig(target / file, dpi=150)
            print(f"\n{what}: {target / file}")
    if "loss.png" not in found:
        print("\nno loss.png: no loss was logged")


def write_page(runs: list[RunRecord], reference: RunRecord, target: Path) -> None:
    """report.html into the folder `target`."""
    rows = {name: [cell(run, runs) for run in runs] for name, cell in COLUMNS.items()}
    page = html_report.page(runs, reference, rows, [provenance(run) for run in runs])
    (target / "report.html").write_text(page, encoding="utf-8")
    print(f"\nreport: {target / 'report.html'}")


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
        "--output_dir", type=Path, help="where page and figures go; default: the folder of a single run"
    )
    args = parser.parse_args(argv)
    runs, reference = read_all(args.runs, args.reference)
    print(table(runs))
    target = args.output_dir or (args.runs[0] if len(runs) == 1 else None)
    if target is None:
        print("\nno report.html and loss.png: several runs need --output_dir")
        return 0
    make_folder(target)
    write_figures(runs, reference, target)
    write_page(runs, reference, target)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Print the table, write page and figures; exit code 2 for a folder that is no run."""
    return run_command(report, argv)


if __name__ == "__main__":
    sys.exit(main())

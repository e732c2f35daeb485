"""Draw the README's chart from the recorded runs: speed at the same work, and loss in FP8 and BF16.

python -m benchmarks.chart docs/images/overview.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import matplotlib
from fp8_suite.benchmarks.records.launch import command_parser, run_command
from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.records.table import read_table
from fp8_suite.benchmarks.report.figures import PALETTE, STYLE, draw_bars
from fp8_suite.benchmarks.report.gaps import smooth
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

# Each chart compares runs of one work: model, tokens a step, moments and GPU. Label -> study and start of the
# names of its repeats.
STACKS = {
    "transformers, BF16": "h200-fused-adamw/transformers-bf16",
    "this suite, BF16": "h200-fused-adamw/Llama-3.1-8B-8192-hf-bf16",
    "transformers, torchao": "h200-fused-adamw/transformers+torchao-tensorwise",
    "this suite, torchao": "h200-fused-adamw/Llama-3.1-8B-8192-hf-tensorwise",
}
PRECISIONS = {
    "BF16": "throughput/Llama-3.1-8B-bf16-8192-1x8-81b2ad8",
    "FP8, delayed": "throughput/Llama-3.1-8B-delayed-8192-1x8-bd97d73",
    "FP8, fastest": "throughput/Llama-3.1-8B-delayed-8192-1x8-fast-head-81b2ad8",
}
CURVES = {"bf16": ("BF16", PALETTE[0], "-"), "delayed": ("FP8, delayed", PALETTE[1], "--")}


def find_runs(start: str) -> list[RunRecord]:
    """Return the recorded runs whose study and name begin with `start`."""
    return [run for run in read_table(start.split("/")[0]) if run.folder.as_posix().startswith(start)]


def draw_speed(axes: Axes, bars: dict[str, str], title: str) -> None:
    """Draw the median tokens/s of each bar's runs, FP8 and torchao in another colour."""
    rates = [median(run.value("tokens_per_second") for run in find_runs(start)) for start in bars.values()]
    colors = [PALETTE["bf16" not in start] for start in bars.values()]
    draw_bars(axes, list(bars), rates, [f"{rate:,.0f}" for rate in rates], colors)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(title=title, xlabel="tokens/s", xlim=(0, 1.25 * max(rates)))


def draw_loss(axes: Axes) -> None:
    runs = {run.name: run for run in read_table("thousand_steps/te")}
    for name, (label, color, dashes) in CURVES.items():
        steps, losses = zip(*runs[name].series("train/loss"), strict=True)
        shown = len(steps) - len(steps) // 20  # the last means are over few points
        axes.plot(steps[:shown], smooth(list(losses))[:shown], dashes, color=color, label=label)
    axes.set(title="Llama 3.2 1B on GSM8K", xlabel="step", ylabel="smoothed training loss")
    axes.legend()


def chart(argv: list[str]) -> int:
    parser = command_parser("python -m benchmarks.chart", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="image to write, .svg or .png")
    target = parser.parse_args(argv).file
    if target.suffix not in (".svg", ".png"):
        raise UserError(f"{target}: neither .svg nor .png; rename it", exit_code=EXIT_BAD_SETTING)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 3.4), layout="constrained")
        stacks, precisions, loss = figure.subplots(1, 3)
        draw_speed(stacks, STACKS, "Llama 3.1 8B, 8,192 tokens a step")
        draw_speed(precisions, PRECISIONS, "Llama 3.1 8B, 65,536 tokens a step")
        draw_loss(loss)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(chart, sys.argv[1:]))

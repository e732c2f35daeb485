"""Draw the README's chart from the recorded runs: the same work in several stacks, and losses.

python -m benchmarks.chart docs/images/overview.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.records.table import read_table
from fp8_suite.benchmarks.report.figures import PALETTE, STYLE, draw_bars
from fp8_suite.benchmarks.report.gaps import smooth
from fp8_suite.core.cli import as_command, command_parser
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

STUDY = "same-work"
BARS = {  # label -> run of STUDY; the first is the one that the others are compared with
    "transformers": "transformers-bf16",
    "this suite": "suite-bf16",
    "transformers + torchao": "transformers-torchao-tensorwise",
    "transformers + TE": "transformers-te-delayed-flash4",
    "this suite, same recipe": "suite-fp8",
    "this suite, fastest": "suite-fp8-fast",
}
PALE = 0.55  # share of colour in other stacks' bars, on white
CHART_STYLE = {"axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False}
CURVES = {"bf16-seed42": ("BF16", PALETTE[0], "-"), "delayed-seed42": ("FP8, delayed", PALETTE[1], "--")}


def bar_color(run: RunRecord) -> tuple[float, ...]:
    """Return blue for BF16 and orange for FP8, paler for other stacks."""
    share = 1.0 if run.name.startswith("suite") else PALE
    return tuple(1 - share * (1 - part) for part in to_rgb(PALETTE[run.precision != "bf16"]))


def draw_speed(axes: Axes) -> None:
    """Draw the tokens/s of every stack, and its factor over the first."""
    recorded = {run.name: run for run in read_table(STUDY)}
    runs = [recorded[name] for name in BARS.values()]
    rates = [run.value("tokens_per_second") for run in runs]
    colors = [bar_color(run) for run in runs]
    factors = ["", *(f" ({rate / rates[0]:.2f}x)" for rate in rates[1:])]
    texts = [f"{rate:,.0f}{factor}" for rate, factor in zip(rates, factors, strict=True)]
    draw_bars(axes, list(BARS), rates, texts, colors)
    axes.legend(handles=[Patch(color=PALETTE[0], label="BF16"), Patch(color=PALETTE[1], label="FP8")])
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(title="Llama 3.1 8B on one H200, 65,536 tokens a step", xlabel="tokens/s")


def draw_loss(axes: Axes) -> None:
    runs = {run.name: run for run in read_table("five_thousand_steps")}
    for name, (label, color, dashes) in CURVES.items():
        steps, losses = zip(*runs[name].series("train/loss"), strict=True)
        shown = len(steps) - len(steps) // 20  # the last means are over few points
        axes.plot(steps[:shown], smooth(list(losses))[:shown], dashes, color=color, label=label)
    axes.set(xlabel="step", ylabel="smoothed training loss", ylim=(0.5, 3.5))
    axes.set_title("Llama 3.2 1B, 61 M tokens, none twice")
    axes.legend()


@as_command
def main(argv: list[str]) -> int:
    parser = command_parser("python -m benchmarks.chart", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="image to write, .svg or .png")
    target = parser.parse_args(argv).file
    with matplotlib.rc_context(STYLE | CHART_STYLE):
        figure = Figure(figsize=(13, 3.4), layout="constrained")
        speed, loss = figure.subplots(1, 2, width_ratios=(3, 2))
        draw_speed(speed)
        draw_loss(loss)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())

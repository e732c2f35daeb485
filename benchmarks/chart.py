"""Draw the README's chart from the recorded runs: speed beside plain transformers, and loss in FP8 and BF16.

python -m benchmarks.chart docs/images/overview.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from fp8_suite.benchmarks.records.launch import command_parser, run_command
from fp8_suite.benchmarks.records.table import TABLE, read_table
from fp8_suite.benchmarks.report.figures import PALETTE, STYLE, draw_bars
from fp8_suite.benchmarks.report.gaps import smooth
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

PLAIN = dict.fromkeys(("fp8_fast_accumulation", "fp8_lm_head"))
FASTEST = dict.fromkeys(PLAIN, True)
# Label, kind and commit of the records in measurements.jsonl, their settings, colour.
BARS = (
    ("transformers, BF16", "peer", "", {"precision": "bf16"}, "0.6"),
    ("transformers + torchao, FP8", "peer", "", {"precision": "tensorwise"}, "0.6"),
    ("this suite, BF16", "throughput", "81b2ad8", PLAIN | {"mixed_precision": "bf16"}, PALETTE[0]),
    ("this suite, FP8", "throughput", "bd97d73", PLAIN | {"mixed_precision": "fp8"}, PALETTE[1]),
    ("this suite, FP8, fastest", "throughput", "81b2ad8", FASTEST | {"mixed_precision": "fp8"}, PALETTE[1]),
)
COMMON = {"model_name": "meta-llama/Llama-3.1-8B", "max_seq_length": 8192, "batch_size": 1}
CURVES = {"bf16": ("BF16", PALETTE[0], "-"), "delayed": ("FP8, delayed scaling", PALETTE[1], "--")}


def tokens_per_second(kind: str, commit: str, settings: dict[str, Any]) -> float:
    """Return the median over the recorded measurements with these settings."""
    lines = (TABLE.parent / "measurements.jsonl").read_text(encoding="utf-8").splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == kind]
    found = [record for record in found if record.get("commit", "").startswith(commit)]
    found = [r for r in found if (COMMON | settings).items() <= (PLAIN | r["settings"]).items()]
    return median(r.get("useful_tokens_per_second") or r["tokens_per_second"] for r in found)


def draw_speed(axes: Axes) -> None:
    rates = [tokens_per_second(*bar[1:4]) for bar in BARS]
    draw_bars(axes, [bar[0] for bar in BARS], rates, [f"{r:,.0f}" for r in rates], [bar[4] for bar in BARS])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(title="Llama 3.1 8B, 8,192 tokens, one H200", xlabel="tokens/s", xlim=(0, 1.2 * max(rates)))


def draw_loss(axes: Axes) -> None:
    runs = {run.name: run for run in read_table("thousand_steps/te")}
    for name, (label, color, dashes) in CURVES.items():
        steps, losses = zip(*runs[name].series("train/loss"), strict=True)
        shown = len(steps) - len(steps) // 20  # the last means are over few points
        axes.plot(steps[:shown], smooth(list(losses))[:shown], dashes, color=color, label=label)
    axes.set(title="Llama 3.2 1B from random weights, GSM8K", xlabel="step", ylabel="smoothed training loss")
    axes.legend()


def chart(argv: list[str]) -> int:
    parser = command_parser("python -m benchmarks.chart", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="image to write, .svg or .png")
    target = parser.parse_args(argv).file
    if target.suffix not in (".svg", ".png"):
        raise UserError(
            f"{target}: not a .svg or .png file; give it one of these names", exit_code=EXIT_BAD_SETTING
        )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        speed, loss = figure.subplots(1, 2)
        draw_speed(speed)
        draw_loss(loss)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(chart, sys.argv[1:]))

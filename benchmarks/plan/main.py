"""Predict memory, speed, training days and cost of a job; needs no GPU.

python -m benchmarks.plan --model_name meta-llama/Llama-3.1-8B --use_te --mixed_precision fp8 --batch_size 1 \
    --max_seq_length 8192 --gpus 1,8,64 --gpu H200 --tokens 15e12 --price_per_gpu_hour 3
python -m benchmarks.plan --check
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from benchmarks.plan.flags import PROG, build_parser, find_gpu, split_flags
from benchmarks.plan.job import refuse_unplanned
from benchmarks.plan.predict import SMALLER, Plan, fewest_changes, make_plan, replan
from core.errors import UserError, bad_setting
from core.recipes import costs_of
from training.config import parse_config

COLUMNS = (
    *("GPUs", "mode", "peak GB", "largest micro-batch"),
    *("step ms", "tokens/s", "TFLOP/s", "MFU BF16 / FP8"),
)


def run(argv: list[str]) -> str:
    """Return the text to print for a command line."""
    parser = build_parser(__doc__.splitlines()[0])
    args, training = split_flags(parser, argv)
    if args.check:
        from benchmarks.plan.check import check_runs, check_table

        given = [f"--{n}" for n, v in vars(args).items() if n != "check" and v != parser.get_default(n)]
        if training or given:
            raise bad_setting(f"accepts no other flags, got {[*training, *given][0]}", check=True)
        return check_table(*check_runs())
    if args.price_per_gpu_hour and not args.tokens:
        raise bad_setting("a cost needs --tokens too", price_per_gpu_hour=f"{args.price_per_gpu_hour:g}")
    cfg = parse_config(training, prog=PROG, description=__doc__)
    refuse_unplanned(cfg)
    gpu = find_gpu(args, cfg)
    cluster = {"gpus_per_node": args.gpus_per_node, "network_gbs": args.network_gbs}
    plans = [make_plan(cfg, gpu, gpus=gpus, **cluster) for gpus in args.gpus]
    tables = _tables(plans, args.tokens, args.price_per_gpu_hour)
    return "\n".join(
        [*tables, *_notes_on_offload(plans), *_advice([plan for plan in plans if not plan.fits])]
    )


def _gpus(plan: Plan) -> str:
    return f"{plan.job.gpus:,} GPU{'s' * (plan.job.gpus > 1)}"


# Tables


def _tables(plans: list[Plan], tokens: float | None, price: float | None) -> list[str]:
    """Return a table with a row per number of GPUs, then tables of memory and time by part."""
    job, gpu = plans[0].job, plans[0].gpu
    parameters, optim = job.model.parameters, job.cfg.optim
    size = f"{parameters / 1e9:.2f} billion" if parameters > 1e8 else f"{parameters / 1e6:.2f} million"
    head = [*COLUMNS, *["days"] * bool(tokens), *["cost"] * bool(tokens and price)]
    lines = [
        f"{size} parameters, {job.recipe}, {optim.batch_size} x {job.cfg.data.max_seq_length} tokens per "
        f"micro-batch and GPU, {job.accumulation} micro-batch{'es' * (job.accumulation > 1)} per step"
        f"{', activation checkpointing' if job.recompute else ''}; {gpu.memory_gb:g} GB a GPU",
        "",
        _table([head, *(_row(plan, tokens, price) for plan in plans)]),
        "",
        _parts("GB a GPU", plans, lambda plan: plan.memory, 1e9),
    ]
    if fitting := [plan for plan in plans if plan.fits]:
        lines += ["", _parts("ms a step", fitting, lambda plan: plan.seconds, 1e-3)]
    if not costs_of(job.recipe).measured:
        lines += ["", f"{job.recipe} was never measured: its time is that of delayed scaling's kernels."]
    if any(plan.job.nodes > 1 for plan in plans):
        lines += ["", "Several nodes were never measured; docs/plan.md has the assumptions."]
    return lines


def _row(plan: Plan, tokens: float | None, price: float | None) -> list[str]:
    start = [f"{plan.job.gpus:,}", plan.job.mode, f"{plan.peak / 1e9:.1f}", f"{plan.largest_batch:,}"]
    if not plan.fits:
        return [*start, "does not fit", *["-"] * (3 + bool(tokens) + bool(tokens and price))]
    shares = [plan.tflops / peak for peak in (plan.gpu.bf16_tflops, plan.gpu.fp8_tflops) if peak]
    row = [*start, f"{1e3 * plan.step:,.0f}", f"{plan.tokens_per_second:,.0f}", f"{plan.tflops:.0f}"]
    row += [" / ".join(f"{share:.1%}" for share in shares)]
    if tokens:
        days = plan.days(tokens)
        row += [f"{days:,.1f}" if days >= 10 else f"{days:.2g}"]
        if price:
            cost = days * 24 * plan.job.gpus * price
            row += [f"{cost:,.0f}" if cost >= 10 else f"{cost:.2g}"]
    return row


def _parts(title: str, plans: list[Plan], read: Callable[[Plan], dict[str, float]], scale: float) -> str:
    """Return a table with a row per non-zero part and a column per number of GPUs."""
    rows = [[title, *map(_gpus, plans)]]
    for name in read(plans[0]):
        values = [read(plan)[name] / scale for plan in plans]
        if any(values):
            rows.append([name, *(f"{value:,.2f}" for value in values)])
    rows.append(["sum", *(f"{sum(read(plan).values()) / scale:,.2f}" for plan in plans)])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    lines = (" | ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


# Notes below the tables


def _hosts(plan: Plan) -> str:
    kept, saving = plan.host_gb()
    return f"{kept:.0f} GB in the memory of each node's CPUs, {saving:.0f} more while it saves"


def _notes_on_offload(plans: list[Plan]) -> list[str]:
    """Return notes on host memory, refused modes, and automatic offloading although fsdp_full fits.

    The last may occur because `auto` reserves memory for activations, whose size it does not know.
    """
    notes = []
    for plan in (plan for plan in plans if plan.job.sharding.offload):
        refused = f"training refuses {plan.refusal}" if plan.refusal else f"{_hosts(plan)}."
        notes.append(f"\n{_gpus(plan)}: {refused}")
        if plan.job.cfg.sharding.mode == "auto":
            other = replan(plan, plan.job.cfg.to_dict() | {"sharding_mode": "fsdp_full"})
            if other.fits:
                notes.append(
                    f"\n{_gpus(plan)}: by this plan --sharding_mode fsdp_full fits too, "
                    f"{other.peak / 1e9:.1f} GB a GPU, and needs {1e3 * other.step:,.0f} ms a step."
                )
    return notes


def _advice(plans: list[Plan]) -> list[str]:
    """Return, for each of these plans that do not fit, the flags with which it fits, fastest first."""
    notes, hopeless = [], []
    for plan in plans:
        found = fewest_changes(plan)
        lines = [f"\n{_gpus(plan)}: would fit with"]
        for flags, other in sorted(found.items(), key=lambda each: -each[1].tokens_per_second):
            hosts = f", {_hosts(other)}" if other.job.sharding.offload else ""
            speed = f"{other.tokens_per_second:,.0f} tokens/s"
            lines.append(f"- {flags}: {other.peak / 1e9:.1f} GB a GPU, {speed}{hosts}")
        if found:
            notes.append("\n".join(lines))
        else:
            hopeless.append(_gpus(plan))
    if hopeless:
        notes.append(
            f"\n{', '.join(hopeless)}: does not fit, not even with {', '.join(SMALLER)}; use more GPUs or a "
            "shorter --max_seq_length."
        )
    return notes


def main(argv: list[str] | None = None) -> int:
    """Print the plan and return the exit code."""
    try:
        print(run(sys.argv[1:] if argv is None else argv), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0

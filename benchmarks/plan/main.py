"""Memory, speed, days and cost of a training job, before any GPU is rented.

python -m benchmarks.plan --model_name meta-llama/Llama-3.1-8B --use_te --mixed_precision fp8 --batch_size 1 \
    --max_seq_length 8192 --gpus 1,8,64 --gpu H200 --tokens 15e12 --price_per_gpu_hour 3
python -m benchmarks.plan --check
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from benchmarks.plan.check import check_runs, check_table
from benchmarks.plan.flags import PROG, build_parser, find_gpu, split_flags
from benchmarks.plan.job import Job, build_job, read_model
from benchmarks.plan.memory import host_bytes, largest_batch, peak
from benchmarks.plan.time import Gpu, step_seconds
from core.recipes import costs_of
from training.config import Config, config_from_dict, parse_config
from training.tracking.metrics import mfu, model_flops

# CUDA's context, NCCL and fragmentation: the recorded 8B run with 147.6 GB of tensors ran in 150.1 GB.
RESERVED = 2e9
# What makes a job smaller, and the settings that are changed; the batch becomes as large as then fits.
SMALLER_BATCH = "--batch_size"
SMALLER: dict[str, dict[str, Any]] = {
    SMALLER_BATCH: {"batch_size": 1},
    "--gradient_checkpointing": {"gradient_checkpointing": True},
    "--sharding_mode fsdp_full": {"sharding_mode": "fsdp_full", "hsdp_shard_size": None},
    "--sharding_mode fsdp_offload": {"sharding_mode": "fsdp_offload", "hsdp_shard_size": None},
    "--moment_dtype bf16": {"moment_dtype": "bf16"},
    "--grad_reduce_dtype bf16": {"grad_reduce_dtype": "bf16"},
}


@dataclass(frozen=True)
class Plan:
    """What is predicted for one job on one kind of GPU: bytes and seconds by part."""

    job: Job
    gpu: Gpu
    memory: dict[str, float]
    seconds: dict[str, float]
    largest_batch: int

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= room(self.gpu)

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.job.tokens * self.job.accumulation * self.job.gpus / self.step

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of one GPU."""
        tokens = self.job.tokens * self.job.accumulation
        flops = model_flops(self.job.model.shape, tokens=tokens, sum_squared_lengths=tokens * self.job.length)
        return flops / self.step / 1e12

    def days(self, tokens: float) -> float:
        return tokens / (self.tokens_per_second * 86_400)


def room(gpu: Gpu) -> float:
    return gpu.memory_gb * 1e9 - RESERVED


def choose_mode(cfg: Config, parameters: int, gpu: Gpu, gpus: int, gpus_per_node: int) -> str:
    """The sharding mode that training would take. ValueError for one that cannot be planned."""
    mode = cfg.sharding.mode
    if gpus == 1 and not mode.endswith("offload"):
        return "single"
    if mode == "deepspeed":
        raise ValueError(
            "--sharding_mode deepspeed: plans cover ds_zero1, ds_zero2, ds_zero3 and its offload"
        )
    if mode != "auto":
        if mode.startswith("ds_") or mode == "fsdp_offload":
            state_bytes(cfg, mode)
        return mode
    from training.parallel import auto_mode  # imports torch

    size = int(gpu.memory_gb * 1e9)
    memory = auto_mode.Memory.of(cfg, parameters=parameters, state=state_bytes(cfg, mode), gpu=size)
    return auto_mode.choose_mode(memory, world_size=gpus, local_size=min(gpus, gpus_per_node))[0]


def state_bytes(cfg: Config, mode: str) -> int:
    """Of weight, gradient and moments a parameter. ValueError where training refuses their dtypes."""
    from training.optim.optimizer import plan_optimizer  # imports torch

    home = "zero" if mode.startswith("ds_") else "cpu" if mode == "fsdp_offload" else "device"
    try:
        return plan_optimizer(cfg.precision, on_gpu=True, master_home=home).state_bytes
    except ValueError as error:
        raise ValueError(f"--sharding_mode {mode}: {error}") from None


def make_plan(cfg: Config, gpu: Gpu, *, gpus: int, gpus_per_node: int = 8, network_gbs: float = 50.0) -> Plan:
    """Predict one training command on `gpus` GPUs; `network_gbs` is a GPU's share of its node's network."""
    if cfg.model.te_backend == "emulated":
        raise ValueError("--te_backend emulated: its speed and memory say nothing of a GPU; leave it out")
    model = read_model(cfg.model.model_name)
    mode = choose_mode(cfg, model.parameters, gpu, gpus, gpus_per_node)
    job = build_job(cfg, model, mode=mode, gpus=gpus, gpus_per_node=gpus_per_node)
    return Plan(
        job,
        gpu,
        peak(job),
        step_seconds(job, gpu, network=network_gbs * 1e9),
        largest_batch(job, room(gpu)),
    )


def _cells(plan: Plan, tokens: float | None, price: float | None) -> list[str]:
    total = sum(plan.memory.values()) / 1e9
    cells = [f"{plan.job.gpus:,}", plan.job.mode, f"{total:.1f}", f"{plan.largest_batch:,}"]
    if plan.fits:
        shares = [mfu(plan.tflops, p) for p in (plan.gpu.bf16_tflops, plan.gpu.fp8_tflops) if p]
        cells += [f"{1e3 * plan.step:,.0f}", f"{plan.tokens_per_second:,.0f}", f"{plan.tflops:.0f}"]
        cells += [" / ".join(f"{share:.1%}" for share in shares)]
    else:
        cells += ["does not fit", "-", "-", "-"]
    if tokens:
        days = plan.days(tokens)
        cells += [f"{days:,.1f}" if days >= 10 else f"{days:.2g}"] if plan.fits else ["-"]
        if price:
            cost = days * 24 * plan.job.gpus * price
            cells += [(f"{cost:,.0f}" if cost >= 10 else f"{cost:.2g}") if plan.fits else "-"]
    return cells


def _table(rows: list[list[str]]) -> str:
    """Markdown, padded to columns, the first row as its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def _gpus(job: Job) -> str:
    return f"{job.gpus:,} GPU{'s' * (job.gpus > 1)}"


def _parts(title: str, plans: list[Plan], read: Callable[[Plan], dict[str, float]], scale: float) -> str:
    """One row for each part that is not nothing everywhere, one column for each number of GPUs."""
    rows = [[title, *(_gpus(plan.job) for plan in plans)]]
    for name in read(plans[0]):
        values = [read(plan)[name] / scale for plan in plans]
        if any(values):
            rows.append([name, *(f"{value:,.2f}" for value in values)])
    rows.append(["sum", *(f"{sum(read(plan).values()) / scale:,.2f}" for plan in plans)])
    return _table(rows)


def report(plans: list[Plan], *, tokens: float | None, price: float | None) -> str:
    """The tables of several plans of one command."""
    job, gpu = plans[0].job, plans[0].gpu
    head = [
        "GPUs",
        "mode",
        "peak GB",
        "largest micro-batch",
        "step ms",
        "tokens/s",
        "TFLOP/s",
        "MFU BF16 / FP8",
    ]
    head += ["days"] * bool(tokens) + ["cost"] * bool(tokens and price)
    parameters = job.model.parameters
    size = f"{parameters / 1e9:.2f} billion" if parameters > 1e8 else f"{parameters / 1e6:.2f} million"
    about = (
        f"{size} parameters, {job.recipe}, {job.batch} x {job.length} "
        f"tokens a micro-batch and GPU, {job.accumulation} of them a step"
        f"{', recomputation' if job.recompute else ''}; {gpu.memory_gb:g} GB a GPU"
    )
    lines = [about, "", _table([head, *(_cells(plan, tokens, price) for plan in plans)])]
    lines += ["", _parts("GB a GPU", plans, lambda plan: plan.memory, 1e9)]
    if fitting := [plan for plan in plans if plan.fits]:
        lines += ["", _parts("ms a step", fitting, lambda plan: plan.seconds, 1e-3)]
    if not costs_of(job.recipe).measured:
        lines += ["", f"{job.recipe} was never measured: its time is that of delayed scaling's kernels."]
    if any(plan.job.nodes > 1 for plan in plans):
        lines += ["", "Several nodes were never measured; docs/plan.md has the assumptions."]
    return "\n".join(lines)


def run(argv: list[str]) -> str:
    """The text that `argv` asks for. ValueError for anything a user got wrong."""
    parser = build_parser(__doc__.splitlines()[0])
    args, training = split_flags(parser, argv)
    if args.check is not None:
        own = [name for name, value in vars(args).items() if value != parser.get_default(name)]
        if other := [*training, *(f"--{name}" for name in own if name != "check")]:
            raise ValueError(f"--check takes no other flags, got {other[0]}")
        return check_table(*check_runs(args.check))
    if args.price_per_gpu_hour and not args.tokens:
        raise ValueError(f"--price_per_gpu_hour {args.price_per_gpu_hour:g}: a cost needs --tokens too")
    cfg = parse_config(training, prog=PROG, description=__doc__)
    gpu = find_gpu(args, cfg)
    where = {"gpus_per_node": args.gpus_per_node, "network_gbs": args.network_gbs}
    plans = [make_plan(cfg, gpu, gpus=gpus, **where) for gpus in args.gpus]
    tables = report(plans, tokens=args.tokens, price=args.price_per_gpu_hour)
    offloaded = [plan for plan in plans if plan.job.offload]
    notes = [_refusal(cfg, plan) or f"\n{_gpus(plan.job)}: {_hosts(plan)}." for plan in offloaded]
    if cfg.sharding.mode == "auto":
        sharded = replace(cfg, sharding=replace(cfg.sharding, sharding_mode="fsdp_full"))
        others = [make_plan(sharded, gpu, gpus=plan.job.gpus, **where) for plan in offloaded]
        notes += [_instead(plan) for plan in others if plan.fits]
    notes += _what_fits(cfg, [plan for plan in plans if not plan.fits], where)
    return "\n".join([tables, *notes])


def _what_fits(cfg: Config, plans: list[Plan], where: dict[str, Any]) -> list[str]:
    """For each of these plans, none of which fits, what would, the fastest first."""
    notes, hopeless = [], []
    for plan in plans:
        found = fewest_changes(cfg, plan, where)
        lines = [f"\n{_gpus(plan.job)}: would fit with"]
        for flags, other in sorted(found.items(), key=lambda each: -each[1].tokens_per_second):
            gigabytes, speed = sum(other.memory.values()) / 1e9, other.tokens_per_second
            hosts = f", {_hosts(other)}" if other.job.offload else ""
            lines.append(f"- {flags}: {gigabytes:.1f} GB a GPU, {speed:,.0f} tokens/s{hosts}")
        if found:
            notes.append("\n".join(lines))
        else:
            hopeless.append(_gpus(plan.job))
    if hopeless:
        notes.append(
            f"\n{', '.join(hopeless)}: does not fit, not even with {', '.join(SMALLER)}; use more GPUs or a "
            "shorter --max_seq_length."
        )
    return notes


def fewest_changes(cfg: Config, plan: Plan, where: dict[str, Any]) -> dict[str, Plan]:
    """Plans that fit where this one does not, by the flags added to it: as few as do, {} if none do.

    What is set already changes nothing, so it is never among the fewest.
    """

    def planned(settings: dict[str, Any]) -> Plan | None:
        try:
            changed = config_from_dict(settings)
            other = make_plan(changed, plan.gpu, gpus=plan.job.gpus, **where)
        except ValueError:  # training refuses it beside what else is set
            return None
        return other if other.fits and not _refusal(changed, other) else None

    for count in range(1, len(SMALLER) + 1):
        found = {}
        for flags in combinations(SMALLER, count):
            settings = cfg.to_dict() | {
                name: value for flag in flags for name, value in SMALLER[flag].items()
            }
            other = planned(settings)
            if other and SMALLER_BATCH in flags:
                other = planned(settings | {"batch_size": other.largest_batch})
            if other:
                batch = f"{SMALLER_BATCH} {other.job.batch}"
                told = " ".join(batch if flag == SMALLER_BATCH else flag for flag in flags)
                if other.job.mode != "hsdp" and cfg.sharding.hsdp_shard_size:
                    told += " without --hsdp_shard_size"
                found[told] = other
        if found:
            return found
    return {}


def _refusal(cfg: Config, plan: Plan) -> str | None:
    try:
        state_bytes(cfg, plan.job.mode)
    except ValueError as error:
        return f"\n{_gpus(plan.job)}: training refuses {error}"
    return None


def _hosts(plan: Plan) -> str:
    kept, saved = (each * plan.job.model.parameters / plan.job.nodes / 1e9 for each in host_bytes(plan.job))
    return f"{kept:.0f} GB in the memory of each node's CPUs, {saved:.0f} more while it saves"


def _instead(plan: Plan) -> str:
    """That training's `auto`, which leaves a quarter of a GPU free, offloads what fits by this plan."""
    gigabytes = sum(plan.memory.values()) / 1e9
    return (
        f"\n{_gpus(plan.job)}: by this plan --sharding_mode {plan.job.mode} fits too, {gigabytes:.1f} GB a "
        f"GPU, and takes {1e3 * plan.step:,.0f} ms a step."
    )


def main(argv: list[str] | None = None) -> int:
    """Print the plan; exit code 2 for a setting that is wrong."""
    try:
        print(run(sys.argv[1:] if argv is None else argv), flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

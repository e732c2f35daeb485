"""Predict memory, speed, training time and cost of a run, without a GPU.

python -m benchmarks.plan --model_name meta-llama/Llama-3.1-8B --use_te --mixed_precision fp8 --batch_size 1 \
    --max_seq_length 8192 --gpus 1,8,64 --gpu H200 --tokens 15e12 --price_per_gpu_hour 3
python -m benchmarks.plan --check
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from fp8_suite.benchmarks.launch.variants import parse_flags
from fp8_suite.benchmarks.plan.layouts import best_layouts, layout_flags, layouts_table
from fp8_suite.benchmarks.plan.limits import limits_table
from fp8_suite.benchmarks.plan.predict import Plan, alternatives, make_plan
from fp8_suite.benchmarks.report.tables import markdown
from fp8_suite.core.cli import add_number, as_command, command_parser
from fp8_suite.core.errors import UserError, bad_setting, counted
from fp8_suite.core.gpus import PLANNED, Gpu
from fp8_suite.core.recipes import RECIPES, costs_of
from fp8_suite.core.settings import AUTO, check_bounds, convert
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.estimate.advice import way_out
from fp8_suite.training.estimate.layout import check_pipeline
from fp8_suite.training.estimate.memory import checkpoint_bytes, offloaded_bytes
from fp8_suite.training.estimate.sizes import UNCOMPILED, auto_settings, auto_sizes, compiles_layers
from fp8_suite.training.estimate.transfers import NETWORK_BANDWIDTH

PROG = "python -m benchmarks.plan"
# Flag -> (field of `Gpu`, factor from the flag's unit to the field's, help).
GPU_FLAGS = {
    "gpu_memory_gb": ("memory_gb", 1, "for another GPU: memory in GB (10^9 bytes)"),
    "bf16_tflops": ("bf16_tflops", 1, "for another GPU: dense BF16 peak in TFLOP/s"),
    "fp8_tflops": ("fp8_tflops", 1, "for another GPU: dense FP8 peak in TFLOP/s"),
    "memory_tbs": ("memory_bandwidth", 1e12, "for another GPU: memory bandwidth in TB/s"),
    "link_gbs": ("link_bandwidth", 1e9, "for another GPU: NVLink or PCIe bandwidth in GB/s, one direction"),
}
LARGEST = 1e18  # number in a flag
DISK_GBS = 1.0  # rate of writing checkpoints, if only --save_interval is given
COLUMNS = (
    *("GPUs", "mode", "peak GB", "largest micro-batch"),
    *("step ms", "tokens/s", "TFLOP/s", "MFU BF16 / FP8"),
)


def run(argv: list[str]) -> str:
    """Return the output for a command line."""
    args, given = parse_flags(build_parser(), argv, owned=())
    if args.check:
        from fp8_suite.benchmarks.plan.check import check_runs, check_table

        return check_table(*check_runs())
    if args.price_per_gpu_hour and not args.tokens:
        price = f"{args.price_per_gpu_hour:g}"
        raise bad_setting("needs --tokens; add it", price_per_gpu_hour=price)
    cfg = config_from_dict(given)
    gpu = read_gpu(args, cfg)
    if args.disk_gb_per_second is None and "save_interval" in given:
        args.disk_gb_per_second = DISK_GBS
    if args.best_layout or auto_sizes(cfg):
        return _best_layouts(cfg, gpu, args)
    cluster = {"gpus_per_node": args.gpus_per_node, "network_gbs": args.network_gbs}

    def plan_for(gpus: int) -> Plan:
        plan = make_plan(cfg, gpu, gpus=gpus, **cluster, disk_gbs=args.disk_gb_per_second)
        micro_batches, layers = plan.setup.batches.micro_batches(0), plan.setup.model.shape.num_layers
        check_pipeline(plan.setup.layout, layers, micro_batches)
        if (names := auto_settings(cfg)) and _exceeds_counts(plan):  # training refuses it too
            raise bad_setting(f"{UNCOMPILED}; give a value", **dict.fromkeys(names, AUTO))
        return plan

    by_gpus, errors = _for_each(args.gpus, plan_for)
    plans = list(by_gpus.values())
    tables = _tables(plans, args.tokens, args.price_per_gpu_hour)
    choices = [f"\n{_gpus(plan)}: {plan.sizing.describe()}" for plan in plans if plan.sizing.is_choice]
    refused = [f"\n{counted(gpus, 'GPU')}: {error}" for gpus, error in errors.items()]
    hosts = [f"\n{_gpus(plan)}: {memory}." for plan in plans if (memory := _host_memory(plan))]
    advice = [_advice(plan) for plan in plans if auto_settings(cfg) or not plan.fits or _exceeds_counts(plan)]
    notes = [*choices, *refused, *hosts, *filter(None, advice)]
    return "\n".join([*tables, "", limits_table(plans), *notes])


def _best_layouts(cfg: Config, gpu: Gpu, args: argparse.Namespace) -> str:
    """Return tables of the fastest layouts by number of GPUs, and of the fastest one's parts."""
    cluster = {"gpus_per_node": args.gpus_per_node, "network_gbs": args.network_gbs}
    plans, errors = _for_each(args.gpus, lambda gpus: best_layouts(cfg, gpu, gpus=gpus, **cluster))
    texts = {gpus: [str(error)] for gpus, error in errors.items()}
    for gpus, layouts in plans.items():
        texts[gpus] = [layouts_table(layouts), f"Fastest: {layout_flags(layouts[0])}"]
    tables = "\n\n".join("\n\n".join([f"{counted(gpus, 'GPU')}:", *texts[gpus]]) for gpus in args.gpus)
    fastest = [layouts[0] for layouts in plans.values()]
    return "\n".join([tables, "", *_tables(fastest, args.tokens, args.price_per_gpu_hour)])


def _for_each(numbers: list[int], work: Callable[[int], Any]) -> tuple[dict[int, Any], dict[int, UserError]]:
    """Return the results of `work` by number of GPUs, and the errors of the others. UserError if all fail."""
    results, errors = {}, {}
    for gpus in numbers:
        try:
            results[gpus] = work(gpus)
        except UserError as error:
            errors[gpus] = error
    if not results:
        raise errors[numbers[-1]]
    return results, errors


def _gpus(plan: Plan) -> str:
    return counted(plan.setup.gpus, "GPU")


# Tables


def _tables(plans: list[Plan], tokens: float | None, price: float | None) -> list[str]:
    """Return a table with a row per number of GPUs, and tables of memory and time by part."""
    setup, gpu = plans[0].setup, plans[0].sizing.gpu
    parameters, optim = setup.model.parameters, setup.cfg.optim
    level = plans[0].sizing.requested.cfg.model.recomputation
    size = f"{parameters / 1e9:.2f} billion" if parameters > 1e8 else f"{parameters / 1e6:.2f} million"
    frozen = f", {setup.model.adapters / 1e6:.1f} million in adapters" if setup.model.adapters else ""
    optional = {"goodput": plans[0].disk_gbs, "days": tokens, "cost": price}
    head = [*COLUMNS, *(name for name, value in optional.items() if value)]
    rank = "data rank" if setup.layout.flags else "GPU"
    split = f"{optim.batch_size} x {setup.cfg.data.max_seq_length} tokens per micro-batch and {rank}, "
    split += f"{setup.batches.describe()} per step"
    if plans[0].sizing.is_choice:
        split = f"sequences of {setup.cfg.data.max_seq_length} tokens"
    rows = [_row(plan, tokens, price) for plan in plans]
    lines = [
        f"{size} parameters{frozen}, {setup.recipe}, {split}"
        f"{f', --recompute {level}' if level not in ('none', AUTO) else ''}; {gpu.memory_gb:g} GB per GPU",
        "",
        markdown(head, [row + ["-"] * (len(head) - len(row)) for row in rows]),
        *_saves(plans[0]),
        "",
        _parts("GB per GPU", plans, lambda plan: plan.memory, 1e9),
    ]
    if fitting := [plan for plan in plans if plan.fits]:
        lines += ["", _parts("ms per step", fitting, lambda plan: plan.seconds, 1e-3)]
    if not costs_of(setup.recipe).measured:
        rates = "its time is computed with the rates of delayed scaling"
        lines += ["", f"{setup.recipe} was not measured; {rates}."]
    if any(plan.setup.nodes > 1 for plan in plans):
        lines += ["", "More than one node was not measured; docs/plan.md lists the assumptions."]
    return lines


def _row(plan: Plan, tokens: float | None, price: float | None) -> list[str]:
    start = [f"{plan.setup.gpus:,}", plan.setup.mode, f"{plan.peak / 1e9:.1f}", f"{plan.largest_batch:,}"]
    if not plan.fits:
        return [*start, "does not fit"]
    gpu = plan.sizing.gpu
    shares = [plan.tflops / peak for peak in (gpu.bf16_tflops, gpu.fp8_tflops) if peak]
    row = [*start, f"{1e3 * plan.step:,.0f}", f"{plan.tokens_per_second:,.0f}", f"{plan.tflops:.0f}"]
    row += [" / ".join(f"{share:.1%}" for share in shares)]
    if plan.disk_gbs:
        row += [f"{plan.goodput:.1%}"]
    if tokens:
        days = plan.days(tokens)
        row += [f"{days:,.1f}" if days >= 10 else f"{days:.2g}"]
        if price:
            cost = days * 24 * plan.setup.gpus * price
            row += [f"{cost:,.0f}" if cost >= 10 else f"{cost:.2g}"]
    return row


def _saves(plan: Plan) -> list[str]:
    """Describe a save, if saves are planned."""
    if not plan.disk_gbs:
        return []
    size, every = checkpoint_bytes(plan.setup) / 1e9, plan.setup.cfg.checkpoint.save_interval
    rate = f"{plan.save_seconds:,.0f} s at {plan.disk_gbs:g} GB/s"
    return ["", f"--save_interval {every}: a checkpoint has {size:,.1f} GB and is written in {rate}."]


def _parts(title: str, plans: list[Plan], read: Callable[[Plan], dict[str, float]], scale: float) -> str:
    """Return a table with a row per non-zero part and a column per number of GPUs."""
    rows = []
    for name in read(plans[0]):
        values = [read(plan)[name] / scale for plan in plans]
        if any(values):
            rows.append([name, *(f"{value:,.2f}" for value in values)])
    rows.append(["sum", *(f"{sum(read(plan).values()) / scale:,.2f}" for plan in plans)])
    return markdown([title, *map(_gpus, plans)], rows)


# Notes below the tables


def _host_memory(plan: Plan) -> str:
    """Describe the host memory that offloading needs; "" without."""
    needed = offloaded_bytes(plan.setup)
    return f"{needed / 1e9:.0f} GB of host memory per node" * bool(needed)


def _exceeds_counts(plan: Plan) -> bool:
    """True for Hugging Face layers without torch.compile, which need more memory than is predicted."""
    cfg = plan.setup.cfg
    return not cfg.model.use_te and not compiles_layers(cfg, plan.setup.mode, on_gpu=True)


def _advice(plan: Plan) -> str | None:
    """List the settings that make this plan fit or faster; None if it fits and none is faster."""
    if _exceeds_counts(plan):  # and advice names `auto`, which training refuses here
        return f"\n{_gpus(plan)}: {UNCOMPILED}; expect more, or add --use_te."
    lines = [f"\n{_gpus(plan)}: {'faster' if plan.fits else 'fits'} with"]
    for flags, candidate in (candidates := alternatives(plan)).items():
        speed = f"{candidate.tokens_per_second:,.0f} tokens/s"
        needs = [f"{candidate.peak / 1e9:.1f} GB per GPU", speed, _host_memory(candidate)]
        lines.append(f"- {flags}: {', '.join(filter(None, needs))}")
    if candidates:
        return "\n".join(lines)
    return None if plan.fits else f"\n{_gpus(plan)}: does not fit; {way_out(plan.sizing)}."


# Flags


def read_gpu(args: argparse.Namespace, cfg: Config) -> Gpu:
    """Return the GPU that the flags describe. UserError if it cannot run the recipe."""
    values = {flag: getattr(args, flag) for flag in GPU_FLAGS}
    fields = {GPU_FLAGS[flag][0]: value * GPU_FLAGS[flag][1] for flag, value in values.items() if value}
    model = args.gpu.upper().removeprefix("NVIDIA").strip()
    if name := next((key for key in PLANNED if key.upper() == model), None):
        gpu = PLANNED[name]._replace(**fields)
        if cfg.precision.mixed_precision == "fp8":
            if gpu.fp8_tflops is None:
                raise bad_setting("this GPU has no FP8; use bf16", gpu=name, mixed_precision="fp8")
            _refuse_architecture(name, cfg)
        return gpu
    if missing := [f"--{flag}" for flag, value in values.items() if not value and flag != "fp8_tflops"]:
        described = f"{', '.join(missing)} (and --fp8_tflops, if it has FP8)"
        raise bad_setting(f"unknown GPU; choose from {', '.join(PLANNED)}, or add {described}", gpu=args.gpu)
    return Gpu(**({"fp8_tflops": None} | fields))


def _refuse_architecture(name: str, cfg: Config) -> None:
    needs = [(RECIPES[cfg.requested_recipe].architectures, {"fp8_scenario": cfg.requested_recipe})]
    if cfg.model.use_te and cfg.precision.fp8_fp32_scales:
        needs.append((("Hopper",), {"fp8_fp32_scales": True}))
    for architectures, setting in needs:
        if architectures and PLANNED[name].architecture not in architectures:
            able = [gpu for gpu, spec in PLANNED.items() if spec.architecture in architectures]
            raise bad_setting(f"needs a GPU of {', '.join(able)}", **setting, gpu=name)


def _counts(text: str) -> list[int]:
    counts = [convert("gpus", part.strip(), int) for part in text.split(",")]
    check_bounds("gpus", min(counts), {"minimum": 1})
    return list(dict.fromkeys(counts))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the plan's own flags, without the training flags."""
    parser = command_parser(PROG, __doc__, trains=True)
    add, number = parser.add_argument, partial(add_number, parser, kind=float, above=0, below=LARGEST)
    gpus = "numbers of GPUs to plan for (default: 1,8,64,512,4096)"
    add("--gpus", type=_counts, default=[1, 8, 64, 512, 4096], metavar="N,N,...", help=gpus)
    add_number(parser, "gpus_per_node", 8, "GPUs per node")
    add("--gpu", default="H200", metavar="NAME", help=f"{', '.join(PLANNED)} (default: H200)")
    for flag, (_, _, text) in GPU_FLAGS.items():
        number(flag, None, text)
    network = "network bandwidth per GPU in GB/s, one direction; 50 are 400 Gbit/s; assumed by auto"
    number("network_gbs", NETWORK_BANDWIDTH / 1e9, network)
    best = "find the fastest layout and --batch_size with this --global_batch_size; sizes above 1 are kept"
    add("--best_layout", action="store_true", help=best)
    disk = "disk bandwidth of all nodes in GB/s; adds a column with goodput (default with --save_interval: 1"
    number("disk_gb_per_second", None, f"{disk}; 2.6 on an H100 host)")
    number("tokens", None, "training tokens, such as 15e12; adds a column with days")
    number("price_per_gpu_hour", None, "price in any currency; adds a column with the cost of --tokens")
    add("--check", action="store_true", help="compare predictions with recorded runs instead")
    return parser


@as_command
def main(argv: list[str]) -> int:
    """Print the plan. Exit codes: 0 done, 2 bad setting."""
    print(run(argv), flush=True)
    return 0

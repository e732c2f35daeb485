"""Measure tokens/s, model TFLOP/s and memory of training.

    python -m benchmarks.throughput --model_name meta-llama/Llama-3.1-8B --max_seq_length 8192 \\
        --batch_size 1 --use_te --mixed_precision fp8 --repeats 3

It runs train_fp8.py, or train_multi_gpu.py for more GPUs than one, so the time includes loader, clipping and
optimizer. Any training flag may be added. By default sequences are full of random words (--dataset_name
synthetic), weights are random and the tokenizer is the demo's; --dataset_name, --init and --tokenizer_name
change that. The run folders are reported on as any others; padding and recomputation do not count.

Rates are medians over log intervals of 8 micro-batches, or of one step if that has more or is long: 131,072
tokens per data rank. Intervals with warm-up steps (the first five, or two if long) or profiled steps do not
count.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks import sweep
from fp8_suite.benchmarks.launch.grid import GridRun, train_all
from fp8_suite.benchmarks.launch.variants import parse_flags
from fp8_suite.core.cli import add_number, as_command, command_parser
from fp8_suite.core.errors import bad_setting
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.sizes import with_data_ranks, with_sizes
from fp8_suite.training.launch import require_inputs
from fp8_suite.training.tracking.meter import LONG_STEP, warmup_steps

PROG = "python -m benchmarks.throughput"
INTERVAL = 8  # micro-batches per log interval
COUNTED = 4  # measured intervals by default
PROFILED_FROM = 9  # first profiled step, as in `training.tracking.profiling`
FIXED = {"eval_samples": 0, "eval_interval": 0, "save_checkpoints": False, "export": False, "resume": "none"}
OWNED = ("max_steps", "profile_steps", "log_interval", *FIXED)  # set by this program and its own flags
DEFAULTS = {"dataset_name": "synthetic", "init": "random", "tokenizer_name": "demo"}


def schedule(accumulation: int, profile: bool, tokens: int) -> tuple[int, int, int]:
    """Return the steps per log interval, the steps to profile, and the first steps that do not count.

    `tokens` are those of a step, per data rank.
    """
    interval = 1 if tokens >= LONG_STEP else max(1, INTERVAL // accumulation)
    profiled = max(1, 3 // accumulation) if profile else 0
    last = PROFILED_FROM - 1 + profiled if profile else warmup_steps(tokens)
    return interval, profiled, -(-last // interval) * interval


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags of the benchmark, and the requested training settings."""
    parser = command_parser(PROG, __doc__, trains=True)
    add_number(parser, "gpus", 1, "GPUs of this machine to use")
    steps = "steps per run (default: 40, fewer with gradient accumulation or long steps)"
    add_number(parser, "steps", None, steps)
    add_number(parser, "repeats", 1, "runs to measure")
    parser.add_argument("--profile", action="store_true", help="also record the GPU time by kind of kernel")
    return parse_flags(parser, argv, OWNED)


@as_command
def main(argv: list[str]) -> int:
    """Run all repeats and report on them. Exit codes: 0 done, 1 a run failed, 2 bad setting."""
    arguments, requested = parse(argv)
    import torch  # slow to import

    cfg, data_ranks = with_data_ranks(config_from_dict(requested), arguments.gpus)
    optim = with_sizes(cfg, data_ranks).optim  # `auto` may choose another split
    accumulation = optim.gradient_accumulation_steps
    tokens = accumulation * optim.batch_size * cfg.data.max_seq_length
    interval, profiled, uncounted = schedule(accumulation, arguments.profile, tokens)
    steps = uncounted + COUNTED * interval if arguments.steps is None else arguments.steps
    if steps < uncounted + interval:
        reason = f"the first {uncounted} steps are not measured; use at least {uncounted + interval}"
        raise bad_setting(reason, steps=steps)
    settings = DEFAULTS | requested | FIXED | {"max_steps": steps, "log_interval": interval}
    settings |= {"profile_steps": profiled} if profiled else {}
    cfg = config_from_dict(settings)
    require_inputs(cfg)
    if not torch.cuda.is_available() or cfg.model.te_backend == "emulated":
        print("WARNING: no speed is reported of runs without a GPU and of emulated ones", file=sys.stderr)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(cfg.checkpoint.output_dir or f"runs/throughput/{now}")
    runs = []
    for name in (f"run-{number}" for number in range(1, arguments.repeats + 1)):
        cfg = config_from_dict(settings | {"output_dir": str(folder / name)})
        runs.append(GridRun(name=name, cfg=cfg, gpus=arguments.gpus))
    failures = train_all(runs, folder, lambda run, failures: "an earlier run failed" if failures else None)
    return sweep.conclude(runs, failures, folder)


if __name__ == "__main__":
    sys.exit(main())

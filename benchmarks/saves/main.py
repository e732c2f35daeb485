"""Measure what checkpoints cost: the disk's rates, the time that a save adds, and steps beside a save.

    python -m benchmarks.saves --model_name meta-llama/Llama-3.2-1B --batch_size 12 --use_te \\
        --mixed_precision fp8 --output_dir /disk/1b
    torchrun --nproc_per_node=2 -m benchmarks.saves --sharding_mode fsdp_full ... --output_dir /disk/8b

It trains in --output_dir, whose disk is measured, on made-up rows, and writes record.json there. Any training
flag may be added. The kinds of saves: `sync`, `async` (the default in training), and `torch`, which is
torch.distributed.checkpoint.async_save with staging in pinned memory and torch's own file format. The first
save of a kind may have to allocate memory, so it is reported apart. The disk needs room for one checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.launch import command_parser, run_command
from fp8_suite.benchmarks.records.variants import given_settings, split_flags
from fp8_suite.benchmarks.throughput import DEFAULTS, made_up_rows
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.signals import stop_with_parent
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.estimate.sizes import with_sizes
from fp8_suite.training.launch import allow_expandable_segments, require_inputs

PROG = "python -m benchmarks.saves"
KINDS = ("sync", "async", "torch")
FIXED = {
    "max_steps": 1_000_000,  # it stops when it has measured enough
    "log_interval": 1_000_000,
    "eval_samples": 0,
    "eval_interval": 0,
    "save_interval": "900000",  # never; 0 would rule out saves in the background
    "keep_last": 1,
    "export": False,
    "resume": "none",
}
OWNED = ("async_save", "save_checkpoints", *FIXED)  # set by this program


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags of the benchmark, and the requested training settings."""
    parser = command_parser(PROG, __doc__, trains=True)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        help=f"saves to measure (default: {' '.join(KINDS)})",
    )
    repeats = "saves of each kind, after the first (default: 3)"
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help=repeats)
    steps = "steps from one save to the next (default: as many as a synchronous save takes, and a few more)"
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    arguments, training = split_flags(parser, argv)
    for name, least in (("repeats", 1), ("steps", 4)):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise bad_setting(f"must be at least {least}", **{name: value})
    requested = given_settings(training, PROG, OWNED)
    if not requested.get("output_dir"):
        raise bad_setting("give a new folder on the disk to measure", output_dir="")
    return arguments, requested


def measure(argv: list[str]) -> int:
    """Measure in this process, which may be one rank of several. Returns the exit code."""
    started = time.perf_counter()
    arguments, requested = parse(argv)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        stop_with_parent()
    allow_expandable_segments()
    kinds = [kind for kind in KINDS if kind in arguments.kinds]  # torch's needs the memory of async
    with data(DEFAULTS | requested | FIXED | {"async_save": "async" in kinds}) as settings:
        cfg = config_from_dict(settings)
        if not under_torchrun:
            require_inputs(cfg)
        # These import torch.
        from fp8_suite.benchmarks.saves.measure import measure_saves
        from fp8_suite.training.run import main as train

        from fp8_suite.train_multi_gpu import join_torchrun

        work = partial(measure_saves, kinds=kinds, repeats=arguments.repeats, steps=arguments.steps)
        return train([], description="", start=join_torchrun, started=started, cfg=cfg, work=work)


@contextmanager
def data(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the settings, with made-up rows for one step unless they name a data set."""
    if "dataset_name" in settings:
        yield settings
        return
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    cfg: Config = config_from_dict(settings)
    optim = with_sizes(cfg, world_size).optim
    rows = optim.batch_size * optim.gradient_accumulation_steps * world_size
    with made_up_rows(Path(cfg.checkpoint.output_dir), rows=rows, tokens=cfg.data.max_seq_length) as text:
        yield {"split_name": "train"} | settings | {"dataset_name": str(text)}


def main(argv: list[str] | None = None) -> int:
    """Run the measurement. Exit codes: 0 done, 2 bad setting, or as in training."""
    return run_command(measure, argv)

"""Measure what checkpoints cost: the disk's rates, the time that a save adds, and steps beside a save.

    python -m benchmarks.saves --model_name meta-llama/Llama-3.2-1B --batch_size 12 --use_te \\
        --mixed_precision fp8 --output_dir /disk/1b
    torchrun --nproc_per_node=2 -m benchmarks.saves --sharding_mode fsdp_full ... --output_dir /disk/8b

It trains on random words in --output_dir, whose disk needs room for one checkpoint, and writes record.json
there. `async` saves are training's default; `torch` is torch.distributed.checkpoint.async_save, staged in
pinned memory. The first save of a kind may have to allocate memory, so it is reported apart.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

from fp8_suite.benchmarks import throughput
from fp8_suite.benchmarks.launch.variants import parse_flags
from fp8_suite.core.cli import add_number, as_command, command_parser
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.signals import stop_with_parent
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.sizes import global_batch, with_data_ranks
from fp8_suite.training.launch import allow_expandable_segments

PROG = "python -m benchmarks.saves"
FIXED = throughput.FIXED | {
    "max_steps": 1_000_000,  # it stops when it has measured enough
    "log_interval": 1_000_000,
    "save_checkpoints": True,
    "save_interval": "900000",  # never; 0 would rule out saves in the background
    "async_save": True,
}
OWNED = ("dataset_name", "num_of_samples", "tokenizer_name", *FIXED)  # set by this program


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the parsed flags of the benchmark, and the training settings."""
    parser = command_parser(PROG, __doc__, trains=True)
    add_number(parser, "repeats", 3, "saves of a kind after its first")
    add_number(parser, "steps", None, "steps a save (default: as many as it takes)", minimum=4)
    arguments, requested = parse_flags(parser, argv, OWNED)
    if not requested.get("output_dir"):
        raise bad_setting("give a new folder on the disk to measure", output_dir="")
    return arguments, throughput.DEFAULTS | requested | FIXED


@as_command
def main(argv: list[str]) -> int:
    """Measure in this process, which may be a rank. Exit codes: 0 done, 2 bad setting, or as in training."""
    started = time.perf_counter()
    arguments, settings = parse(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        stop_with_parent()
    allow_expandable_segments()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    rows = global_batch(*with_data_ranks(config_from_dict(settings), world_size))
    cfg = config_from_dict(settings | {"num_of_samples": rows})  # of a step, which is repeated
    # These import torch.
    from fp8_suite.benchmarks.saves.measure import measure_saves
    from fp8_suite.training.run import main as train

    from fp8_suite.train_multi_gpu import join_torchrun

    work = partial(measure_saves, repeats=arguments.repeats, steps=arguments.steps)
    return train([], description="", start=join_torchrun, started=started, cfg=cfg, work=work)

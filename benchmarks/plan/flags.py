"""The flags of `python -m benchmarks.plan` that are not training's, and the GPU that they name."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks.plan.check import RESULTS
from benchmarks.plan.job import recipe_of
from benchmarks.plan.time import GPUS, Gpu
from core.cli import OneLineParser
from core.errors import bad_setting
from core.recipes import RECIPES, TE_RECIPES
from core.settings import nearest
from training import config
from training.config import Config

PROG = "python -m benchmarks.plan"
# GPUs of `GPUS` by the architectures that `core.recipes` names.
ARCHITECTURES = {
    "Hopper": ("H100", "H100 NVL", "H200", "GH200"),
    "Blackwell": ("B200", "GB200", "B300"),
    "RTX Blackwell": ("RTX 5090",),
}
# A GPU's figures: the flag, the field of `Gpu`, and the flag's unit in the field's.
FIGURES = {
    "gpu_memory_gb": ("memory_gb", 1),
    "bf16_tflops": ("bf16_tflops", 1),
    "fp8_tflops": ("fp8_tflops", 1),
    "memory_tbs": ("memory_bandwidth", 1e12),
    "link_gbs": ("link_bandwidth", 1e9),
}


def gpu_name(text: str) -> str | None:
    """As `GPUS` has it, whatever the case and with the maker's name or without."""
    wanted = text.upper().removeprefix("NVIDIA").strip()
    return next((key for key in GPUS if key.upper() == wanted), None)


def find_gpu(args: argparse.Namespace, cfg: Config) -> Gpu:
    """The GPU of --gpu, changed by the flags that are given.

    ValueError for one that nothing is known of, or whose generation cannot run what `cfg` asks for.
    """
    name, recipe = gpu_name(args.gpu), recipe_of(cfg)
    values = {flag: getattr(args, flag) for flag in FIGURES}
    given = {field: values[flag] * unit for flag, (field, unit) in FIGURES.items() if values[flag]}
    if name is not None:
        architectures = RECIPES[recipe].architectures if recipe in RECIPES else None
        able = [gpu for architecture in architectures or () for gpu in ARCHITECTURES[architecture]]
        if able and name not in able:
            raise bad_setting(f"needs one of {', '.join(able)}", fp8_scenario=recipe, gpu=name)
        hopper = ARCHITECTURES["Hopper"]
        if recipe in TE_RECIPES and cfg.precision.fp8_fp32_scales and name not in hopper:
            raise bad_setting(f"needs one of {', '.join(hopper)}", fp8_fp32_scales=True, gpu=name)
        return GPUS[name]._replace(**given)
    if missing := [f"--{flag}" for flag, value in values.items() if not value and flag != "fp8_tflops"]:
        known = "" if given else f" ({', '.join(GPUS)})"
        fp8 = "" if args.fp8_tflops else " (and --fp8_tflops, if it has FP8)"
        raise ValueError(f"--gpu {args.gpu}: not known{known}; give its {', '.join(missing)}{fp8}")
    return Gpu(**({"fp8_tflops": None} | given))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_whole(part.strip()) for part in text.split(",")]


def build_parser(description: str) -> argparse.ArgumentParser:
    """The flags of a plan alone; every flag of training is taken beside them."""
    parser = OneLineParser(
        prog=PROG,
        description=description,
        allow_abbrev=False,
        epilog="All flags of training are taken too: python train_fp8.py --help",
    )
    add: Any = parser.add_argument
    add("--gpus", type=_counts, default=[1, 8, 64, 512, 4096], metavar="N,N,...", help="numbers of GPUs")
    add("--gpus_per_node", type=_whole, default=8, metavar="N", help="GPUs that fast links join (default: 8)")
    add("--gpu", default="H200", help=f"{', '.join(GPUS)} (default: H200)")
    for flag, unit in {
        "gpu_memory_gb": "a GPU's memory, 10^9 bytes",
        "bf16_tflops": "its dense BF16 peak",
        "fp8_tflops": "its dense FP8 peak",
        "memory_tbs": "its memory bandwidth, TB/s",
        "link_gbs": "its links to the others of a node, GB/s in one direction",
        "tokens": "token budget, for days (15e12, say)",
        "price_per_gpu_hour": "for the cost of --tokens",
    }.items():
        add(f"--{flag}", type=_positive, metavar="X", help=unit)
    add(
        "--network_gbs",
        type=_positive,
        default=50.0,
        metavar="X",
        help="a node's network for each of its GPUs, GB/s in one direction (default: 50: 400 Gbit/s)",
    )
    add(
        "--check",
        nargs="?",
        const=RESULTS,
        type=Path,
        metavar="FOLDER",
        help="print predictions beside recorded runs (default: benchmarks/results)",
    )
    return parser


def split_flags(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's own flags, parsed, and training's. ValueError for a flag of neither, with the nearest."""
    args, training = parser.parse_known_args(argv)
    both = (parser, config.build_parser(PROG, ""))
    own, theirs = ({o for action in p._actions for o in action.option_strings} for p in both)
    for flag in (text.split("=")[0] for text in training if text.startswith("--")):
        if flag not in theirs:
            meant = nearest(flag, sorted(own | theirs)) or "; --help and train_fp8.py --help have all"
            raise ValueError(f"unknown flag {flag}{meant}")
    return args, training

"""Flags of `python -m benchmarks.plan` in addition to the training flags, and the GPU they describe."""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks.plan.time import GPUS, Gpu
from core.cli import OneLineParser
from core.errors import EXIT_BAD_SETTING, UserError, bad_setting
from core.recipes import RECIPES
from core.settings import nearest
from training import config
from training.config import Config

PROG = "python -m benchmarks.plan"
# Flag -> (field of `Gpu`, conversion factor from the flag's unit to the field's, help).
FIGURES = {
    "gpu_memory_gb": ("memory_gb", 1, "GPU memory, 10^9 bytes"),
    "bf16_tflops": ("bf16_tflops", 1, "dense BF16 peak"),
    "fp8_tflops": ("fp8_tflops", 1, "dense FP8 peak"),
    "memory_tbs": ("memory_bandwidth", 1e12, "memory bandwidth, TB/s"),
    "link_gbs": ("link_bandwidth", 1e9, "links to the other GPUs of a node, GB/s in one direction"),
}


def gpu_name(text: str) -> str | None:
    """Return the key in `GPUS` of a name, ignoring case and the vendor; None if unknown."""
    wanted = text.upper().removeprefix("NVIDIA").strip()
    return next((key for key in GPUS if key.upper() == wanted), None)


def find_gpu(args: argparse.Namespace, cfg: Config) -> Gpu:
    """Return the GPU of --gpu, updated by the other flags. UserError if it cannot run the recipe."""
    values = {flag: getattr(args, flag) for flag in FIGURES}
    given = {FIGURES[flag][0]: value * FIGURES[flag][1] for flag, value in values.items() if value}
    if name := gpu_name(args.gpu):
        if cfg.precision.mixed_precision == "fp8":
            _refuse_architecture(name, cfg)
        return GPUS[name]._replace(**given)
    if missing := [f"--{flag}" for flag, value in values.items() if not value and flag != "fp8_tflops"]:
        known = "" if given else f" ({', '.join(GPUS)})"
        fp8 = "" if args.fp8_tflops else " (and --fp8_tflops, if it has FP8)"
        raise bad_setting(f"unknown{known}; add its {', '.join(missing)}{fp8}", gpu=args.gpu)
    return Gpu(**({"fp8_tflops": None} | given))


def _refuse_architecture(name: str, cfg: Config) -> None:
    def able(architectures: tuple[str, ...]) -> str:
        return "needs one of " + ", ".join(n for n, gpu in GPUS.items() if gpu.architecture in architectures)

    architectures, own = RECIPES[cfg.recipe].architectures, GPUS[name].architecture
    if architectures and own not in architectures:
        raise bad_setting(able(architectures), fp8_scenario=cfg.recipe, gpu=name)
    if cfg.model.use_te and cfg.precision.fp8_fp32_scales and own != "Hopper":
        raise bad_setting(able(("Hopper",)), fp8_fp32_scales=True, gpu=name)


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
    """Build a parser for the plan's own flags, without the training flags."""
    parser = OneLineParser(
        prog=PROG,
        description=description,
        allow_abbrev=False,
        epilog="All flags of training are accepted too: python train_fp8.py --help",
    )
    add: Any = parser.add_argument
    add("--gpus", type=_counts, default=[1, 8, 64, 512, 4096], metavar="N,N,...", help="numbers of GPUs")
    add("--gpus_per_node", type=_whole, default=8, metavar="N", help="GPUs joined by fast links (default: 8)")
    add("--gpu", default="H200", help=f"{', '.join(GPUS)} (default: H200)")
    for flag, (_, _, unit) in FIGURES.items():
        add(f"--{flag}", type=_positive, metavar="X", help=unit)
    network = "a node's network per GPU, GB/s in one direction (default: 50: 400 Gbit/s)"
    add("--network_gbs", type=_positive, default=50.0, metavar="X", help=network)
    add("--tokens", type=_positive, metavar="X", help="token budget, for days (15e12, for example)")
    add("--price_per_gpu_hour", type=_positive, metavar="X", help="for the cost of --tokens")
    add(
        "--check",
        action="store_true",
        help="print predictions next to the recorded runs in benchmarks/results",
    )
    return parser


def split_flags(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the plan's parsed flags, and the remaining training flags. UserError for an unknown flag."""
    args, training = parser.parse_known_args(argv)
    both = (parser, config.build_parser(PROG, ""))
    own, theirs = ({o for action in p._actions for o in action.option_strings} for p in both)
    for flag in (text.split("=")[0] for text in training if text.startswith("--")):
        if flag not in theirs:
            hint = nearest(flag, sorted(own | theirs)) or "; --help and train_fp8.py --help have all"
            raise UserError(f"unknown flag {flag}{hint}", exit_code=EXIT_BAD_SETTING)
    return args, training

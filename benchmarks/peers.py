"""Measure the training speed of the usual open-source stack, to compare this suite with.

The stack: a transformers model with random BF16 weights, torch's SDPA, torchao's FP8, torch.compile per
layer, torch's fused AdamW with BF16 states, and Liger's fused linear cross entropy, on random tokens. It uses
no training code of this suite. `--device cpu` is a smoke test without torch.compile and Liger.

    python -m benchmarks.peers --model_name meta-llama/Llama-3.1-8B --max_seq_length 8192 --batch_size 1 \\
        --precision tensorwise --steps 16 --output_dir DIR

writes the run folder DIR/transformers-MODEL-PRECISION-LENGTHxBATCH, for benchmarks.report; with
--gradient_accumulation_steps N its name ends with xN.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.benchmarks.records.launch import command_parser, run_command
from fp8_suite.benchmarks.report import main as report
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.files import to_json
from fp8_suite.core.gpus import peak_tflops
from fp8_suite.core.packages import version
from fp8_suite.core.recipes import TORCHAO_RECIPES
from fp8_suite.core.settings import nearest
from fp8_suite.te_models.presets import PRESETS
from fp8_suite.te_models.shape import ModelShape, model_flops
from fp8_suite.training.config import Config
from fp8_suite.training.tracking.environment import describe_environment
from torch import Tensor, nn

PROG = "python -m benchmarks.peers"
PRECISIONS = ("bf16", *TORCHAO_RECIPES)
PACKAGES = ("liger_kernel", "triton")
WARMUP_STEPS = 5  # compile kernels and reserve memory
SIZES = {  # flag -> default, unit
    "max_seq_length": (8192, "tokens"),
    "batch_size": (1, "sequences per micro-batch"),
    "gradient_accumulation_steps": (1, "micro-batches per step"),
}
# Shapes: N micro-batches of B sequences of S tokens, T = B * S, D hidden size, V vocabulary size.


def measure(argv: list[str]) -> int:
    """Train, then write and report on the run folder."""
    arguments = parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "no GPU found; --device cpu tests the program, but its rates are meaningless"
        raise bad_setting(reason, device="cuda")
    torch.manual_seed(0)
    model = build(arguments, device)
    losses, seconds = train(model, arguments, device)
    stack = "transformers" if arguments.precision == "bf16" else "transformers+torchao"
    name = f"{stack}-{arguments.model_name.rpartition('/')[2]}-{arguments.precision}"
    accumulation = arguments.gradient_accumulation_steps
    size = f"{arguments.max_seq_length}x{arguments.batch_size}" + f"x{accumulation}" * (accumulation > 1)
    folder = Path(arguments.output_dir) / f"{name}-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, arguments, model.config, losses, seconds)
    return report.main([str(folder)])


def write_run(
    folder: Path, arguments: argparse.Namespace, config: Any, losses: list[float], seconds: list[float]
) -> None:
    """Write the measurement as a run folder with settings, environment, metrics and summary."""
    gpu = arguments.device == "cuda"
    mixed = "bf16" if arguments.precision == "bf16" else "fp8"
    scenario = {"fp8_scenario": arguments.precision} if mixed == "fp8" else {}
    settings = {
        **{name: getattr(arguments, name) for name in ("model_name", *SIZES)},
        **{"init": "random", "dataset_name": "random tokens"},
        **{"mixed_precision": mixed, "moment_dtype": "bf16", "master_weights": "none"},
    }
    known = {"use_te": False, "mixed_precision": mixed, "recipe": arguments.precision, "gpus": int(gpu)}
    environment = describe_environment() | {"optimizer": "torch's fused AdamW, BF16 states, no masters"}
    environment["versions"] |= {name: version(name) for name in PACKAGES}
    measured = rates(arguments, config, statistics.median(seconds[WARMUP_STEPS:]))
    known |= {"model_name": arguments.model_name, "steps": len(losses), "train_loss": losses[-1]}
    files = {
        "settings": Config().to_dict() | settings | scenario,
        "env": environment | known,
        "summary": known | measured | {"gpu_name": environment["gpu_name"], "world_size": 1, "nodes": 1},
    }
    for name, values in files.items():
        (folder / f"{name}.json").write_bytes(to_json(values, indent=1))
    tokens = tokens_per_step(arguments)
    steps = [
        to_json({"step": step, "train/loss": loss, "perf/tokens_per_second": tokens / second})
        for step, (loss, second) in enumerate(zip(losses, seconds, strict=True), 1)
    ]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(steps) + b"\n")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(PROG, __doc__)
    parser.add_argument("--model_name", metavar="PRESET", required=True, help="model in te_models/presets.py")
    for name, (default, noun) in (SIZES | {"steps": (16, "steps")}).items():
        shown = f"{noun} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=shown)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder for the run folder")
    arguments = parser.parse_args(argv)
    if (name := arguments.model_name) not in PRESETS:
        raise bad_setting(f"not in te_models/presets.py{nearest(name, PRESETS)}", model_name=name)
    if arguments.steps <= WARMUP_STEPS:
        raise bad_setting(f"the first {WARMUP_STEPS} steps are not measured; use more", steps=arguments.steps)
    return arguments


def build(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the causal LM in BF16, with FP8 layers unless --precision bf16, compiled on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dimensions = dict(PRESETS[arguments.model_name])
    config = AutoConfig.for_model(dimensions.pop("model_type"), **dimensions)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    layers = model.model.layers
    if arguments.precision != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name(arguments.precision)
        convert_to_float8_training(layers, config=replace(settings, emulate=device.type == "cpu"))
    if device.type == "cuda":
        for layer in layers:
            layer.compile()
    return model.train()


def head_loss(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the mean cross entropy as a function of head [V, D], hidden states [T, D] and labels [T]."""
    if device.type == "cpu":
        return lambda head, hidden, labels: F.cross_entropy((hidden @ head.T).float(), labels)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()


def train(
    model: nn.Module, arguments: argparse.Namespace, device: torch.device
) -> tuple[list[float], list[float]]:
    """Train; return the loss and the wall time in seconds of every step, optimizer included."""
    cross_entropy = head_loss(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    accumulation = arguments.gradient_accumulation_steps
    shape = (arguments.steps, accumulation, arguments.batch_size, arguments.max_seq_length)
    tokens = torch.randint(model.config.vocab_size, shape, device=device)  # [steps, N, B, S]
    losses, seconds = [], []
    for step in tokens:
        synchronize()
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for ids in step:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [B, S, D]
            loss = cross_entropy(model.lm_head.weight, hidden.flatten(0, 1), ids.roll(-1, 1).flatten())
            (loss / accumulation).backward()
            total += loss.detach() / accumulation
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(total.item())
    return losses, seconds


def tokens_per_step(arguments: argparse.Namespace) -> int:
    return math.prod(getattr(arguments, name) for name in SIZES)


def rates(arguments: argparse.Namespace, config: Any, step: float) -> dict[str, Any]:
    """Return throughput and memory for `step` seconds per step."""
    gpu = arguments.device == "cuda"
    tokens = tokens_per_step(arguments)
    flops = model_flops(
        ModelShape.from_hf_config(config),
        tokens=tokens,
        sum_squared_lengths=tokens * arguments.max_seq_length,
    )
    peak = peak_tflops(torch.cuda.get_device_name(), "bf16") if gpu else None
    return {
        "tokens_per_second": tokens / step,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "model_tflops_per_gpu": flops / step / 1e12,
        "mfu_bf16": flops / step / 1e12 / peak if peak else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the measurement. Exit code 2 for a bad setting."""
    return run_command(measure, argv)


if __name__ == "__main__":
    sys.exit(main())

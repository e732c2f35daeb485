"""Measure the training speed of the usual open-source stack, to compare this suite with.

The stack: a transformers model with random BF16 weights, torch's SDPA, torchao's FP8, torch.compile per
layer, torch's fused AdamW with BF16 states, and Liger's fused linear cross entropy, on random tokens. It uses
no training code of this suite. `--device cpu` is a smoke test without torch.compile and Liger.

    python -m benchmarks.peers --model_name meta-llama/Llama-3.1-8B --max_seq_length 8192 --batch_size 1 \\
        --precision tensorwise --steps 16 --output_dir DIR

writes DIR/peer-MODEL-PRECISION-LENGTHxBATCH.json and prints it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.benchmarks.records.launch import command_parser, run_command
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.gpus import peak_tflops
from fp8_suite.core.packages import ROOT, version
from fp8_suite.core.recipes import TORCHAO_RECIPES
from fp8_suite.core.settings import nearest
from fp8_suite.te_models.presets import PRESETS
from fp8_suite.te_models.shape import ModelShape, model_flops
from fp8_suite.training.tracking.environment import git_state
from torch import Tensor, nn

PROG = "python -m benchmarks.peers"
PRECISIONS = ("bf16", *TORCHAO_RECIPES)
PACKAGES = ("torch", "transformers", "torchao", "liger_kernel", "triton")
WARMUP_STEPS = 5  # compile kernels and reserve memory
# Shapes: B sequences of S tokens, T = B * S, D hidden size, V vocabulary size.


def measure(argv: list[str]) -> int:
    """Train, then write and print the record."""
    arguments = parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "no GPU found; --device cpu tests the program, but its rates are meaningless"
        raise bad_setting(reason, device="cuda")
    torch.manual_seed(0)
    model = build(arguments, device)
    losses, seconds = train(model, arguments, device)
    record = {
        "stack": "transformers + torchao" if arguments.precision != "bf16" else "transformers",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([*PROG.split(), *argv]),
        "settings": vars(arguments) | {"num_layers": model.config.num_hidden_layers},
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "cudnn": torch.backends.cudnn.version(),
        "git": git_state(ROOT),
        **rates(arguments, model.config, statistics.median(seconds[WARMUP_STEPS:])),
        "losses": losses,
        "step_seconds": seconds,
    }
    name = f"peer-{arguments.model_name.rpartition('/')[2]}-{arguments.precision}"
    path = Path(arguments.output_dir) / f"{name}-{arguments.max_seq_length}x{arguments.batch_size}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(PROG, __doc__)
    parser.add_argument("--model_name", metavar="PRESET", required=True, help="model in te_models/presets.py")
    parser.add_argument(
        "--max_seq_length", type=int, default=8192, metavar="N", help="tokens (default: 8192)"
    )
    parser.add_argument("--batch_size", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: bf16")
    steps = f"steps, of which the first {WARMUP_STEPS} are not measured (default: 16)"
    parser.add_argument("--steps", type=int, default=16, metavar="N", help=steps)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder for the record")
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
    shape = (arguments.steps, arguments.batch_size, arguments.max_seq_length)
    tokens = torch.randint(model.config.vocab_size, shape, device=device)  # [steps, B, S]
    losses, seconds = [], []
    for ids in tokens:
        synchronize()
        start = time.perf_counter()
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [B, S, D]
        loss = cross_entropy(model.lm_head.weight, hidden.flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, seconds


def rates(arguments: argparse.Namespace, config: Any, step: float) -> dict[str, Any]:
    """Return throughput and memory for `step` seconds per step."""
    gpu = arguments.device == "cuda"
    tokens = arguments.batch_size * arguments.max_seq_length
    flops = model_flops(
        ModelShape.from_hf_config(config),
        tokens=tokens,
        sum_squared_lengths=arguments.batch_size * arguments.max_seq_length**2,
    )
    peak = peak_tflops(torch.cuda.get_device_name(), "bf16") if gpu else None
    return {
        "median_step_seconds": step,
        "tokens_per_second": tokens / step,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "model_tflops": flops / step / 1e12,
        "mfu_bf16": flops / step / 1e12 / peak if peak else None,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the measurement. Exit code 2 for a bad setting."""
    return run_command(measure, argv)


if __name__ == "__main__":
    sys.exit(main())

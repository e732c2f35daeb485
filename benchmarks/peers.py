"""Measure the stack that people train with without this suite, on the same GPU.

transformers' model from random weights, torch's attention, torchao's FP8, torch.compile layer by layer,
torch's fused AdamW over BF16 weights and states, Liger's fused linear cross entropy where it is installed
(else chunks of logits); synthetic tokens, every row a full sequence. No training code of this suite runs.

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.records.launch import command_parser, run_command
from core.errors import bad_setting
from core.packages import ROOT, version
from core.recipes import TORCHAO_RECIPES
from core.settings import nearest
from te_models.presets import PRESETS
from training.tracking.environment import git_state
from training.tracking.metrics import ModelShape, model_flops, peak_tflops

PROG = "python -m benchmarks.peers"
PRECISIONS = ("bf16", *TORCHAO_RECIPES)
PACKAGES = ("torch", "transformers", "torchao", "liger_kernel", "triton")
WARMUP_STEPS = 5  # kernels are compiled and memory is reserved in them
CHUNK_TOKENS = 2048  # logits in memory at a time, without Liger

# B sequences of S tokens, T = B * S, D hidden size, V vocabulary.


def measure(argv: list[str]) -> int:
    """Train, then write and print the record."""
    arguments = parse(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise bad_setting(
            "no GPU here; --device cpu tries the program, its rates are meaningless", device="cuda"
        )
    torch.manual_seed(arguments.seed)
    model = build(arguments, device)
    kind, cross_entropy = head_loss(device)
    losses, seconds = train(model, cross_entropy, arguments, device)
    record = describe(argv, arguments, model.config, device) | {"cross_entropy": kind}
    record |= results(arguments, model.config, losses, seconds, record["gpu"])
    name = f"peer-{arguments.model_name.rpartition('/')[2]}-{arguments.precision}"
    path = Path(arguments.output_dir) / f"{name}-{arguments.max_seq_length}x{arguments.batch_size}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(PROG, __doc__)
    parser.add_argument("--model_name", metavar="PRESET", required=True, help="see te_models/presets.py")
    parser.add_argument("--num_layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--max_seq_length", type=int, default=8192)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--max_grad_norm", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output_dir", required=True)
    arguments = parser.parse_args(argv)
    if (name := arguments.model_name) not in PRESETS:
        raise bad_setting(f"no preset of te_models/presets.py{nearest(name, PRESETS)}", model_name=name)
    if arguments.steps <= WARMUP_STEPS:
        raise bad_setting(f"the first {WARMUP_STEPS} are not counted; give more", steps=arguments.steps)
    return arguments


def build(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the causal LM in BF16, converted to FP8 and compiled as set."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dimensions = dict(PRESETS[arguments.model_name])
    if arguments.num_layers:
        dimensions["num_hidden_layers"] = arguments.num_layers
    config = AutoConfig.for_model(dimensions.pop("model_type"), **dimensions)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = model.model.layers
    if arguments.precision != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name(arguments.precision)
        convert_to_float8_training(layers, config=replace(settings, emulate=device.type == "cpu"))
    if not arguments.no_compile:
        for layer in layers:
            layer.compile()
    return model.train()


def head_loss(device: torch.device) -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return name and function of the mean cross entropy of hidden states [T, D] under a head [V, D]."""
    if device.type == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        return "liger", lambda hidden, head, labels: fused(head, hidden, labels)
    return "chunked logits", chunked_cross_entropy


def chunked_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy, with logits of CHUNK_TOKENS tokens in memory at a time."""

    def chunk_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for h, y in zip(hidden.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        total = total + torch.utils.checkpoint.checkpoint(chunk_loss, h, y, use_reentrant=False)
    return total / len(labels)


def train(
    model: nn.Module, cross_entropy: Callable, arguments: argparse.Namespace, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return loss and wall time in seconds of every step, optimizer included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    shape = (arguments.steps, arguments.batch_size, arguments.max_seq_length)
    tokens = torch.randint(model.config.vocab_size, shape, device=device)  # [steps, B, S]
    losses, seconds = [], []
    for ids in tokens:
        synchronize()
        start = time.perf_counter()
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [B, S, D]
        loss = cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, ids.roll(-1, 1).flatten())
        loss.backward()
        if arguments.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, seconds


def describe(
    argv: list[str], arguments: argparse.Namespace, config: Any, device: torch.device
) -> dict[str, Any]:
    """Return command, settings, machine and versions."""
    return {
        "stack": "transformers + torchao" if arguments.precision != "bf16" else "transformers",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([*PROG.split(), *argv]),
        "settings": vars(arguments) | {"num_layers": config.num_hidden_layers},
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "cudnn": torch.backends.cudnn.version(),
        "git": git_state(ROOT),
    }


def results(
    arguments: argparse.Namespace, config: Any, losses: list[float], seconds: list[float], gpu: str | None
) -> dict[str, Any]:
    """Return the rates of the median step after warm-up."""
    step = statistics.median(seconds[WARMUP_STEPS:])
    tokens = arguments.batch_size * arguments.max_seq_length
    record = {
        "median_step_seconds": step,
        "tokens_per_second": tokens / step,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "losses": losses,
        "step_seconds": seconds,
    }
    if shape := ModelShape.from_hf_config(config):
        squared = arguments.batch_size * arguments.max_seq_length**2
        record["model_tflops"] = model_flops(shape, tokens=tokens, sum_squared_lengths=squared) / step / 1e12
        if gpu and (peak := peak_tflops(gpu, "bf16")):
            record["mfu_bf16"] = record["model_tflops"] / peak
    return record


def main(argv: list[str] | None = None) -> int:
    """Measure; exit code 2 for a bad setting."""
    return run_command(measure, argv)


if __name__ == "__main__":
    sys.exit(main())

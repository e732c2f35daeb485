"""Measure the training speed of the usual open-source stacks, to compare this suite with.

A stack: a transformers model with random BF16 weights, torch's fused AdamW with BF16 states, and Liger's
fused linear cross entropy, on random tokens. It uses no training code of this suite. Its decoder layers:

- torchao  transformers' with torch's SDPA, torchao's FP8 and torch.compile per layer. `--device cpu` is a
           smoke test without torch.compile and Liger.
- te       te.TransformerLayer under te.autocast, as in NVIDIA's tutorial te_llama. Llama on a GPU only.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.benchmarks.report import main as report
from fp8_suite.core.cli import add_number, as_command, command_parser
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.files import to_json
from fp8_suite.core.gpus import peak_tflops
from fp8_suite.core.packages import version
from fp8_suite.core.recipes import TORCHAO_RECIPES
from fp8_suite.core.settings import nearest
from fp8_suite.te_models.presets import PRESETS
from fp8_suite.te_models.shape import ModelShape, model_flops
from fp8_suite.training.config import Config
from fp8_suite.training.precision.te_runtime import attention_backend, why_not_te
from fp8_suite.training.tracking.environment import describe_environment
from torch import Tensor, nn

PROG = "python -m benchmarks.peers"
STACKS = {"torchao": ("bf16", *TORCHAO_RECIPES), "te": ("bf16", "delayed")}  # precisions of each
PACKAGES = ("liger_kernel", "triton")
WARMUP_STEPS = 5  # compile kernels and reserve memory
SIZES = {  # flag -> default, unit
    "max_seq_length": (8192, "tokens"),
    "batch_size": (1, "sequences per micro-batch"),
    "gradient_accumulation_steps": (1, "micro-batches per step"),
}
TE_WEIGHTS = {  # parameter of te.TransformerLayer -> transformers' modules whose weights it stacks
    "self_attention.layernorm_qkv.layer_norm_weight": ("input_layernorm",),
    "self_attention.layernorm_qkv.query_weight": ("self_attn.q_proj",),
    "self_attention.layernorm_qkv.key_weight": ("self_attn.k_proj",),
    "self_attention.layernorm_qkv.value_weight": ("self_attn.v_proj",),
    "self_attention.proj.weight": ("self_attn.o_proj",),
    "layernorm_mlp.layer_norm_weight": ("post_attention_layernorm",),
    "layernorm_mlp.fc1_weight": ("mlp.gate_proj", "mlp.up_proj"),
    "layernorm_mlp.fc2_weight": ("mlp.down_proj",),
}
# Shapes: N micro-batches of B sequences of S tokens, T = B * S, D hidden size, K head size, V vocabulary.


@as_command
def main(argv: list[str]) -> int:
    """Train, then write and report on the run folder. Exit code 2 for a bad setting."""
    arguments = parse(argv)
    device = torch.device(arguments.device)
    if arguments.stack == "te" and (reason := why_not_te()):
        raise bad_setting(reason, stack="te")
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "no GPU found; --device cpu tests the program, but its rates are meaningless"
        raise bad_setting(reason, device="cuda")
    torch.manual_seed(0)
    model = build(arguments, device)
    losses, seconds = train(model, arguments, device)
    layers = "" if (arguments.stack, arguments.precision) == ("torchao", "bf16") else f"+{arguments.stack}"
    name = f"transformers{layers}-{arguments.model_name.rpartition('/')[2]}-{arguments.precision}"
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
    gpu, use_te = arguments.device == "cuda", arguments.stack == "te"
    mixed = "bf16" if arguments.precision == "bf16" else "fp8"
    scenario = {"fp8_scenario": arguments.precision} if mixed == "fp8" else {}
    settings = {
        **{name: getattr(arguments, name) for name in ("model_name", *SIZES)},
        **{"init": "random", "dataset_name": "random tokens", "use_te": use_te},
        **{"mixed_precision": mixed, "moment_dtype": "bf16", "master_weights": "none"},
    }
    known = {"use_te": use_te, "mixed_precision": mixed, "recipe": arguments.precision, "gpus": int(gpu)}
    environment = describe_environment() | {"optimizer": "torch's fused AdamW, BF16 states, no masters"}
    environment["attention_backend"] = attention_backend()  # TE's
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
    for name, (default, noun) in SIZES.items():
        add_number(parser, name, default, noun)
    steps = f"steps; the first {WARMUP_STEPS} are not measured"
    add_number(parser, "steps", 16, steps, minimum=WARMUP_STEPS + 1)
    parser.add_argument("--stack", choices=STACKS, default="torchao", help="default: torchao")
    precisions = dict.fromkeys(sum(STACKS.values(), ()))
    parser.add_argument("--precision", choices=precisions, default="bf16", help="default: bf16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder for the run folder")
    arguments = parser.parse_args(argv)
    if (name := arguments.model_name) not in PRESETS:
        raise bad_setting(f"not in te_models/presets.py{nearest(name, PRESETS)}", model_name=name)
    if arguments.precision not in (able := STACKS[arguments.stack]):
        raise bad_setting(f"use {', '.join(able)}", stack=arguments.stack, precision=arguments.precision)
    if arguments.stack == "te" and (PRESETS[name]["model_type"], arguments.device) != ("llama", "cuda"):
        raise bad_setting("measures a Llama on a GPU", stack="te", model_name=name, device=arguments.device)
    return arguments


def build(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the causal LM in BF16 with the stack's layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dimensions = dict(PRESETS[arguments.model_name])
    config = AutoConfig.for_model(dimensions.pop("model_type"), **dimensions)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    layers = model.model.layers
    if arguments.stack == "te":
        use_te_layers(model, arguments.max_seq_length)
    elif arguments.precision != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig.from_recipe_name(arguments.precision)
        convert_to_float8_training(layers, config=replace(settings, emulate=device.type == "cpu"))
    if device.type == "cuda" and arguments.stack == "torchao":
        for layer in layers:
            layer.compile()
    return model.train()


def use_te_layers(model: nn.Module, length: int) -> None:
    """Replace Llama's layers by TE's with the same weights, for sequences of up to `length` tokens."""
    import transformer_engine.pytorch as te

    config, rope = model.config, rope_angles(model, length)
    sizes = config.hidden_size, config.intermediate_size, config.num_attention_heads
    settings = {"hidden_dropout": 0, "attention_dropout": 0, "bias": False, "fuse_qkv_params": False}
    settings |= {"normalization": "RMSNorm", "activation": "swiglu", "attn_input_format": "bshd"}
    settings |= {"num_gqa_groups": config.num_key_value_heads, "layernorm_epsilon": config.rms_norm_eps}
    for index, layer in enumerate(model.model.layers):
        te_layer = te.TransformerLayer(*sizes, **settings, params_dtype=torch.bfloat16)
        weights = te_weights(layer)
        for name, parameter in te_layer.named_parameters():
            parameter.data.copy_(weights[name])
        model.model.layers[index] = TELayer(te_layer, rope)


def te_weights(layer: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a Llama layer by TE's names."""
    state = layer.state_dict()
    weights = {te: torch.cat([state.pop(f"{hf}.weight") for hf in names]) for te, names in TE_WEIGHTS.items()}
    assert not state, f"TE's layer lacks {', '.join(state)}"
    return weights


def rope_angles(model: nn.Module, length: int) -> Tensor:
    """Return RoPE's angles in TE's layout, [S, 1, 1, K] float32."""
    frequencies = model.model.rotary_emb.inv_freq  # [K/2]
    return torch.outer(torch.arange(length).to(frequencies), frequencies).repeat(1, 2)[:, None, None]


class TELayer(nn.Module):
    """te.TransformerLayer, causal by default, with the call of transformers' decoder layer."""

    def __init__(self, layer: nn.Module, rope: Tensor):
        super().__init__()
        self.layer, self.rope = layer, rope

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Tensor:
        return self.layer(hidden, is_first_microbatch=is_first_microbatch, rotary_pos_emb=self.rope)


def forward_context(precision: str) -> Callable[[], AbstractContextManager]:
    """Return a factory of contexts for forward passes: te.autocast with TE's recipe, otherwise empty."""
    if precision != "delayed":
        return nullcontext
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    return partial(te.autocast, enabled=True, recipe=DelayedScaling(fp8_format=Format.HYBRID))


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
    cross_entropy, autocast = head_loss(device), forward_context(arguments.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    accumulation = arguments.gradient_accumulation_steps
    caches_weights = arguments.stack == "te" and accumulation > 1  # in FP8, for all micro-batches of a step
    shape = (arguments.steps, accumulation, arguments.batch_size, arguments.max_seq_length)
    tokens = torch.randint(model.config.vocab_size, shape, device=device)  # [steps, N, B, S]
    losses, seconds = [], []
    for step in tokens:
        synchronize()
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for index, ids in enumerate(step):
            first = {"is_first_microbatch": index == 0} if caches_weights else {}
            with autocast():
                hidden = model.model(input_ids=ids, use_cache=False, **first).last_hidden_state  # [B, S, D]
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
    shape, pairs = ModelShape.from_hf_config(config), tokens * arguments.max_seq_length
    flops = model_flops(shape, tokens=tokens, sum_squared_lengths=pairs)
    peak = peak_tflops(torch.cuda.get_device_name(), "bf16") if gpu else None
    return {
        "tokens_per_second": tokens / step,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "model_tflops_per_gpu": flops / step / 1e12,
        "mfu_bf16": flops / step / 1e12 / peak if peak else None,
    }


if __name__ == "__main__":
    sys.exit(main())

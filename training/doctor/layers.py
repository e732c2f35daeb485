"""Checks of cuDNN, Transformer Engine, attention and recipes, and benchmarks of GEMMs and a layer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError, first_line
from core.packages import version
from core.recipes import FALLBACK_RECIPE, RECIPES, TE_RECIPES, TORCHAO_RECIPES
from te_models.build import build_model, plan_model
from te_models.engine import Backend
from te_models.kernels import flash_attention
from te_models.options import BuildOptions
from training.doctor.machine import Finding, nvcc_cuda, this_pip
from training.precision import recipes, te_runtime, torchao_fp8
from training.precision.recipes import Precision
from training.precision.settings import PrecisionConfig
from training.tracking.metrics import ModelShape, model_flops, peak_tflops

LARGE, SMALL = "meta-llama/Llama-3.1-8B", "tiny-llama"  # one layer is timed; one is trained in each recipe
TE_PARTS = ("transformer_engine", "transformer_engine_torch")
TE_PARTS += ("transformer_engine_cu12", "transformer_engine_cu13")  # of another CUDA than torch's: an error
GEMM_SIZE = LAYER_TOKENS = 8192  # too large for caches
# Healthy data-centre GPUs reach 60 to 85 % of their dense peak in such GEMMs, power-limited ones 50 to 60 %.
# An H200 trained the whole 8B at 0.51 (BF16) and 0.34 (FP8) of its peak; two thirds of that are suspicious.
LOW_SHARE = {"GEMM": {"bf16": 0.5, "fp8": 0.5}, "layer": {"bf16": 0.34, "fp8": 0.22}}
LAYER_BYTES = 10e9  # free memory needed: a layer, its gradients and activations are about 6 GB


def check_cudnn() -> Iterator[Finding]:
    """Report the cuDNN in use; a fault if loading Transformer Engine adds a second one."""
    own, number = te_runtime.torch_cudnn(), torch.backends.cudnn.version()
    te_runtime.why_not_te()
    folders = [str(folder) for folder in te_runtime.loaded_cudnns()]
    if len(folders) > 1:
        text = f"two cuDNNs are mixed, {' and '.join(folders)}: attention may run unfused, 4x slower"
        yield Finding("fault", text, f"export CUDNN_HOME={own}", {"loaded": folders})
    else:
        yield Finding("ok", f"cuDNN {number} of torch, in {own}", data={"cudnn": number, "loaded": folders})


def check_te() -> Iterator[Finding]:
    """Report whether Transformer Engine loads, else the cause and the install command."""
    found, reason = version("transformer_engine"), te_runtime.why_not_te()
    if reason is None:
        yield Finding("ok", f"Transformer Engine {found} loads", data={"transformer_engine": found})
    elif not torch.cuda.is_available():
        yield Finding("ok", f"Transformer Engine {found or 'is not installed'}: TE layers run emulated")
    elif found is None:
        text = f"Transformer Engine is not installed, for native TE layers (--use_te): {install_te()}"
        yield Finding("note", text, install_te())
    else:
        text = f"Transformer Engine {found} does not load: {first_line(te_runtime.load_error())}"
        yield Finding("fault", text, install_te())


def install_te() -> str:
    """Return the command that reinstalls all parts of TE and compiles its extension."""
    command = f"pip install setuptools wheel ninja && {te_runtime.INSTALL_TE}"
    if parts := [part for part in TE_PARTS if version(part)]:  # pip's cache may hold one for another torch
        command = f"pip uninstall -y {' '.join(parts)} && {command} --no-cache-dir"
    cuda = torch.version.cuda or ""
    if nvcc_cuda().split(".")[0] == cuda.split(".")[0]:
        return this_pip(command)
    toolkit = f"sudo apt-get install -y cuda-toolkit-{cuda.replace('.', '-')}"  # nvcc of torch's CUDA
    return f"{toolkit} && export CUDA_HOME=/usr/local/cuda-{cuda} && {this_pip(command)}"


def check_flash_attention() -> Iterator[Finding]:
    """Report FlashAttention 4 after the self-test of a run. It is optional: TE also has cuDNN attention."""
    if reason := flash_attention.why_not(128):
        yield Finding("note", f"runs do not use FlashAttention 4: {reason}")
    elif wrong := flash_attention.self_test_te(32, 8, 128, packed=True):
        yield Finding("warn", f"runs do not use FlashAttention 4: {wrong}", this_pip(flash_attention.INSTALL))
    else:
        yield Finding("ok", f"FlashAttention {flash_attention.installed()}: BF16 attention uses it")


def build_step(
    model_name: str, recipe: str, backend: Backend | None, *, packed: bool, tokens: int
) -> tuple[Any, Callable[[], Tensor]]:
    """Return a model of one layer, and its training step, which returns the loss; recipe "bf16": without FP8.

    `backend` None builds Hugging Face layers. The tokens are one sequence, or two when packed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = plan_model(model_name, init="random", use_te=backend is not None)
    plan.config.num_hidden_layers, plan.config.vocab_size = 1, 2048
    build = partial(BuildOptions, te_backend=backend, device=device, dtype=torch.bfloat16, packed=packed)
    convert = te_recipe = None
    if recipe in TE_RECIPES:
        te_recipe = recipes.make_recipe(recipe, PrecisionConfig(), backend)
    elif recipe in TORCHAO_RECIPES:
        emulated = device.type == "cpu"
        convert = partial(torchao_fp8.convert, recipe_of=lambda name: recipe, emulated=emulated)
    model = build_model(plan, build(max_positions=tokens, convert=convert))
    precision = Precision(recipe, recipe, recipe=te_recipe, te_backend=backend)
    autocast = recipes.build_autocast(precision, device=device, parameter_dtype=torch.bfloat16)
    ids, length = torch.randint(0, 2048, (1, tokens), device=device), tokens // 2 if packed else tokens
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if packed:
        ends = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        inputs |= {"cu_seqlens": ends, "max_seqlen": length}

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        with autocast():
            loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    return model, step


def check_recipes() -> Iterator[Finding]:
    """Train a small layer in every recipe, with native TE, emulated TE or Hugging Face layers."""
    reasons: dict[str, bool] = {}  # reason -> True if the recipe should run
    for name in ("bf16", *RECIPES):
        text, data = f"{name:<18}", {"recipe": name}
        backends = [] if name in TORCHAO_RECIPES else ["native", "emulated"]
        for backend in backends if name in TE_RECIPES else [*backends, None]:
            reason, broken = try_recipe(name, backend)
            if reason:
                reasons.setdefault(reason, broken)
            label = backend or "without --use_te"
            data[label] = reason is None
            text += f" {label}: {f'no [{list(reasons).index(reason) + 1}]' if reason else 'yes':<7}"
        yield Finding("ok", text.rstrip(), data=data)
    for number, (reason, broken) in enumerate(reasons.items(), 1):
        yield Finding("fault" if broken else "note", f"[{number}] {reason}")


def try_recipe(name: str, backend: Backend | None) -> tuple[str | None, bool]:
    """Train a layer in a recipe, or in BF16; return why it does not run, and True if it should."""
    try:
        reason = te_runtime.why_not_te() if backend == "native" else None
        if name in TE_RECIPES:
            reason = recipes.why_not(name, backend)
        elif name in TORCHAO_RECIPES:
            torchao_fp8.require_torchao()
            recipes.fp8_gemms_are_emulated()
        if reason:
            return reason, False
        loss = build_step(SMALL, name, backend, packed=False, tokens=128)[1]()
        return (None, False) if loss.isfinite() else (f"{name}, {backend} layers: the loss is {loss}", True)
    except UserError as error:
        return first_line(error), False
    except Exception as error:
        return f"{name}, {backend} layers: {type(error).__name__}: {first_line(error)}", True


def check_attention() -> Iterator[Finding]:
    """Report the attention backend in use for an 8B layer, packed and unpacked."""
    for packed in () if te_runtime.why_not_te() else (True, False):
        build_step(LARGE, "bf16", "native", packed=packed, tokens=512)[1]()
        backend = te_runtime.attention_backend()
        text = f"attention of {'packed' if packed else 'unpacked'} sequences: {backend}"
        status, cure = "ok", None
        if backend == "unfused":
            off = [name for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN") if os.environ.get(name) == "0"]
            cure = "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 python -m training.doctor --no_speed  # TE's reasons"
            cure = f"unset {' '.join(off)}" if off else cure
            status, text = "fault", f"{text}, about 4x slower and with 5x the memory"
        yield Finding(status, text, cure, {"packed": packed, "backend": backend})


def time_gemms() -> Iterator[Finding]:
    """Time large square GEMMs in BF16 and FP8 on the first GPU."""
    n, one = GEMM_SIZE, torch.ones((), device="cuda")
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    yield rate("GEMM", "bf16", 2 * n**3, milliseconds(lambda: torch.mm(a, b.t())))
    if torch.cuda.get_device_capability() >= (8, 9):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        gemm = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
        yield rate("GEMM", "fp8", 2 * n**3, milliseconds(lambda: gemm(a8, b8.t(), one, one)))


def time_layer() -> Iterator[Finding]:
    """Time forward and backward of a decoder layer of Llama 3.1 8B, in BF16 and in FP8."""
    if recipes.why_not(FALLBACK_RECIPE) or torch.cuda.mem_get_info()[0] < LAYER_BYTES:
        return
    times = {}
    for kind, recipe in {"bf16": "bf16", "fp8": FALLBACK_RECIPE}.items():
        model, step = build_step(LARGE, recipe, "native", packed=False, tokens=LAYER_TOKENS)
        shape, tokens = ModelShape.from_hf_config(model.config), LAYER_TOKENS
        times[kind] = milliseconds(step)
        flops = model_flops(shape, tokens=tokens, sum_squared_lengths=tokens**2)
        yield rate("layer", kind, flops, times[kind])
    gain = times["bf16"] / times["fp8"]
    text = f"the layer (Llama 3.1 8B) is {gain:.2f}x as fast in FP8 as in BF16"
    yield Finding("ok" if gain > 1.05 else "warn", text, data={"fp8_gain": gain})


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the median time of `work` on the GPU over half a second, after as long a warm-up."""
    for _ in range(2):  # clocks rise under load: the first round is the warm-up
        times, deadline = [], time.perf_counter() + 0.5
        while time.perf_counter() < deadline:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(8):  # queued, so that the GPU does not wait for the CPU
                work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 8)
    return median(times)


def rate(what: str, kind: str, flops: float, ms: float) -> Finding:
    """Return TFLOP/s and their share of the first GPU's peak; a low share is a warning."""
    tflops, peak = flops / ms / 1e9, peak_tflops(torch.cuda.get_device_name(), kind)
    share = tflops / peak if peak else None
    text = f"{kind.upper()} {what}: {tflops:,.0f} TFLOP/s"
    text += f", {share:.0%} of the peak of {peak:,.0f}" if peak else " (no peak is known for this GPU)"
    data = {"precision": kind, "milliseconds": ms, "tflops": tflops, "share": share}
    if share is None or share >= (low := LOW_SHARE[what][kind]):
        return Finding("ok", text, data=data)
    cure = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE"
    return Finding("warn", f"{text}; below {low:.0%} a GPU is throttled, power-capped or shared", cure, data)

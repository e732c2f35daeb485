"""How fast the first GPU is against its peak: GEMMs, and a decoder layer as it is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from training.doctor.checks import Finding, tool
from training.doctor.gpu import smi

# Healthy data-centre GPUs reach 60 to 85 % of their dense peak in GEMMs of this size, which no cache holds;
# cards that a low power limit slows (L4, H100 PCIe) 50 to 60 %.
GEMM_SIZE = 8192
LOW_GEMM_SHARE = 0.5
# An H200 trained the whole 8B, optimizer included, at 0.51 (BF16) and 0.34 (FP8) of peak when this was set:
# attention runs in BF16 either way, and casts take time. Below two thirds of that something is wrong.
LOW_LAYER_SHARE = {"bf16": 0.34, "fp8": 0.22}
LAYER_TOKENS = 8192
LAYER_BYTES = 10e9  # of free memory: a layer, its gradients and activations take about 6 GB
THROTTLE = {  # bits of clocks_event_reasons.active that say why clocks are low (nvml.h)
    0x2: "application clocks",
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}


def milliseconds(work: Callable[[], Any]) -> float:
    """Median time of `work` on the GPU, by CUDA events, over half a second, after as long a warm-up."""
    import torch

    def several() -> list[float]:  # queued, so that the GPU does not wait for the CPU in between
        events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        events[-1].synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(events)]

    for _ in range(2):  # clocks rise under load: the first round is the warm-up
        times, deadline = [], time.perf_counter() + 0.5
        while not times or time.perf_counter() < deadline:
            times += several()
    return median(times)


def gemm_speed() -> Iterator[Finding]:
    """Large square GEMMs in BF16 and FP8 against this GPU's peak."""
    import torch

    n = GEMM_SIZE
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    work: dict[str, Callable[[], Any]] = {"bf16": lambda: torch.mm(a, b.t())}
    if torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device="cuda")
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        work["fp8"] = lambda: torch._scaled_mm(
            a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    for precision, gemm in work.items():
        what = f"{precision.upper()} GEMM of {n} x {n} x {n}"
        yield rate(what, precision, 2 * n**3, milliseconds(gemm), LOW_GEMM_SHARE, gemm)


def rate(what: str, precision: str, flops: float, ms: float, low: float, work: Callable[[], Any]) -> Finding:
    """TFLOP/s and their share of the peak; under the share `low` a warning that says what the GPU is at."""
    import torch

    from training.tracking.metrics import peak_tflops

    name = torch.cuda.get_device_name()
    tflops, peak = flops / ms / 1e9, peak_tflops(name, precision)
    text = f"{what}: {tflops:,.0f} TFLOP/s"
    data = {"precision": precision, "milliseconds": ms, "tflops": tflops, "share": peak and tflops / peak}
    if peak is None:
        return Finding("ok", f"{text} (no peak rate is known for {name})", data=data)
    text += f", {tflops / peak:.0%} of the peak of {peak:,.0f}"
    if tflops >= low * peak:
        return Finding("ok", text, data=data)
    reasons = under_load(work)
    return Finding(
        "warn",
        f"{text}; below {low:.0%} a GPU is throttled, power-capped or shared. {reasons}",
        "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE",
        data,
    )


def under_load(work: Callable[[], Any]) -> str:
    """Clocks, power, temperature, what limits them, and other processes, while `work` keeps the GPU busy."""
    import torch

    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    for _ in range(min(2000, int(2 / max(1e-4, time.perf_counter() - start)))):  # queued: two seconds of it
        work()
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(0), 'uuid', '')}"
    fields = ("uuid", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")
    rows = [row for row in smi(*fields) if row["uuid"] == uuid]
    masks = [row for row in smi("uuid", "clocks_event_reasons.active") if row["uuid"] == uuid]
    apps = tool("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")[1]
    torch.cuda.synchronize()
    if not rows:
        return "nvidia-smi does not say what it is at"
    clock, top, draw, limit, heat = (rows[0][field] for field in fields[1:])
    said = f"Under load: {clock} of {top} MHz, {draw} of {limit} W, {heat} C"
    mask = int(masks[0]["clocks_event_reasons.active"], 16) if masks else 0
    held = [name for bit, name in THROTTLE.items() if mask & bit]
    if held:
        said += f", held back by {', '.join(held)}"
    processes = sum(line.startswith(uuid) for line in apps.splitlines())
    return said + (f", {processes} processes on it" if processes > 1 else "")


def layer_speed() -> Iterator[Finding]:
    """Forward and backward of one decoder layer of Llama 3.1 8B, in BF16 and in FP8."""
    import torch

    from training.doctor.te import one_layer
    from training.tracking.metrics import ModelShape, model_flops

    if torch.cuda.mem_get_info()[0] < LAYER_BYTES:
        yield Finding(
            "note", f"a decoder layer is not timed: that takes {LAYER_BYTES / 1e9:.0f} GB of GPU memory"
        )
        return
    model, steps = one_layer(packed=False, tokens=LAYER_TOKENS)
    shape = ModelShape.from_hf_config(model.config)
    flops = model_flops(shape, tokens=LAYER_TOKENS, sum_squared_lengths=LAYER_TOKENS**2)
    times = {}
    for precision, step in steps.items():
        times[precision] = milliseconds(step)
        what = f"{precision.upper()} decoder layer of Llama 3.1 8B, forward and backward"
        yield rate(what, precision, flops, times[precision], LOW_LAYER_SHARE[precision], step)
    if "fp8" in times:
        gain = times["bf16"] / times["fp8"]
        text = f"the layer is {gain:.2f}x as fast in FP8 as in BF16"
        yield Finding("ok" if gain > 1.05 else "warn", text, data={"fp8_gain": gain})

"""Breakdown of a step's GPU time by kind of kernel, with torch.profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.files import write_json

# Kind -> regex of kernel names; the first match wins.
KINDS: dict[str, str] = {
    "communication": r"nccl",
    "attention": r"sdpa|fmha|flash|cudnn::fusion|fused_attn|softmax_warp",
    "GEMM": r"nvjet|gemm|cutlass|cublas|xmma|s\d+_tensorop|splitK",
    "optimizer": r"adam",
    "LM head's loss": r"cross_entropy|scaled_kernel|gradient_kernel",
    "norm": r"rmsnorm|layernorm|layer_norm",
    "gradient norm": r"LpNorm|norm_kernel|NormTwo|NormOps",
    "activation": r"gated_act|silu|swiglu",
    "position embedding": r"rope|rotary|rotation_kernel",
    "cast": r"cast|quantize|transpose|amax|scaling_recipe|float8|fp8",
    "copies and sums": r"memcpy|memset|copy|fill|elementwise|CatArray|reduce_kernel|multi_tensor",
}
OTHER, IDLE = "other", "idle"
FIRST_PROFILED_STEP = 9  # first profiled step of a run, after warm-up


class KernelLaunch(NamedTuple):
    """One kernel launch; times in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def breakdown(kernels: Iterable[KernelLaunch], steps: int) -> dict[str, Any]:
    """Return time and launches per step by kind of kernel, the length of a step, and its idle time.

    Overlapping kernels each count in full, so the kinds may add up to more than the step.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    names, launches = Counter[str](), Counter(kind_of(kernel.name) for kernel in ordered)
    kinds, idle, end = Counter[str](), 0.0, ordered[0].start
    for kernel in ordered:
        names[kernel.name] += kernel.end - kernel.start
        kinds[kind_of(kernel.name)] += kernel.end - kernel.start
        idle += max(0.0, kernel.start - end)
        end = max(end, kernel.end)
    scale = 1 / steps / 1e3
    table = {kind: {"ms": t * scale, "launches": launches[kind] / steps} for kind, t in kinds.most_common()}
    return {
        "steps": steps,
        "step_ms": (end - ordered[0].start) * scale,
        "kinds": table | {IDLE: {"ms": idle * scale, "launches": 0}},
        "kernels": [{"name": n, "kind": kind_of(n), "ms": t * scale} for n, t in names.most_common(40)],
    }


def lines(profile: dict[str, Any]) -> list[str]:
    rows = [f"  {kind:<20} {r['ms']:8.2f} ms x{r['launches']:.0f}" for kind, r in profile["kinds"].items()]
    return [f"GPU time of a step, mean of {profile['steps']}: {profile['step_ms']:.2f} ms", *rows]


def check(count: int, device: torch.device) -> None:
    """UserError for --profile_steps without a GPU."""
    if count and device.type != "cuda":
        reason = f"times GPU kernels, and this run is on {device.type}; drop it, or run on a CUDA GPU"
        raise bad_setting(reason, profile_steps=count)


def profiled_steps(count: int, *, done: int, total: int) -> range:
    """Return the steps to profile in a launch that runs steps `done` + 1 to `total`.

    The range starts at step `done` + FIRST_PROFILED_STEP, or earlier if the run is shorter. The launch's
    first step is never profiled, because it selects and compiles kernels.
    """
    first = max(done + 2, min(done + FIRST_PROFILED_STEP, total - count + 1))
    return range(first, min(first + count, total + 1))


class StepProfiler:
    """Profiler of `steps`; writes profile.json and profile_trace.json to `folder`.

    Profiling slows kernel launches, so a launch-bound model shows more idle time.
    """

    def __init__(self, folder: Path, steps: range):
        self.folder, self.steps = folder, steps
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.__enter__()

    def finish(self) -> list[str]:
        """Write the files and return the lines to print."""
        torch.cuda.synchronize()
        profiler = self._profiler
        self.close()
        kernels = [
            KernelLaunch(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        profile, trace = breakdown(kernels, len(self.steps)), self.folder / "profile_trace.json"
        write_json(self.folder / "profile.json", profile)
        profiler.export_chrome_trace(str(trace))
        return [*lines(profile), f"trace, for https://ui.perfetto.dev: {trace}"]

    def close(self) -> None:
        """Stop profiling, also if the run ends early."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None

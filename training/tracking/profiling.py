"""Where the GPU's time goes in a step: kernel times by kind, from torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.files import write_json

# The first kind whose pattern is found in a kernel's name counts.
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
FIRST = 9  # step of a run that is profiled first: warm-up is over, and a log interval of 8 too


class Kernel(NamedTuple):
    """One kernel's run; microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def breakdown(kernels: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds and launches a step by kind, the span of a step, and the time in which no kernel ran.

    Kernels that overlap count whole in their kinds, so that kinds may add up to more than the span.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    if not ordered:
        raise ValueError("no kernel was seen")
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    names: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, ordered[0].start
    for kernel in ordered:
        kind = kind_of(kernel.name)
        times[kind] += kernel.end - kernel.start
        counts[kind] += 1
        names[kernel.name] += kernel.end - kernel.start
        busy += max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    span = reached - ordered[0].start
    kinds = {
        kind: {"ms": time / steps / 1e3, "launches": counts[kind] / steps}
        for kind, time in sorted(times.items(), key=lambda item: -item[1])
    }
    longest = sorted(names.items(), key=lambda item: -item[1])[:40]
    return {
        "steps": steps,
        "step_ms": span / steps / 1e3,
        "kinds": kinds | {IDLE: {"ms": (span - busy) / steps / 1e3, "launches": 0}},
        "kernels": [{"name": name, "kind": kind_of(name), "ms": t / steps / 1e3} for name, t in longest],
    }


def lines(found: dict[str, Any]) -> list[str]:
    body = [f"  {kind:<20} {of['ms']:8.2f} ms x{of['launches']:.0f}" for kind, of in found["kinds"].items()]
    return [f"GPU time of a step, mean of {found['steps']}: {found['step_ms']:.2f} ms", *body]


def check(count: int, device: torch.device) -> None:
    """RuntimeError where --profile_steps has no kernels to time."""
    if count and device.type != "cuda":
        raise RuntimeError(
            f"--profile_steps {count}: it times a GPU's kernels, and this run is on {device.type}; drop it, "
            "or run on a CUDA GPU"
        )


def profiled_steps(count: int, *, done: int, total: int) -> range:
    """The `count` steps to profile of a run that goes on after `done` steps and ends at `total`.

    They begin FIRST steps on, or are the last ones of a shorter run. A run's first step, in which kernels are
    chosen and compiled, is never among them. ValueError for a run that is too short; a resumed one that has
    too few steps left profiles nothing.
    """
    if count and total - done <= count:
        if done:
            return range(0)
        raise ValueError(
            f"--profile_steps {count}: this run has {total - done} steps, and its first is not profiled; "
            "profile fewer, or raise --max_steps"
        )
    first = min(done + FIRST, total - count + 1)
    return range(first, first + count)


class StepProfiler:
    """Profiles `steps`; afterwards profile.json and profile_trace.json are in `folder`.

    Steps that are profiled launch slower, which shows as idle time where a model is launch-bound.
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
        """Write the files; lines to show."""
        torch.cuda.synchronize()
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        found = breakdown(kernels, len(self.steps))
        write_json(self.folder / "profile.json", found)
        profiler.export_chrome_trace(str(self.folder / "profile_trace.json"))
        return [*lines(found), f"trace, for https://ui.perfetto.dev: {self.folder / 'profile_trace.json'}"]

    def close(self) -> None:
        """Stop, if the run ended meanwhile."""
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None

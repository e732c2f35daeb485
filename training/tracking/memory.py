"""Memory of the GPUs during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class GpuMemory:
    """Reads the peak memory and how often torch had to flush its cache of free memory."""

    flushes: float | None = None  # at the last log; None before the first
    has_warned: bool = False

    @staticmethod
    def read(device: torch.device, largest: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the peak in GB and the number of flushes, each of the rank with the most; empty on a CPU.

        `largest` is the maximum over ranks, which is collective.
        """
        if device.type != "cuda":
            return {}
        flushes = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        values = torch.tensor([torch.cuda.max_memory_allocated(device) / 1e9, flushes], device=device)
        peak, flushes = largest(values).tolist()
        return {"perf/peak_memory_gb": peak, "perf/cache_flushes": flushes}

    def warning(self, metrics: dict[str, float]) -> str | None:
        """Return a warning, once, if torch flushed its cache after the first log of a launch."""
        flushes = metrics.get("perf/cache_flushes", 0)
        before, self.flushes = self.flushes, flushes
        if before is None or flushes <= before or self.has_warned:
            return None
        self.has_warned = True
        flushed = f"torch flushed its cache {flushes - before:.0f} times since the last log"
        way_out = "use a smaller --batch_size, or recompute more"
        return f"WARNING: GPU memory is full: {flushed}, and the GPU waits for each flush; {way_out}"

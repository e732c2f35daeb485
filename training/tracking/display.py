"""Progress lines on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fp8_suite.training.tracking.metrics import METRICS

YEAR = 365 * 86400.0  # seconds


class Display:
    """A line per log of metrics, with the time left, and messages; prints nothing if not `enabled`."""

    def __init__(
        self,
        total_steps: int,
        initial: int,
        enabled: bool,
        position: Callable[[int], int] = lambda step: step,
    ) -> None:
        """`initial` is the step that a run resumes at; `position` maps steps to the work done before them."""
        self._total, self._enabled, self._position = total_steps, enabled, position
        self._first, self._last = map(position, (initial, total_steps))
        self._started = time.monotonic()

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """Print progress after `step` steps."""
        done = self._position(step)
        seconds = (time.monotonic() - self._started) / max(1, done - self._first) * (self._last - done)
        # A huge --max_steps means "until stopped".
        left = [f"left {timedelta(seconds=round(seconds))}"] if seconds < YEAR else []
        self.message(" | ".join([f"step {step}/{self._total}", *progress_texts(metrics), *left]))

    def message(self, text: str) -> None:
        if self._enabled:
            print(text, flush=True)


def progress_texts(metrics: dict[str, Any]) -> list[str]:
    """Format the metrics of a progress line; rates of emulated layers are marked."""
    shown = []
    for name, metric in METRICS.items():
        for key, mark in ((name, ""), (name.replace("perf/", "emulated/"), " (emulated)")):
            if metric.terminal and key in metrics:
                shown.append(metric.terminal.format(metrics[key]) + mark)
                break
    return shown

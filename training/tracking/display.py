"""Progress output on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fp8_suite.training.tracking.metrics import METRICS
from tqdm import tqdm

YEAR = 365 * 86400.0  # seconds


class Display:
    """Progress bar on a terminal; otherwise one line per update with metrics."""

    def __init__(
        self, total_steps: int, initial: int, enabled: bool = True, tokens: Callable[[int], int] | None = None
    ) -> None:
        """`initial` is the step that a run resumes at; `tokens` maps steps to tokens seen if these grow."""
        self._total, self._enabled = total_steps, enabled
        self._position = tokens or (lambda step: step)
        self._first, self._last = map(self._position, (initial, total_steps))
        self._started = time.monotonic()
        off = not (enabled and sys.stderr.isatty())
        unit = {"unit": "token", "unit_scale": True} if tokens else {"unit": "step"}
        self._bar = tqdm(total=self._last, initial=self._first, dynamic_ncols=True, disable=off, **unit)

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """Show progress after `step` steps; `metrics` may be empty."""
        shown = progress_texts(metrics)
        if not self._bar.disable:
            if self._bar.unit == "token":
                self._bar.set_description(f"step {step}/{self._total}", refresh=False)
            self._bar.set_postfix_str(", ".join(shown) or self._bar.postfix, refresh=False)
            self._bar.update(self._position(step) - self._bar.n)
        elif shown and self._enabled:
            done = self._position(step)
            seconds = (time.monotonic() - self._started) / max(1, done - self._first) * (self._last - done)
            # A huge --max_steps means "until stopped".
            left = [f"left {timedelta(seconds=round(seconds))}"] if seconds < YEAR else []
            print(" | ".join([f"step {step}/{self._total}", *shown, *left]), flush=True)

    def message(self, text: str) -> None:
        """Print a separate line, above the progress bar if there is one."""
        if self._enabled:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()


def progress_texts(metrics: dict[str, Any]) -> list[str]:
    """Format the metrics of a progress line; rates of emulated layers are marked."""
    shown = []
    for name, metric in METRICS.items():
        for key, mark in ((name, ""), (name.replace("perf/", "emulated/"), " (emulated)")):
            if metric.terminal and key in metrics:
                shown.append(metric.terminal.format(metrics[key]) + mark)
                break
    return shown

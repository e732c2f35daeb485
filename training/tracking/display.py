"""Progress on the terminal."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from tqdm import tqdm

from training.tracking.metrics import METRICS
from training.tracking.writers import Metrics


class Display:
    """A progress bar on a terminal, otherwise one line per update that has metrics."""

    def __init__(self, total_steps: int, initial: int, enabled: bool = True) -> None:
        """`initial` is the step that a resumed run starts from."""
        self._total, self._initial, self._enabled = total_steps, initial, enabled
        self._started = time.monotonic()
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=initial, unit="step", dynamic_ncols=True)

    def update(self, step: int, metrics: Metrics) -> None:
        """Show that `step` steps are done; `metrics` may be empty."""
        if not self._enabled:
            return
        shown = progress_texts(metrics)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            if shown:
                self._bar.set_postfix_str(", ".join(shown))
        elif shown:
            print(" | ".join([f"step {step}/{self._total}", *shown, *self._time_left(step)]), flush=True)

    def message(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        if self._enabled:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int) -> list[str]:
        if step <= self._initial:
            return []
        seconds = (time.monotonic() - self._started) / (step - self._initial) * (self._total - step)
        return [f"left {timedelta(seconds=round(seconds))}"]


def progress_texts(metrics: Metrics) -> list[str]:
    """Format the metrics that a progress line shows; speed of emulated layers is marked."""
    shown = []
    for name, metric in METRICS.items():
        emulated = name.replace("perf/", "emulated/")
        if metric.terminal and name in metrics:
            shown.append(metric.terminal.format(metrics[name]))
        elif metric.terminal and emulated in metrics:
            shown.append(f"{metric.terminal.format(metrics[emulated])} (emulated)")
    return shown

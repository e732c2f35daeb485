"""Training progress and wall time across restarts."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fp8_suite.core.files import write_json
from fp8_suite.core.readers import read_record
from fp8_suite.training.parallel import ranks

WRITE_INTERVAL_SECONDS = 30.0  # between writes of wall_time.json at log lines


@dataclass
class Progress:
    """Training progress across restarts, saved with every checkpoint."""

    step: int = 0
    real_tokens: int = 0
    label_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # up to the last step
    train_seconds: float = 0.0  # time in steps, including waiting for data
    wall_seconds: float = 0.0  # including start-up and evaluation
    gpu_seconds: float = 0.0  # wall seconds times GPUs: billed time
    node_seconds: float = 0.0
    best_eval_loss: float | None = None
    rates: dict[str, float] = field(default_factory=dict)  # medians of the last launch with steps

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Progress:
        """Read progress from a checkpoint's metadata; unknown fields are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in meta["progress"].items() if name in known})


class WallTime:
    """Wall, GPU and node seconds of a run over all launches, in `progress` and wall_time.json.

    If a launch is killed, its time since the last write is lost. GPUs and nodes may differ between launches.
    """

    SUMS = ("wall_seconds", "gpu_seconds", "node_seconds")

    def __init__(self, folder: Path, progress: Progress, started: float, *, gpus: int, nodes: int):
        self.path, self.progress, self.counted_until = folder / "wall_time.json", progress, started
        self.gpus, self.nodes = gpus, nodes
        self.written_at = -math.inf

    def restore(self) -> None:
        """Restore the sums from wall_time.json, which is newer than the checkpoint after a kill."""
        recorded = read_record(self.path)
        for name in self.SUMS:
            setattr(self.progress, name, max(recorded.get(name, 0.0), getattr(self.progress, name)))

    def count(self, *, write: bool = True) -> None:
        """Add the time since the last call. Write the file if `write`, or if 30 s have passed."""
        now = time.perf_counter()
        seconds, self.counted_until = now - self.counted_until, now
        self.progress.wall_seconds += seconds
        self.progress.gpu_seconds += seconds * self.gpus
        self.progress.node_seconds += seconds * self.nodes
        if ranks.rank() == 0 and (write or now - self.written_at > WRITE_INTERVAL_SECONDS):
            self.written_at = now
            with suppress(OSError):  # best effort: a full disk is reported by the writes that must succeed
                write_json(self.path, {name: getattr(self.progress, name) for name in self.SUMS})

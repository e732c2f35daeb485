"""Training progress across restarts, and its wall time by kind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from fp8_suite.core.files import write_json
from fp8_suite.core.readers import read_record
from fp8_suite.training.parallel import ranks
from fp8_suite.training.tracking.metrics import WALL_TIME_KINDS

WRITE_INTERVAL_SECONDS = 30.0  # between writes of wall_time.json, apart from those of `count`


@dataclass
class Progress:
    """Training progress across restarts, saved with every checkpoint."""

    step: int = 0
    real_tokens: int = 0
    label_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # up to the last step
    overflow_steps: int = 0  # skipped steps that lowered the loss scale of FP16
    overflows_in_a_row: int = 0  # of skipped_in_a_row
    loss_scale: dict[str, float] = field(default_factory=dict)  # of FP16, see `LossScale`
    train_seconds: float = 0.0  # time in steps, including waiting for data
    wall_seconds: float = 0.0  # including start-up and evaluation
    seconds_by_kind: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WALL_TIME_KINDS, 0.0))
    gpu_seconds: float = 0.0  # wall seconds times GPUs: billed time
    node_seconds: float = 0.0
    best_eval_loss: float | None = None
    rates: dict[str, float] = field(default_factory=dict)  # medians of the last launch with steps

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Progress:
        """Read progress from a checkpoint's metadata; unknown fields are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in meta["progress"].items() if name in known})

    @property
    def goodput(self) -> float:
        """Share of the wall time spent in steps that count, 0 to 1."""
        return self.seconds_by_kind["steps"] / self.wall_seconds

    def describe_wall_time(self) -> str:
        """Return goodput and the shares of everything else, largest first, in one line."""
        rest = sorted(
            ((s, kind) for kind, s in self.seconds_by_kind.items() if kind != "steps"), reverse=True
        )
        shares = [(kind, f"{seconds / self.wall_seconds:.1%}") for seconds, kind in rest]
        text = ", ".join(f"{kind} {share}" for kind, share in shares if share != "0.0%")
        wall_time = timedelta(seconds=round(self.wall_seconds))
        return f"goodput {self.goodput:.1%} of {wall_time}" + (f" ({text})" if text else "")


class WallTime:
    """Wall time of a run over all launches, by kind, in `progress` and wall_time.json.

    The time of a launch before its first step is `start`; later, what no phase claims is `other`. If a launch
    is killed, its time since the last write is lost. GPUs and nodes may differ between launches.
    """

    SUMS = ("wall_seconds", "gpu_seconds", "node_seconds")

    def __init__(self, folder: Path, progress: Progress, started: float, *, gpus: int, nodes: int):
        self.path, self.progress, self.counted_until = folder / "wall_time.json", progress, started
        self.gpus, self.nodes = gpus, nodes
        self.written_at = -math.inf
        self._kinds = ["start"]  # the current phases, innermost last

    def restore(self) -> None:
        """Restore the sums from wall_time.json, which is newer than the checkpoint after a kill.

        Steps that were done after the checkpoint become `lost`.
        """
        recorded, progress = read_record(self.path), self.progress
        if recorded.get("wall_seconds", 0.0) < progress.wall_seconds:
            return
        for name in self.SUMS:
            setattr(progress, name, recorded.get(name, 0.0))
        kept, seconds = progress.seconds_by_kind, recorded.get("seconds_by_kind", {})
        for kind in ("steps", "data"):
            lost = max(0.0, seconds.get(kind, 0.0) - kept[kind])
            seconds = seconds | {kind: kept[kind], "lost": seconds.get("lost", 0.0) + lost}
        progress.seconds_by_kind = {kind: seconds.get(kind, 0.0) for kind in WALL_TIME_KINDS}

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Count the time inside as `kind`, except that of phases nested in it. Does not wait for the GPU."""
        self._count()
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._count()
            self._kinds.pop()
            if len(self._kinds) == 1 and self.counted_until - self.written_at > WRITE_INTERVAL_SECONDS:
                self._write()

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count time that is known only later, such as a wait of the GPU, as another kind."""
        self.progress.seconds_by_kind[source] -= seconds
        self.progress.seconds_by_kind[target] += seconds

    def end_start(self) -> None:
        """Count the time from here on as `other` instead of `start`. Call outside of phases."""
        self._count()
        self._kinds = ["other"]

    def count(self) -> None:
        """Count the time up to now and write the file."""
        self._count()
        self._write()

    def rates(self, real_tokens: int) -> dict[str, float]:
        """Return metrics of all launches up to now, given the tokens of all ranks in the steps that count."""
        self._count()
        per_second = real_tokens / self.progress.wall_seconds
        return {"perf/goodput": self.progress.goodput, "perf/tokens_per_wall_second": per_second}

    def _count(self) -> None:
        now = time.perf_counter()
        seconds, self.counted_until = now - self.counted_until, now
        self.progress.seconds_by_kind[self._kinds[-1]] += seconds
        self.progress.wall_seconds += seconds
        self.progress.gpu_seconds += seconds * self.gpus
        self.progress.node_seconds += seconds * self.nodes

    def _write(self) -> None:
        self.written_at = self.counted_until
        if ranks.rank() == 0:
            names = (*self.SUMS, "seconds_by_kind")
            with suppress(OSError):  # best effort: a full disk is reported by the writes that must succeed
                write_json(self.path, {name: getattr(self.progress, name) for name in names})

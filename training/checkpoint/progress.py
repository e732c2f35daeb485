"""Training progress across restarts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


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

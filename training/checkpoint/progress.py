"""Training progress across restarts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """What the run has done so far, over all its starts; saved with every checkpoint."""

    step: int = 0
    real_tokens: int = 0
    label_tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # up to the last step
    train_seconds: float = 0.0  # of steps, data wait included
    wall_seconds: float = 0.0  # of everything, which is what a GPU is paid for
    gpu_seconds: float = 0.0  # the same for each GPU, and each node
    node_seconds: float = 0.0
    best_eval_loss: float | None = None
    rates: dict[str, float] = field(default_factory=dict)  # of the last start that took steps

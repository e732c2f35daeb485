"""Learning-rate schedule: linear warm-up to the peak, then cosine, linear or no decay."""

from __future__ import annotations

import math

from fp8_suite.training.optim.settings import OptimConfig


def learning_rate(step: int, cfg: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of 0-based `step`.

    Warm-up over W steps uses (step + 1) / W of the peak, so the first step is not zero.
    """
    warmup = cfg.num_warmup_steps
    if warmup is None:
        warmup = math.ceil(cfg.warmup_ratio * total_steps)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    if cfg.lr_scheduler == "constant":
        return cfg.learning_rate
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.lr_scheduler == "cosine" else 1 - progress
    return cfg.learning_rate * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)

"""Learning-rate schedule: linear warm-up to the peak, then cosine, linear or no decay, or wsd.

wsd (warm-up, stable, decay) keeps the peak until the last share of the run: MiniCPM, arXiv:2404.06395.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fp8_suite.training.optim.settings import OptimConfig


def learning_rate(
    step: int, cfg: OptimConfig, total_steps: int, position: Callable[[int], int] = lambda step: step
) -> float:
    """Return the learning rate of 0-based `step`.

    Warm-up over W steps uses (step + 1) / W of the peak, so the first step is not zero. If the batch grows,
    `position` maps steps to tokens seen (`BatchSchedule.position`), and warm-up and decay go by these.
    """
    done, total = position(step), position(total_steps)
    warmup = math.ceil(cfg.warmup_ratio * total)
    if cfg.num_warmup_steps is not None:
        warmup = position(cfg.num_warmup_steps)
    if done < warmup:
        return cfg.learning_rate * min(position(step + 1), warmup) / warmup
    decay_start = warmup
    if cfg.lr_scheduler == "wsd":
        decay_start = max(warmup, total - math.ceil(cfg.decay_ratio * total))
    if cfg.lr_scheduler == "constant" or done < decay_start:
        return cfg.learning_rate
    progress = min(1.0, (done - decay_start) / max(1, total - decay_start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.lr_scheduler == "cosine" else 1 - progress
    return cfg.learning_rate * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * shape)

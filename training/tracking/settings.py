"""Settings of evaluation and logging."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fp8_suite.core.settings import Effect, Section, resumable

service = partial(resumable, affects="nothing")


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """evaluation and logging"""

    affects: ClassVar[Effect] = "logging"

    eval_interval: int = resumable(500, "steps between evaluations; 0: only at the end", minimum=0)
    eval_at_start: bool = resumable(False, "also evaluate before the first step")
    log_interval: int = resumable(10, "steps between log lines", minimum=1)
    fp8_stats_interval: int = resumable(
        0, "steps between FP8 statistics (underflow, overflow, scale, amax); 0: never", minimum=0
    )
    profile_steps: int = resumable(
        0, "steps to profile, starting at step 9: kernel times and a Chrome trace; 0: none", minimum=0
    )
    log_dir: str | None = service(None, "folder for TensorBoard logs; default: no TensorBoard")
    use_wandb: bool = service(False, "log to Weights & Biases")
    wandb_project: str = service("llm-fp8", "W&B project")
    wandb_run_name: str | None = service(None, "W&B run name; default: the run folder's name")

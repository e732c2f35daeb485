"""Settings of evaluation and logging."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from core.errors import as_flag
from core.settings import Effect, Section, setting


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """evaluation and logging"""

    affects: ClassVar[Effect] = "logging"

    eval_interval: int = setting(
        500, "steps between evaluations; 0: only at the end", resumable=True, minimum=0
    )
    eval_at_start: bool = setting(False, "evaluate before the first step too", resumable=True)
    log_interval: int = setting(10, "steps between log lines", resumable=True, minimum=1)
    fp8_stats_interval: int = setting(
        0,
        "steps between FP8 statistics (underflow, overflow, scale, amax); 0: never",
        resumable=True,
        minimum=0,
    )
    profile_steps: int = setting(
        0,
        "steps to profile, from the ninth on: GPU time by kind of kernel, and a trace",
        resumable=True,
        minimum=0,
    )
    log_dir: str | None = setting(
        None, "folder for TensorBoard logs; default: none", resumable=True, affects="nothing"
    )
    use_wandb: bool = setting(False, "log to Weights & Biases", resumable=True, affects="nothing")
    wandb_project: str = setting("llm-fp8", "W&B project", resumable=True, affects="nothing")
    wandb_run_name: str | None = setting(
        None, "W&B run name; default: the run folder's name", resumable=True, affects="nothing"
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = setting(
        None, "W&B mode; default: WANDB_MODE, else online", resumable=True, affects="nothing"
    )
    wandb_tags: str | None = setting(None, "W&B tags, separated by commas", resumable=True, affects="nothing")
    wandb_group: str | None = setting(None, "W&B group", resumable=True, affects="nothing")

    def unread(self) -> str | None:
        """Return a warning about W&B settings in a run that does not log there, or None."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("wandb_")}
        changed = [as_flag(name, value) for name, value in given.items() if value != getattr(LogConfig, name)]
        return (
            f"{', '.join(changed)}: not read without --use_wandb" if changed and not self.use_wandb else None
        )

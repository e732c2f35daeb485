"""Settings of the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from core.settings import Effect, Section, require, setting


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """optimizer and schedule"""

    affects: ClassVar[Effect] = "learning"

    batch_size: int = setting(8, "sequences per micro-batch and device", minimum=1, affects="step")
    eval_batch_size: int | None = setting(
        None,
        "sequences per evaluation batch and device; default: --batch_size",
        resumable=True,
        minimum=1,
        affects="logging",
    )
    gradient_accumulation_steps: int = setting(
        1, "micro-batches per optimizer step", minimum=1, affects="step"
    )
    num_epochs: int = setting(1, "passes over the training data", resumable=True, minimum=1)
    max_steps: int | None = setting(
        None,
        "stop after this many optimizer steps, over all starts; 0 only evaluates; default: --num_epochs",
        resumable=True,
        minimum=0,
    )
    learning_rate: float = setting(1e-5, "peak learning rate")
    lr_scheduler: Literal["cosine", "linear", "constant"] = setting("cosine", "shape after warm-up")
    min_lr_ratio: float = setting(0.0, "final learning rate as a share of the peak")
    num_warmup_steps: int | None = setting(
        None, "warm-up steps; default: --warmup_ratio of all steps", minimum=0
    )
    warmup_ratio: float = setting(0.03, "share of all steps that warm up")
    weight_decay: float = setting(0.01, "AdamW weight decay, on all weights but norms and biases", minimum=0)
    adam_beta1: float = setting(0.9, "AdamW beta1")
    adam_beta2: float = setting(0.95, "AdamW beta2")
    adam_epsilon: float = setting(1e-8, "AdamW epsilon")
    max_grad_norm: float = setting(
        1.0, "clip the global gradient norm to this; 0 measures it without clipping", minimum=0
    )
    max_skipped_steps: int = setting(
        5, "stop after this many steps in a row with a non-finite loss or gradient", resumable=True, minimum=1
    )
    seed: int = setting(42, "seed of weights, shuffling and held-out part")
    deterministic: bool = setting(
        False,
        "bitwise repeatable kernels, where they exist; slow for packed attention in TE (docs/precision.md)",
        affects="step",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 2**32, "seed", self.seed, "must be between 0 and 2**32 - 1")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "must be positive")
        for name in ("min_lr_ratio", "warmup_ratio"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be between 0 and 1")
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "must be at least 0 and below 1")
        require(self.adam_epsilon > 0, "adam_epsilon", self.adam_epsilon, "must be positive")

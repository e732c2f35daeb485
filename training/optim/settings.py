"""Settings of the optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fp8_suite.core.settings import AUTO, Effect, Section, resumable, setting

DEFAULT_BATCH = 8
BATCH = {"minimum": 1, "maximum": 2**20}


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Section):
    """optimizer and schedule"""

    affects: ClassVar[Effect] = "learning"

    batch_size: int | Literal["auto"] = setting(
        DEFAULT_BATCH,
        "sequences per micro-batch and device; auto: fastest size that fits; global batch unchanged",
        **BATCH,
        affects="step",
    )
    global_batch_size: int | None = setting(
        None,
        "sequences per step over all ranks; default: --batch_size (auto: 8) x accumulation x ranks",
        **BATCH,
    )
    eval_batch_size: int | None = resumable(
        None, "sequences per evaluation batch and device; default: --batch_size", **BATCH, affects="logging"
    )
    gradient_accumulation_steps: int | None = setting(
        1, "micro-batches per step; default: from --global_batch_size, else 1", **BATCH, affects="step"
    )
    num_epochs: int = resumable(1, "passes over the training data", minimum=1)
    max_steps: int | None = resumable(
        None,
        "total optimizer steps, including earlier launches; 0: only evaluate; default: from --num_epochs",
        minimum=0,
    )
    learning_rate: float = setting(1e-5, "peak learning rate", above=0)
    lr_scheduler: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "learning-rate schedule after warm-up"
    )
    min_lr_ratio: float = setting(0.0, "final learning rate as a fraction of the peak", minimum=0, maximum=1)
    num_warmup_steps: int | None = setting(None, "warm-up steps; default: from --warmup_ratio", minimum=0)
    warmup_ratio: float = setting(0.03, "warm-up steps as a fraction of all steps", minimum=0, maximum=1)
    weight_decay: float = setting(0.01, "AdamW weight decay, not applied to norms and biases", minimum=0)
    adam_beta1: float = setting(0.9, "AdamW beta1", minimum=0, below=1)
    adam_beta2: float = setting(0.95, "AdamW beta2", minimum=0, below=1)
    adam_epsilon: float = setting(1e-8, "AdamW epsilon", minimum=1e-38)
    max_grad_norm: float = setting(
        1.0, "clip the global gradient norm to this value; 0: no clipping", minimum=0
    )
    max_skipped_steps: int = resumable(5, "stop after this many consecutive non-finite steps", minimum=1)
    seed: int = setting(
        42, "seed of weight initialization, shuffling and held-out split", minimum=0, maximum=2**32 - 1
    )
    deterministic: bool = setting(
        False,
        "use bitwise reproducible kernels where they exist; slow for packed attention in TE",
        affects="step",
    )

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Set accumulation that was not given to 1, or to None if the run chooses it at its start."""
        if values.get("gradient_accumulation_steps") is not None:
            return values
        chosen = values.get("batch_size") == AUTO or values.get("global_batch_size") is not None
        return values | {"gradient_accumulation_steps": None if chosen else 1}

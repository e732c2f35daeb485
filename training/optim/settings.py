"""Settings of the optimizer and its schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.settings import AUTO, Effect, Section, resumable, setting

DEFAULT_BATCH = 8
DECAY_RATIO = 0.1
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
    batch_ramp: str | None = setting(
        None,
        "tokens per step : tokens seen from which on, such as '4Mi:0 8Mi:252M'; sets the accumulation",
        affects="step",
    )
    num_epochs: int = resumable(1, "passes over the training data", minimum=1)
    max_steps: int | None = resumable(
        None,
        "total optimizer steps, including earlier launches; 0: only evaluate; default: from --num_epochs",
        minimum=0,
    )
    learning_rate: float = setting(1e-5, "peak learning rate", above=0)
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "learning-rate schedule after warm-up; wsd: stable, then linear decay"
    )
    decay_ratio: float = setting(
        DECAY_RATIO, "last share of the run, in which wsd decays", above=0, maximum=1
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
        total = values.get("global_batch_size") or values.get("batch_ramp")
        chosen = values.get("batch_size") == AUTO or total is not None
        return values | {"gradient_accumulation_steps": None if chosen else 1}


def parse_batch_ramp(text: str) -> tuple[tuple[int, int], ...]:
    """Return (tokens per step, tokens seen from which on) of each phase of --batch_ramp.

    K, M, B and T are powers of 1000, Ki and Mi of 1024. UserError for other units or phases that do not grow.
    """
    phases: list[tuple[int, int]] = []
    for word in text.split() or [""]:
        tokens, start = map(_parse_tokens, word.partition(":")[::2])
        if tokens is None or start is None:
            example = "'4Mi:0 8Mi:252M' (units K, M, B, T, Ki, Mi)"
            raise bad_setting(f"cannot read {word!r}; give phases such as {example}", batch_ramp=text)
        before = phases[-1] if phases else (0, -1)
        if tokens <= before[0] or start <= before[1] or (start and not phases):
            reason = f"{word!r}: the first phase starts at 0, later ones later and with more tokens per step"
            raise bad_setting(reason, batch_ramp=text)
        phases.append((tokens, start))
    return tuple(phases)


def _parse_tokens(text: str) -> int | None:
    """Return a number such as 2.87T or 4Mi; None if it cannot be read or is not whole."""
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)(i?)", text)) or (match[3] and not match[2]):
        return None
    tokens = Decimal(match[1]) * (1024 if match[3] else 1000) ** (" KMBT".index(match[2] or " "))
    return int(tokens) if tokens == int(tokens) else None

"""Settings of the run folder and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fp8_suite.core.settings import Effect, Section, resumable


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """run folder and checkpoints"""

    affects: ClassVar[Effect] = "nothing"

    output_dir: str | None = resumable(
        None, "run folder; an existing run in it is resumed; default: runs/<model>-<precision>-<time>"
    )
    save_checkpoints: bool = resumable(
        True, "write checkpoints; without them an interrupted run cannot resume"
    )
    save_interval: int = resumable(
        500, "steps between checkpoints; 0: only at the end and on a stop signal", minimum=0
    )
    keep_last: int = resumable(
        5, "newest checkpoints to keep, besides the best by evaluation loss", minimum=1
    )
    resume: str = resumable(
        "auto",
        "auto: newest checkpoint in --output_dir; PATH: newest derived from this one; none: from scratch",
    )
    export: bool = resumable(True, "write a Hugging Face model (BF16 safetensors) at the end")
    generate_samples: int = resumable(
        0, "evaluation prompts to answer with the exported model; 0: none", minimum=0
    )

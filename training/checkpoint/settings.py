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
        True, "write checkpoints; if off, an interrupted run cannot be resumed"
    )
    save_interval: int = resumable(
        500, "steps between checkpoints; 0: only at the end and on a stop signal", minimum=0
    )
    keep_last: int = resumable(
        5, "newest checkpoints to keep; the best by evaluation loss is always kept", minimum=1
    )
    resume: str = resumable(
        "auto", "auto: latest checkpoint in --output_dir; PATH: a run or checkpoint; none: start from scratch"
    )
    convert_moments: bool = resumable(
        False, "at a resume, convert Adam's moments if --moment_dtype is another than the checkpoint's"
    )
    export: bool = resumable(True, "write a Hugging Face model (BF16 safetensors) at the end")
    generate_samples: int = resumable(
        0, "number of evaluation prompts to answer with the exported model", minimum=0
    )

"""Settings of the run folder and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from core.settings import Effect, Section, setting


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """run folder and checkpoints"""

    affects: ClassVar[Effect] = "nothing"

    output_dir: str | None = setting(
        None, "run folder; a run in it is resumed; default: runs/<model>-<precision>-<time>", resumable=True
    )
    save_checkpoints: bool = setting(
        True, "write checkpoints; without them a stopped run is lost (for benchmarks)", resumable=True
    )
    save_interval: int = setting(
        500, "steps between checkpoints; 0: only at the end and on a signal", resumable=True, minimum=0
    )
    keep_last: int = setting(
        5, "recent checkpoints to keep, in addition to the best by evaluation loss", resumable=True, minimum=1
    )
    resume: str = setting(
        "auto",
        "auto: from --output_dir's latest checkpoint; PATH: a run or checkpoint; none: start anew",
        resumable=True,
    )
    export: bool = setting(True, "write a Hugging Face model (BF16 safetensors) at the end", resumable=True)
    generate_samples: int = setting(
        0, "evaluation prompts to answer with the exported model at the end", resumable=True, minimum=0
    )

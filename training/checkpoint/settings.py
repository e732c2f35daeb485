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
        None,
        "run folder; a run's own goes on with it; default: runs/<model>-<precision>-<time>",
        resumable=True,
    )
    save_checkpoints: bool = setting(
        True, "write checkpoints at all; without them a stopped run is lost (for benchmarks)", resumable=True
    )
    save_interval: int = setting(
        500, "steps between checkpoints; 0 saves at the end and on a signal only", resumable=True, minimum=0
    )
    keep_last: int = setting(
        5, "checkpoints kept, beside the best by evaluation loss", resumable=True, minimum=1
    )
    resume: str = setting(
        "auto",
        "auto: continue from --output_dir's latest checkpoint if any; a run's folder or a checkpoint's, to "
        "start from once: given again, with the same --output_dir, it goes on from what came of it; or none, "
        "for a new --output_dir",
        resumable=True,
    )
    export: bool = setting(True, "write a Hugging Face model (BF16 safetensors) at the end", resumable=True)
    generate_samples: int = setting(
        0,
        "at the end, answer this many evaluation prompts with the exported model",
        resumable=True,
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generate_samples and not self.export:
            raise ValueError("--generate_samples reads the exported model; drop --no_export")

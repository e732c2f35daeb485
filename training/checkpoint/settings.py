"""Settings of the run folder and its checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

from fp8_suite.core.errors import bad_setting
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
    save_interval: str = resumable(
        "500", "steps between checkpoints, or time (30m, 2h); 0: only at the end and on a stop signal"
    )
    async_save: bool = resumable(
        True, "write checkpoints in the background, from a copy of the state in host memory"
    )
    keep_last: int = resumable(
        5, "newest checkpoints to keep, besides the best by evaluation loss", minimum=1
    )
    resume: str = resumable(
        "auto",
        "auto: newest checkpoint in --output_dir; PATH: newest derived from this one; none: from scratch",
    )
    export: bool = resumable(True, "write a Hugging Face model at the end")
    export_dtype: Literal["bf16", "fp8", "both"] = resumable(
        "bf16", "linear weights of the export; fp8 has scales per 128 x 128 block"
    )
    generate_samples: int = resumable(
        0, "evaluation prompts to answer with the exported model; 0: none", minimum=0
    )


EXPORT_FOLDERS = {"bf16": "export", "fp8": "export_fp8"}  # in the run folder


def parse_save_interval(text: str) -> tuple[int, float]:
    """Return (steps, seconds) of --save_interval; one of them is 0. UserError for an invalid one."""
    unit = {"m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        number = float(text[:-1] if unit else text)
    except ValueError:
        number = math.nan
    if unit and 0 < number < math.inf:
        return 0, number * unit
    if not unit and number >= 0 and number.is_integer():
        return int(number), 0.0
    reason = "give steps (500), minutes (30m) or hours (2h), or 0 to save only at the end"
    raise bad_setting(reason, save_interval=text)


class SaveTimer:
    """When saves are due by --save_interval: after `steps`, or after seconds of training."""

    def __init__(self, interval: str):
        self.steps, self.seconds = parse_save_interval(interval)
        self.restart()

    def restart(self) -> None:
        self.began = time.perf_counter()

    def is_due(self) -> bool:
        """True if a save is due by this rank's clock. `train_step` reduces it over ranks."""
        return 0 < self.seconds <= time.perf_counter() - self.began

"""Data settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.settings import Effect, Section, resumable, setting

EVAL_SAMPLES = 1000  # default of --eval_samples
SYSTEM_PROMPT = "Solve the math problem step by step. Put your final answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """data"""

    affects: ClassVar[Effect] = "learning"

    dataset_name: str = setting(
        "demo",
        "demo, synthetic (random words), hub id (or ID:CONFIGURATION), folder, or file (jsonl json parquet "
        "csv tsv txt)",
    )
    split_name: str = setting("train_1M", "split to train on")
    eval_split: str | None = setting(None, "split to evaluate on; default: held out from --split_name")
    eval_samples: int | None = setting(
        None,
        f"evaluation samples, capped at 10 % of the data when held out; default: {EVAL_SAMPLES}; with "
        "--max_steps 0 all rows",
        minimum=0,
    )
    num_of_samples: int | None = setting(None, "use only the first N training rows; default: all", minimum=1)
    dataset_text_field: str | None = setting(
        None, "column of plain text or chat messages to train on; default: detected by name"
    )
    system_prompt: str = setting(
        SYSTEM_PROMPT,
        "system message for chats without one; '': none; default: a math prompt, for a `problem` column only",
    )
    train_on_prompt: bool = setting(False, "compute the loss on prompt tokens too")
    max_seq_length: int = setting(1024, "tokens per sequence", minimum=2, affects="step")
    packing: bool = setting(
        True, "pack several samples into each sequence; samples do not attend to each other", affects="step"
    )
    overlong: Literal["drop", "truncate"] = setting(
        "drop", "samples longer than --max_seq_length (plain text is split instead)"
    )
    streaming: bool = setting(False, "stream the data set instead of downloading it; needs --max_steps")
    num_proc: int | None = resumable(
        None,
        "tokenization processes; default: one per core, at most 16",
        minimum=1,
        maximum=1024,
        affects="nothing",
    )
    num_workers: int = resumable(
        2,
        "data loader workers per rank; 0: load in the main process",
        minimum=0,
        maximum=1024,
        affects="nothing",
    )

    @property
    def num_eval_samples(self) -> int:
        """Evaluation samples at most in a run that trains, or evaluates a checkpoint."""
        return EVAL_SAMPLES if self.eval_samples is None else self.eval_samples

    def check_length(self, positions: int | None) -> None:
        """Raise UserError if a sequence may be longer than the model's `positions` (None: no limit)."""
        length = self.max_seq_length
        if positions is not None and length > positions:
            way_out = "lower it, or give a folder with a larger max_position_embeddings in its config.json"
            raise bad_setting(f"the model has only {positions} positions; {way_out}", max_seq_length=length)

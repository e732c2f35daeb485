"""Settings of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from core.settings import Effect, Section, setting

SYSTEM_PROMPT = "Solve the math problem step by step. Put your final answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """data"""

    affects: ClassVar[Effect] = "learning"

    dataset_name: str = setting(
        "demo",
        "hub id, local folder, data file (.jsonl .json .parquet .csv .tsv .txt), or `demo`; of a hub id "
        "or folder with several configurations `NAME:CONFIGURATION`",
    )
    split_name: str = setting("train_1M", "split to train on")
    eval_split: str | None = setting(None, "split to evaluate on; default: a held-out part of --split_name")
    eval_samples: int = setting(
        1000,
        "evaluation samples at most; a held-out part (but of a stream) never exceeds 10 % of the data",
        minimum=0,
    )
    num_of_samples: int | None = setting(None, "use only this many training rows; default: all", minimum=1)
    dataset_messages_field: str | None = setting(None, "column of whole chats; default: found by name")
    dataset_text_field: str | None = setting(
        None, "column of plain text to continue; default: chat or prompt columns, found by name"
    )
    dataset_prompt_field: str | None = setting(None, "column of the prompt; default: found by name")
    dataset_completion_field: str | None = setting(None, "column of the answer; default: found by name")
    system_prompt: str = setting(
        SYSTEM_PROMPT,
        "system message; the default begins prompts of a column `problem` alone, another all prompt/answer "
        "data and whole chats that have none, '' nothing",
    )
    train_on_prompt: bool = setting(False, "put loss on the prompt too, not on the answer alone")
    max_seq_length: int = setting(1024, "tokens per sequence at most", minimum=2, affects="step")
    packing: bool = setting(
        True, "fill sequences with several samples that do not attend to each other", affects="step"
    )
    overlong: Literal["drop", "truncate"] = setting(
        "drop",
        "samples over --max_seq_length: leave out or cut, counted either way (plain text is split instead)",
    )
    streaming: bool = setting(
        False, "read the data set as a stream (needs --max_steps), for sets larger than the disk"
    )
    num_proc: int | None = setting(
        None,
        "processes for tokenisation; default: one per core, at most 16",
        resumable=True,
        minimum=1,
        affects="nothing",
    )
    num_workers: int = setting(
        2,
        "loader worker processes; 0 loads in the training process",
        resumable=True,
        minimum=0,
        affects="nothing",
    )
    data_cache_dir: str | None = setting(
        None,
        "folder for data as they were read and tokenised; default: the Hugging Face cache of data sets "
        "(what is downloaded is in HF_HUB_CACHE)",
        resumable=True,
        affects="nothing",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dataset_prompt_field is None) != (self.dataset_completion_field is None):
            raise ValueError("--dataset_prompt_field and --dataset_completion_field go together; give both")
        given = [
            f"--{name}"
            for name in ("dataset_messages_field", "dataset_text_field", "dataset_prompt_field")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one")

    def check_length(self, positions: int | None) -> None:
        """ValueError if a sequence may be longer than a model has positions (None: it has no limit)."""
        if positions is not None and self.max_seq_length > positions:
            raise ValueError(
                f"--max_seq_length {self.max_seq_length}: --model_name has {positions} positions; lower it"
            )

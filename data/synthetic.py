"""Plain text of random words that fills every sequence, to measure speed."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import islice

from datasets import Dataset
from fp8_suite.core.errors import bad_setting
from fp8_suite.data.chat import Encoder
from fp8_suite.data.demo import read_demo
from fp8_suite.data.settings import DataConfig
from transformers import PreTrainedTokenizerBase

NAME = "synthetic"  # as --dataset_name
MAX_TOKENS = 2**25  # per epoch, unless one step has more


def with_rows(cfg: DataConfig, sequences: int = 1, steps: int | None = None) -> DataConfig:
    """Return settings whose synthetic rows fill `steps` of `sequences`; other data sets keep theirs.

    --num_of_samples sets another number. Later steps repeat the rows, as do those beyond MAX_TOKENS. Rows are
    made in memory, not streamed.
    """
    if cfg.dataset_name != NAME:
        return cfg
    most = max(1, MAX_TOKENS // (sequences * cfg.max_seq_length))
    rows = sequences * min(steps or most, most)  # whole steps: an epoch ends with a full one
    return replace(cfg, num_of_samples=cfg.num_of_samples or rows, streaming=False)


def random_words(cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return rows of --max_seq_length tokens, BOS and EOS included; all ranks make the same ones.

    Rows held out for evaluation come on top of --num_of_samples.
    """
    encoder = Encoder(tokenizer, dict, chat=False, system="")

    def length(text: str) -> int:
        [[(document, _)]] = encoder.document(text)
        return len(encoder.tokenize([document])[0])

    text = " ".join(row["problem"] for row in islice(read_demo("train_1M"), 500))
    words = [f" {word}" for word in re.findall(r"[A-Za-z]+", text)]
    # With words of one token, the number of words follows from the number of tokens.
    lengths = {word: length(word) for word in set(words) if length(word + word) == length(word) + 1}
    if not lengths:
        reason = "has no word of one token to make synthetic rows of; give another, such as demo"
        raise bad_setting(reason, tokenizer_name=tokenizer.name_or_path)
    alone = min(lengths.values())  # a first word may have one more token
    words, draw = [word for word in words if lengths.get(word) == alone], random.Random(0)
    num_words = cfg.max_seq_length - alone + 1
    num_rows = cfg.num_of_samples or with_rows(cfg).num_of_samples
    num_rows += min(cfg.num_eval_samples, num_rows // 9)  # at most 10 % of all rows are held out
    return Dataset.from_dict({"text": ["".join(draw.choices(words, k=num_words)) for _ in range(num_rows)]})

"""Synthetic text: its rows fill sequences whatever the tokenizer, and are those of recorded speeds."""

import hashlib
from dataclasses import replace

import pytest
from fp8_suite.core.errors import UserError
from fp8_suite.data.chat import Encoder
from fp8_suite.data.settings import DataConfig
from fp8_suite.data.synthetic import random_words, with_rows

from tests.data.test_chat import with_word_borders


def test_text_is_that_of_recorded_speeds(tokenizer):
    rows = random_words(DataConfig(max_seq_length=512, num_of_samples=20, eval_samples=0), tokenizer)
    assert hashlib.sha256("\n".join(rows["text"]).encode()).hexdigest()[:16] == "ad059b4199cdafbb"


@pytest.mark.parametrize("kind", ["demo", "sentencepiece"])
def test_rows_have_the_length_of_a_sequence(tokenizer, kind):
    tokenizer = tokenizer if kind == "demo" else with_word_borders("prepend")  # and BOS is not added
    rows = random_words(DataConfig(max_seq_length=50, num_of_samples=40), tokenizer)
    encoder = Encoder(tokenizer, lambda row: row, chat=False, system="")
    encoded = encoder.encode([*rows], range(len(rows)))
    assert [len(ids) for ids in encoded["input_ids"].to_pylist()] == [50] * (40 + 4)  # 10 % are held out
    assert len(set(rows["text"])) == len(rows)


def test_an_epoch_has_the_sequences_of_a_run_up_to_a_limit():
    cfg = DataConfig(dataset_name="synthetic", max_seq_length=2**20)
    rows = {steps: with_rows(cfg, 6, steps).num_of_samples for steps in (1, 4, 1000, None)}
    assert rows == {1: 6, 4: 24, 1000: 30, None: 30}
    assert with_rows(cfg, 64, 4).num_of_samples == 64, "a step is whole"
    assert with_rows(replace(cfg, num_of_samples=7), 6, 4).num_of_samples == 7
    assert with_rows(DataConfig(), 6, 4) == DataConfig()


def test_there_is_one_split(build):
    with pytest.raises(UserError, match="--eval_split test: no such split in --dataset_name synthetic"):
        build(dataset_name="synthetic", num_of_samples=20, eval_split="test", eval_samples=5)

"""Tokenizers of exports."""

import pytest
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.training.checkpoint.generate import TOKENIZER_SAMPLE, tokenizer_round_trips
from transformers import AutoConfig


@pytest.mark.parametrize(("family", "same"), [("llama", True), ("qwen3", True), ("qwen2", False)])
def test_export_whose_tokenizer_is_read_as_another_is_detected(family, same, tmp_path):
    """With a qwen2 configuration transformers reads any tokenizer as Qwen's own class."""
    tokenizer = load_tokenizer("demo", family=family)
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    assert tokenizer_round_trips(tmp_path, tokenizer) == same
    loaded = load_tokenizer(str(tmp_path), family=family)  # as --model_name EXPORT does
    assert loaded(TOKENIZER_SAMPLE) == tokenizer(TOKENIZER_SAMPLE)
    (tmp_path / "tokenizer.json").write_text("{")
    assert not tokenizer_round_trips(tmp_path, tokenizer)

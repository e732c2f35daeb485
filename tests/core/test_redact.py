"""Secrets are blanked out of text; ordinary text is unchanged."""

import pytest
from fp8_suite.core.redact import redact, redacted

HUGGING_FACE_TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"key={HUGGING_FACE_TOKEN}.", "key=hf_***."),
        ("key=" + "0123456789abcdef" * 2 + "01234567.", "key=***."),
        ("key=wandb_v1_" + "aB3_-" * 12, "key=wandb_***"),
        ("key=sk-proj-" + "a1B2_c3" * 4, "key=sk-***"),
        ("clone https://user:pa%40ss@host/x now", "clone https://***@host/x now"),
        ("clone https://only-a-token@host:80/x?a=b", "clone https://***@host:80/x?a=b"),
        *((text, text) for text in ("risk-" + "a" * 30, "https://host:8080/a@b", "s3://bucket/key")),
        *((text, text) for text in ("--tokenizer_name hf_transformers --model_name org/model@main",)),
    ],
)
def test_tokens_are_blanked_and_ordinary_text_is_kept(text, expected):
    assert redact(text) == expected
    assert redacted({"text": text, "number": 3}) == {"text": expected, "number": 3}


def test_values_of_secret_environment_variables_are_blanked(monkeypatch):
    monkeypatch.setenv("MY_service_Token", "correct horse")
    monkeypatch.setenv("LONGER_SECRET", "correct horse battery")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert redact("a correct horse battery, a correct horse: false") == "a ***, a ***: false"

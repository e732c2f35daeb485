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
        ("key=AKIAIOSFODNN7EXAMPLE", "key=***"),
        ("key=ghp_" + "aB3" * 12, "key=gh_***"),
        ("clone https://user:pa%40ss@host/x now", "clone https://***@host/x now"),
        ("clone https://only-a-token@host:80/x?a=b", "clone https://***@host:80/x?a=b"),
        *((text, text) for text in ("risk-" + "a" * 30, "https://host:8080/a@b", "s3://bucket/key")),
        *((text, text) for text in ("--tokenizer_name hf_transformers --model_name org/model@main",)),
    ],
)
def test_tokens_are_blanked_and_ordinary_text_is_kept(text, expected):
    assert redact(text) == expected
    assert redacted({"text": text, "number": 3}) == {"text": expected, "number": 3}


SECRETS = {
    "MY_service_Token": "correct horse",
    "LONGER_SECRET": "correct horse battery",
    "DB_PASSWORD_1": "swordfish",
    "OPENAI_API_KEY": "1f9c0aa2b7d84e55",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "OTHER_ACCESS_KEY": "/JalrXUtnFEMIK7MDENG/bPxRfiCYEXAMPLEKEY",
    "API_KEYS_PROD": "deadbeef01 deadbeef02",
    "HFTOKEN": "AbCdEfGhIjKl",
}
SHOWN = {
    "TOKENIZERS_PARALLELISM": "false",
    "TOKENIZER_PATH": "/data/tokenizer-v2",
    "TOKENIZER_NAME": "my-tokenizer",
    "KEY_FIELD": "question",
    "SORT_KEY": "problem_text",
    "SSH_KEY": __file__,
    "MAX_TOKENS": "1048576000",
    "KEYBOARD_LAYOUT": "qwerty-us",
}


def test_only_values_of_secret_environment_variables_are_blanked_the_longest_first(monkeypatch):
    for name, value in (SECRETS | SHOWN).items():
        monkeypatch.setenv(name, value)
    for value in SECRETS.values():
        assert redact(f"a {value}: {value!r}") == "a ***: '***'"
    for value in SHOWN.values():
        assert redact(f"--model_name {value}") == f"--model_name {value}"

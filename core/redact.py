"""Keep secrets out of logs, records and messages."""

from __future__ import annotations

import os
import re
from typing import Any

TOKENS = (
    (re.compile(r"(?<=://)[^/\s@?#]+@"), "***@"),  # user:password@ in a URL
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_***"),
    (re.compile(r"\bwandb_v\d+_[A-Za-z0-9_-]{16,}"), "wandb_***"),
    (re.compile(r"\b[0-9a-f]{40}\b"), "***"),  # older W&B keys; full git commits look the same
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), "sk-***"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "***"),  # AWS access key ids
    (re.compile(r"\b(?:gh[opsu]|github_pat)_[A-Za-z0-9_]{20,}"), "gh_***"),
)
# A variable's name: a part of it ends with one of these words (TOKENIZER does not).
PASSWORD_NAME = re.compile(r"(SECRET|PASSWORD|PASSWD|PASSPHRASE)S?\d*(_|$)", re.IGNORECASE)
KEY_NAME = re.compile(r"(KEY|TOKEN|CREDENTIAL)S?\d*(_|$)", re.IGNORECASE)
WORD = re.compile(r"[a-z]+(_[a-z]+)*|\d{1,12}")  # such as a column's name
LONGEST_WORD = 20  # characters


def redact(text: str) -> str:
    """Replace API tokens, user:password@ in URLs, and values of secret environment variables by ***."""
    values = {value for name, value in os.environ.items() if is_secret(name, value)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    for pattern, replacement in TOKENS:
        text = pattern.sub(replacement, text)
    return text


def is_secret(name: str, value: str) -> bool:
    """True if an environment variable holds a secret, by its name and value.

    A value under 8 characters is a switch, and a file is no secret. A key or token whose value is a short
    word configures something: SORT_KEY=question.
    """
    if len(value) < 8 or os.path.exists(value):
        return False
    if PASSWORD_NAME.search(name):
        return True
    is_word = len(value) <= LONGEST_WORD and WORD.fullmatch(value)
    return bool(KEY_NAME.search(name)) and not is_word


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with every text redacted."""
    return {name: redact(value) if isinstance(value, str) else value for name, value in values.items()}

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
)
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace API tokens, user:password@ in URLs, and values of secret environment variables by ***.

    A variable is secret if its name contains KEY, TOKEN, SECRET or PASSWORD. Values under 8 characters are
    kept: they are switches (TOKENIZERS_PARALLELISM=false).
    """
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= 8}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    for pattern, replacement in TOKENS:
        text = pattern.sub(replacement, text)
    return text


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with every text redacted."""
    return {name: redact(value) if isinstance(value, str) else value for name, value in values.items()}

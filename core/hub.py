"""Names of the Hugging Face hub and of local folders."""

from __future__ import annotations

import os

from fp8_suite.core.errors import bad_setting


def require_folder(flag: str, name: str) -> None:
    """Raise UserError if the name is a path, so no hub id, and does not exist."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not os.path.exists(name):
        raise bad_setting("there is no such folder; give one that exists, or a hub id", **{flag: name})

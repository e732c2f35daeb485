"""Fail fast on missing local folders and an unreachable Hugging Face hub."""

from __future__ import annotations

import os

from fp8_suite.core.errors import bad_setting, first_line

RETRIES = 2  # after 1 and 2 seconds


def is_path(name: str) -> bool:
    """True if the name cannot be a hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def require_folder(flag: str, name: str) -> None:
    """Raise UserError if the name is a path that does not exist."""
    if is_path(name) and not os.path.exists(name):
        raise bad_setting("there is no such folder; give one that exists, or a hub id", **{flag: name})


def require_reachable_hub(name: str, files: tuple[str, ...], repo_type: str = "model") -> None:
    """Raise OSError if none of a hub id's `files` is in the cache and the hub is out of reach.

    The hub's own client would try each file for half a minute or more and print each time.
    """
    import httpx
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import http_backoff, logging

    if is_path(name) or os.path.exists(name) or constants.is_offline_mode():
        return
    if any(try_to_load_from_cache(name, file, repo_type=repo_type) is not None for file in files):
        return
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        http_backoff(
            "HEAD",
            hf_hub_url(name, files[0], repo_type=repo_type),
            max_retries=RETRIES,
            retry_on_exceptions=httpx.ConnectError,  # do not retry timeouts
            retry_on_status_codes=(),
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except httpx.TransportError as error:
        raise OSError(f"{constants.ENDPOINT} is out of reach ({first_line(error)}).") from None
    finally:
        logging.set_verbosity(verbosity)

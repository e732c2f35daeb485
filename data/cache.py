"""The folder that rows and their tokens are stored in, and what to say where it cannot be written."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import datasets

from training.config import DataConfig

FULL = {errno.ENOSPC, errno.EDQUOT}


def cache_folder(cfg: DataConfig) -> Path:
    return Path(cfg.data_cache_dir or datasets.config.HF_DATASETS_CACHE)


def check_cache(cfg: DataConfig) -> None:
    """ValueError if the folder cannot be made, or no file in it."""
    folder = cache_folder(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(_cannot_write(cfg, error)) from None


def _cannot_write(cfg: DataConfig, error: OSError) -> str:
    room = "make room there, or " if error.errno in FULL else ""
    reason = f"{cache_folder(cfg)}: {error.strerror}; {room}"
    if cfg.data_cache_dir is None:
        return f"the Hugging Face cache {reason}give --data_cache_dir a folder you can write to"
    return f"--data_cache_dir {reason}choose a folder you can write to"

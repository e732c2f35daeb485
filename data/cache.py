"""The folder that rows and their tokens are stored in, and what to say where it cannot be written."""

from __future__ import annotations

import errno
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from huggingface_hub.constants import HF_HUB_CACHE

from training.config import DataConfig
from training.errors import first_line, origins, raise_interrupt

FULL = {errno.ENOSPC, errno.EDQUOT}
CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


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


def why_not_stored(cfg: DataConfig, error: BaseException) -> RuntimeError | None:
    """What to raise for an error that came of a full disk or a read-only cache folder; None for any other."""
    folder = str(cache_folder(cfg))
    for origin in origins(error):
        if not isinstance(origin, OSError):
            continue
        if _is_full(origin) and origin.filename and folder not in str(origin):  # semaphores', say
            return RuntimeError(f"{first_line(origin)}; make room there")
        if _is_full(origin) or (origin.errno in CLOSED and folder in str(origin)):
            return RuntimeError(_cannot_write(cfg, origin))
    return None


@contextmanager
def storing(cfg: DataConfig) -> Iterator[None]:
    """Inside, `datasets` may write to the cache: RuntimeError if it cannot; an interrupt stays one."""
    try:
        yield
    except Exception as error:
        raise_interrupt(error)
        if (reason := why_not_stored(cfg, error)) is not None:
            raise reason from error
        raise


def _is_full(error: OSError) -> bool:
    """Whether writing met a full disk or quota, or `datasets` refused to begin."""
    return error.errno in FULL or str(error).startswith("Not enough disk space")


def _cannot_write(cfg: DataConfig, error: OSError) -> str:
    reason = f"{error.strerror or first_line(error)}; {'make room there, or ' if _is_full(error) else ''}"
    frames = traceback.extract_tb(error.__traceback__)
    if any("huggingface_hub" in Path(frame.filename).parts for frame in frames):  # it has one folder for all
        return f"the download cache {HF_HUB_CACHE}: {reason}set HF_HUB_CACHE to a folder you can write to"
    if cfg.data_cache_dir is None:
        folder = cache_folder(cfg)
        return f"the Hugging Face cache {folder}: {reason}give --data_cache_dir a folder you can write to"
    return f"--data_cache_dir {cfg.data_cache_dir}: {reason}choose a folder you can write to"

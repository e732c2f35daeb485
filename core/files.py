"""Missing folders; atomic, crash-safe writes of files and folders."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8_suite.core.errors import UserError, bad_setting

# Errors of a write.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}


def require_folder(flag: str, name: str) -> None:
    """Raise UserError if the name is a path, so no hub id, and does not exist."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not os.path.exists(name):
        raise bad_setting("there is no such folder; give one that exists, or a hub id", **{flag: name})


@contextlib.contextmanager
def explaining_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path`, a record of the run, into a UserError."""
    try:
        yield
    except OSError as error:
        remedy = f"{write_remedy(error)}, then rerun with the same --output_dir to resume"
        raise UserError(f"cannot write {path}: {error.strerror or error}; {remedy}") from None


def write_remedy(error: OSError) -> str:
    """Return what to do about an error of a write."""
    if error.errno in DISK_FULL:
        return "free space"
    return "its folder was moved or deleted: move it back" if error.errno == errno.ENOENT else "correct that"


def hidden(path: Path, state: str) -> Path:
    """Return `.NAME.STATE` beside `path`: its version that is partial, replaced or pruned."""
    return path.with_name(f".{path.name}.{state}")


def publish(partial: Path, final: Path) -> None:
    """Rename a finished folder to `final`, durably; an earlier `final` is deleted only afterwards."""
    replaced = hidden(final, "replaced")
    try:
        if final.exists():
            os.rename(final, replaced)
        os.rename(partial, final)
    except OSError:
        recover(final)
        raise
    sync_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(final: Path) -> None:
    """Undo a `publish` that was killed between its two renames, or finish one killed after them."""
    replaced = hidden(final, "replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):  # nothing to undo, or another rank did it
            os.rename(replaced, final)


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a crash leaves the old content or the new one."""
    partial = hidden(path, "partial")
    partial.write_bytes(content)
    sync_to_disk(partial)
    os.replace(partial, path)
    sync_to_disk(path.parent)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def to_json(value: Any, indent: int | None = None) -> bytes:
    """Encode strict JSON; NaN and infinities, which it lacks, become strings that float() reads."""
    strict = json.loads(json.dumps(value), parse_constant=str)
    return json.dumps(strict, indent=indent, allow_nan=False).encode()

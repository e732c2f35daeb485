"""Folders of files that appear whole or not at all, and tell when a byte of them has changed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

MANIFEST = "manifest.json"
UMASK = os.umask(0)  # which cannot be read otherwise
os.umask(UMASK)
THREADS = 4  # per rank, to write, read and hash files: all three run without the GIL


class DamagedCheckpoint(ValueError):
    """A checkpoint that must not be used; names folder, file, reason and what to `--resume` instead."""

    def __init__(self, message: str, intact: Path | None = None):
        super().__init__(message)
        self.intact = intact


def hidden(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def no_room(path: Path, error: OSError) -> RuntimeError:
    """What to raise where a record of a run cannot be written."""
    return RuntimeError(
        f"cannot write {path}: {error.strerror}; make room, and the same command with this run's "
        "--output_dir goes on"
    )


def publish(partial: Path, final: Path) -> None:
    """Rename a finished folder to `final`, durably; what stood there is deleted only then."""
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
    """Undo a `publish` that died between its two renames, or finish one that died after them."""
    replaced = hidden(final, "replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):  # nothing to undo, or another rank did
            os.rename(replaced, final)


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1) + "\n").encode())


def read_record(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder that can be done without; empty if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once: a crash leaves the old one or the new one, whole."""
    aside = hidden(path, "partial")
    aside.write_bytes(content)
    sync_to_disk(aside)
    os.replace(aside, path)
    sync_to_disk(path.parent)


def _digest(path: Path) -> dict[str, Any]:
    checksum = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**23):
            checksum.update(block)
    return {"size": path.stat().st_size, "xxh3_128": checksum.hexdigest()}


def digests(
    folder: Path, names: Iterable[str], *, flush: bool = False, beat: Callable[[], None] = lambda: None
) -> dict[str, dict]:
    """Size and checksum of the named files, `flush`ed to disk first if wanted; a `beat` after each."""

    def one(name: str) -> tuple[str, dict]:
        if flush:
            sync_to_disk(folder / name)
        return name, _digest(folder / name)

    found = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for name, digest in pool.map(one, names):
            found[name] = digest
            beat()
    return found


def _checksum(manifest: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def write_manifest(folder: Path, manifest: dict) -> None:
    write_json(folder / MANIFEST, {"xxh3_128": _checksum(manifest), "manifest": manifest})


def read_manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    try:
        outer = json.loads(path.read_bytes())
        manifest, checksum = outer["manifest"], outer["xxh3_128"]
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing, so {folder.name} is no whole checkpoint") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(f"{path}: unreadable ({type(error).__name__}: {error})") from None
    if checksum != _checksum(manifest):
        raise DamagedCheckpoint(f"{path}: its content does not match its checksum")
    return manifest


def inspect_checkpoint(
    folder: Path, names: Iterable[str] | None = None, *, share: tuple[int, int] = (0, 1)
) -> dict:
    """The manifest, once all files (or `names`) match it; `share` (i, n) hashes only every n-th, from i."""
    manifest = read_manifest(folder)
    files = manifest["files"]
    for path in folder.glob("*.safetensors"):  # the reader opens all of them
        if path.name not in files:
            raise DamagedCheckpoint(f"{path}: not in {MANIFEST}, so not from this save")
    checked = sorted(files if names is None else names)
    for name in checked:
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path}: missing")
        if (size := path.stat().st_size) != files[name]["size"]:
            raise DamagedCheckpoint(f"{path}: {size} bytes, but {files[name]['size']} were saved")
    try:
        found = digests(folder, checked[share[0] :: share[1]])
    except OSError as error:
        raise DamagedCheckpoint(f"{error.filename}: unreadable ({error.strerror})") from None
    for name, digest in found.items():
        if digest != files[name]:
            raise DamagedCheckpoint(f"{folder / name}: its content does not match its checksum")
    return manifest


def save_tensors(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
    """A safetensors file that whoever may read the run's other files may read, too. OSError."""
    from safetensors.torch import save_file  # with torch, which --help does without

    try:
        save_file(tensors, path, metadata={"format": "pt"} | metadata)
    except SafetensorError as error:  # which reports the system's error in words
        code = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))) from None
    with contextlib.suppress(OSError):  # some file systems have no modes
        path.chmod(0o666 & ~UMASK)

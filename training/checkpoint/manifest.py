"""Checkpoint manifest: size and checksum of every file, verified before loading."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.files import write_json
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.training.checkpoint.index import MANIFEST, step_folders

THREADS = 4  # per rank; reading, writing and hashing all release the GIL


class DamagedCheckpoint(UserError):
    """A checkpoint is incomplete or corrupt."""


def damaged(folder: Path, reason: str) -> DamagedCheckpoint:
    others = {step: path for step, path in step_folders(folder.parent).items() if path != folder}
    way_out = f"resume from another: --resume {others[max(others)]}" if others else "no other is beside it"
    return DamagedCheckpoint(f"{reason}; {way_out}", flags=("resume",), exit_code=EXIT_BAD_SETTING)


def digests(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """Return size and checksum of each named file."""

    def digest(name: str) -> tuple[str, dict]:
        path, checksum = folder / name, xxhash.xxh3_128()
        with open(path, "rb", buffering=0) as file:
            while block := file.read(2**23):
                checksum.update(block)
        return name, {"size": path.stat().st_size, "xxh3_128": checksum.hexdigest()}

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(pool.map(digest, names))


def _checksum(manifest: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def write_manifest(folder: Path, manifest: dict) -> None:
    write_json(folder / MANIFEST, {"xxh3_128": _checksum(manifest), "manifest": manifest})


def read_manifest(folder: Path) -> dict:
    """Read a folder's manifest. DamagedCheckpoint if it is missing, unreadable or modified."""
    path = folder / MANIFEST
    try:
        outer = read_json(path)
    except UnreadableFile as error:
        raise damaged(folder, f"{error}, so the checkpoint is incomplete or damaged") from None
    if outer.get("xxh3_128") != _checksum(outer.get("manifest")):
        raise damaged(folder, f"{path}: does not match its checksum")
    return outer["manifest"]


def verify(folder: Path, names: Iterable[str] | None = None) -> dict:
    """Return the manifest if the sizes of all files match it, and the checksums of all, or only of `names`.

    DamagedCheckpoint otherwise.
    """
    manifest = read_manifest(folder)
    files = manifest["files"]
    for path in folder.glob("*.safetensors"):  # torch's reader opens all of them
        if path.name not in files:
            raise damaged(folder, f"{path}: not in {MANIFEST}, so it is not part of this checkpoint")
    try:
        for name, digest in files.items():
            if (size := (folder / name).stat().st_size) != digest["size"]:
                raise damaged(folder, f"{folder / name}: has {size:,} of {digest['size']:,} bytes")
        actual = digests(folder, sorted(names or files))
    except OSError as error:
        raise damaged(folder, f"{error.filename}: {error.strerror}") from None
    for name, digest in actual.items():
        if digest != files[name]:
            raise damaged(folder, f"{folder / name}: does not match its checksum")
    return manifest

"""Versions of installed packages and of the suite's own code."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "transformer_engine", "torchao", "deepspeed", "flash-attn-4")
PACKAGES += ("datasets", "tokenizers", "safetensors", "numpy")  # they affect numerics or the data


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {name: version(name) for name in PACKAGES}


def software() -> dict[str, str | None]:
    """Return package versions and a digest of the suite's code, which must match on all ranks."""
    return versions() | {"the suite's code": code_digest()}


def code_digest() -> str:
    """Return a digest of the Python files that a run executes."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("core", "data", "te_models", "training"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()

"""Which version of a package is installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "transformer_engine", "torchao", "deepspeed", "flash-attn-4")
PACKAGES += ("datasets", "tokenizers", "safetensors", "numpy")


def version(package: str) -> str | None:
    """As pip knows it, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of the packages that decide what a run computes."""
    return {name: version(name) for name in PACKAGES}


def software() -> dict[str, str | None]:
    """What all ranks of a job must share: versions, and the code of this suite."""
    return versions() | {"the suite's code": code_digest()}


def code_digest() -> str:
    """Of the Python files that a run is made of."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("data", "te_models", "training"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()

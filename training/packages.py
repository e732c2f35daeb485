"""Which version of a package is installed."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version(package: str) -> str | None:
    """As pip knows it, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def software() -> dict[str, str | None]:
    """What all ranks of a job must share: versions, and the code of this suite."""
    shared = ("torch", "triton", "transformers", "transformer_engine", "torchao", "deepspeed", "datasets")
    versions = {name: version(name) for name in (*shared, "flash-attn-4", "numpy")}
    return versions | {"the suite's code": code_digest()}


def code_digest() -> str:
    """Of the Python files that a run is made of."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("data", "te_models", "training"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()

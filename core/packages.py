"""Packages: those that every command needs, and versions of the packages and of the suite's own code."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = ("torch", "transformers", "datasets", "numpy", "safetensors", "pyyaml", "tqdm")
MODULES = {"pyyaml": "yaml"}  # package -> its module, where the names differ
PACKAGES = ("torch", "triton", "transformers", "transformer_engine", "torchao", "deepspeed", "flash-attn-4")
PACKAGES += ("datasets", "tokenizers", "safetensors", "numpy")  # they affect numerics or the data


def start_command(*packages: str) -> None:
    """Hide the traceback of Ctrl-C. Exit with one line if a package is missing.

    Call it first in every command, before anything else is imported.
    """
    hide_interrupts()
    from importlib.util import find_spec

    missing = [name for name in (*REQUIRED, *packages) if find_spec(MODULES.get(name, name)) is None]
    if missing:
        # By name, not by requirements.txt: a container keeps its own torch.
        sys.exit(f"error: missing packages; install: {sys.executable} -m pip install {' '.join(missing)}")


def hide_interrupts() -> None:
    """End the process without a traceback on a Ctrl-C that nothing handles."""

    def report(kind, error, trace):
        if kind is not KeyboardInterrupt:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    from importlib import metadata  # slow, and not needed to start

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
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

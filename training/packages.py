"""Which version of a package is installed."""

from __future__ import annotations

import importlib.metadata


def version(package: str) -> str | None:
    """As pip knows it, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

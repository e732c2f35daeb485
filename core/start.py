"""First step of every command, before any package is imported."""

from __future__ import annotations

import os
import sys

REQUIRED = ("torch", "transformers", "datasets", "numpy", "safetensors", "pyyaml", "tqdm")
MODULES = {"pyyaml": "yaml"}  # package -> its module, where the names differ
OLDEST_PYTHON = (3, 10)


def start_command(*packages: str) -> None:
    """Hide the traceback of Ctrl-C. Exit with one line if this Python is too old or lacks a package."""
    hide_interrupts()
    if sys.version_info < OLDEST_PYTHON:
        version, needed = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
        sys.exit(f"error: this is Python {version} ({sys.executable}); use Python {needed} or newer")
    from importlib.util import find_spec

    missing = [name for name in (*REQUIRED, *packages) if find_spec(MODULES.get(name, name)) is None]
    if missing:
        pins = os.path.join(os.path.dirname(__file__), "..", "requirements.txt")  # not after pip install .
        what = f"-r {os.path.relpath(pins)}" if os.path.exists(pins) else " ".join(missing)
        sys.exit(f"error: {', '.join(missing)} missing; install: {sys.executable} -m pip install {what}")


def hide_interrupts() -> None:
    """End the process without a traceback on a Ctrl-C that nothing handles."""

    def report(kind, error, trace):
        if kind is not KeyboardInterrupt:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report

"""What of this machine the process may use."""

from __future__ import annotations

import os


def cores() -> list[int]:
    """Numbers of the CPU cores that this process may run on: those that a launcher has bound it to."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))

"""CPU cores and host memory that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PROCESS_CGROUPS = Path("/proc/self/cgroup")  # control groups of this process
CGROUP_ROOT = Path("/sys/fs/cgroup")  # limits of control groups


def cores() -> list[int]:
    """Return the CPU cores in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def host_memory() -> int:
    """Return the host memory in bytes, or the cgroup limit if it is lower."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_memory_limits()])


def _memory_limits() -> list[int]:
    """Return the limits in bytes of the process's control groups and of all groups around them."""
    limits = []
    for line in PROCESS_CGROUPS.read_text().splitlines() if PROCESS_CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUP_ROOT / "memory" if controllers else CGROUP_ROOT  # version 1, and version 2
        group = root / path.strip("/")
        around = [folder for folder in group.parents if folder == root or root in folder.parents]
        for folder in (group, *around):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int((folder / name).read_text()))
    return limits

"""What of this machine the process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Where Linux says which control groups the process is in, and what these may use.
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores() -> list[int]:
    """Numbers of the CPU cores that this process may run on: those that a launcher has bound it to."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def host_memory() -> int:
    """Bytes of memory that the process may use: the machine's, or the limit of a container or a batch job."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_memory_limits()])


def _memory_limits() -> list[int]:
    """Of the control groups the process is in, and of those around them, in bytes."""
    found = []
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = GROUPS / "memory" if controllers else GROUPS  # version 1, and version 2
        group = root / path.strip("/")
        around = [folder for folder in group.parents if folder == root or root in folder.parents]
        for folder in (group, *around):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with suppress(OSError, ValueError):  # there is none, or it is "max"
                    found.append(int((folder / name).read_text()))
    return found

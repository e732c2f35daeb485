"""Host memory that a process may use, from files as Linux writes them."""

import os

import pytest
from fp8_suite.core import machine

GB = 10**9
GROUPS = {
    "no limit": ("0::/\n", {"memory.max": "max"}, 100),
    "container": ("0::/\n", {"memory.max": str(24 * GB)}, 24),
    "limit of an outer group": ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(32 * GB)}, 32),
    "more than the machine": ("0::/a\n", {"a/memory.max": str(200 * GB), "other/memory.max": "1"}, 100),
    "no such group": ("0::/gone\n", {}, 100),
    "version 1": ("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": str(16 * GB)}, 16),
    "version 1, no limit": ("4:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, 100),
    "outside the mount": ("0::/../outside\n", {"memory.max": str(8 * GB)}, 8),
    "no control groups": (None, {}, 100),
}


@pytest.mark.parametrize("case", GROUPS)
def test_memory_is_the_machines_or_the_limit_of_a_control_group(case, tmp_path, monkeypatch):
    groups, limits, expected = GROUPS[case]
    pages = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 100 * 10**6}  # 100 GB
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(machine, "PROCESS_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path / "groups")
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    for path, limit in limits.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    assert machine.host_memory() == expected * GB

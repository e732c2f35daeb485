"""What a process may use of its machine, from files as Linux writes them."""

import os

import pytest

from core import machine

GB = 10**9


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes what the process is in and the limits of control groups; the machine has 100 GB."""
    pages = {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 100 * 10**6}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")

    def write(own: str, limits: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for path, limit in limits.items():
            file = tmp_path / "groups" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(limit + "\n")

    return write


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, 100),
        ("0::/\n", {"memory.max": str(24 * GB)}, 24),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": str(32 * GB)}, 32),
        ("0::/job\n", {"job/memory.max": str(200 * GB), "other/memory.max": "1"}, 100),
        ("0::/gone\n", {}, 100),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(16 * GB)}, 16),
        ("4:memory:/\n3:cpuset:/x\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, 100),
        ("0::/../outside\n", {"memory.max": str(8 * GB)}, 8),
    ],
    ids=[
        "none",
        "container",
        "around",
        "larger than the machine",
        "gone",
        "version 1",
        "no limit",
        "outside",
    ],
)
def test_memory_is_the_machines_or_what_a_control_group_allows(own, limits, expected, groups):
    groups(own, limits)
    assert machine.host_memory() == expected * GB


def test_a_system_without_control_groups(groups):
    assert machine.host_memory() == 100 * GB

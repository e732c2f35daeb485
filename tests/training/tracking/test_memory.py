"""Flushes of torch's cache are counted and warned about once."""

import pytest
import torch
from fp8_suite.training.tracking.memory import GpuMemory


def warnings(counts: list[int]) -> list[bool]:
    memory = GpuMemory()
    return [memory.warning({"perf/cache_flushes": count}) is not None for count in counts]


@pytest.mark.parametrize(
    ("counts", "warned"),
    [
        ([2, 2, 2], [False] * 3),  # in the first interval, where the cache fills
        ([2, 2, 5, 9], [False, False, True, False]),
        ([0, 0], [False] * 2),
    ],
)
def test_flushes_after_the_first_interval_are_warned_about_once(counts, warned):
    assert warnings(counts) == warned


def test_a_cpu_has_no_memory_metrics():
    assert GpuMemory.read(torch.device("cpu"), lambda values: values) == {}
    assert GpuMemory().warning({}) is None

"""Copies of a state are exact, reuse their memory, and are finished before the next update."""

import re
import threading
import time
from pathlib import Path

import pytest
import torch
from fp8_suite.training.checkpoint import staging
from fp8_suite.training.checkpoint.staging import Stager

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Copy small tensors like large ones."""
    monkeypatch.setattr(staging, "PIECE", 1000)
    monkeypatch.setattr(staging, "SMALL", 100)


def state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(30, 50, generator=g).to(torch.bfloat16),
        "columns": torch.randn(40, 30, generator=g).t(),
        "codes": torch.randn(700, generator=g).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def test_a_copy_keeps_the_state_that_the_update_changes():
    stager, live, expected = Stager(CPU), state(), state()
    staged = stager.stage(live)
    stager.finish_copies()
    for tensor in live.values():
        tensor.zero_()
    for key, copy in staged.result().items():
        assert copy.dtype == expected[key].dtype and torch.equal(copy.float(), expected[key].float())


@pytest.mark.parametrize("reserved", [False, True])
def test_memory_is_allocated_once(reserved, monkeypatch):
    allocated = []
    allocate = staging._allocate
    monkeypatch.setattr(staging, "_allocate", lambda n, gpu: allocated.append(n) or allocate(n, gpu))
    stager, sizes = Stager(CPU), sorted(tensor.nbytes for tensor in state().values())
    if reserved:
        stager.reserve(state())
    for _ in range(3):
        staged = stager.stage(state()).result()
        assert torch.equal(staged["columns"], state()["columns"])
    assert sorted(allocated) == sizes


def test_without_copies_of_host_memory_the_update_waits_until_the_state_is_written():
    stager, live = Stager(CPU, copies_host=False), state()
    staged = stager.stage(live).result()
    assert staged["weight"] is live["weight"] and staged["scalar"] is not live["scalar"]
    ended = []
    writer = threading.Timer(0.2, lambda: (ended.append(time.perf_counter()), stager.end_reading()))
    writer.start()
    stager.finish_copies()
    assert ended and ended[0] <= time.perf_counter()


def test_a_forked_worker_keeps_no_copy_of_the_memory():
    """Otherwise it would keep every page as it was at the fork: as much host memory as the state again."""
    stager = Stager(CPU)
    copy = stager.stage({"weight": torch.ones(1000)}).result()["weight"]
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= copy.data_ptr() < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "dc" in flags.split(), "not copied by a fork"

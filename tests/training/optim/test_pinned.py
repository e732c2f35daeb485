"""Page-locked memory, with a stand-in for CUDA's driver."""

import os
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.training.optim import pinned
from fp8_suite.training.optim.pinned import RESIDENT_AT_ONCE, PageLocker, PinnedMemory

SIZE = 2 * RESIDENT_AT_ONCE + 4097


@pytest.fixture
def locked(monkeypatch):
    """Bytes that are page-locked, by address."""
    sizes = {}

    def register(address, nbytes, flags):
        sizes[address] = nbytes
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=sizes.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return sizes


@pytest.mark.parametrize("old_kernel", [False, True])
def test_memory_is_locked_beside_its_uses_and_released_with_its_last_tensor(locked, monkeypatch, old_kernel):
    if old_kernel:
        monkeypatch.setattr(pinned, "_populates", lambda: False)
    locker = PageLocker(torch.device("cpu"))
    tensors = []
    for value in range(1, 5):
        memory = PinnedMemory(SIZE)
        locker.lock(memory)
        tensors.append(memory.tensor())
        tensors[-1].fill_(value)  # while it is being locked
    del memory
    locker.wait()
    assert locked == {tensor.data_ptr(): SIZE for tensor in tensors}
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors, start=1))
    locker._pool.shutdown()  # a thread drops its reference only after it has set the result
    del tensors
    assert not locked


def test_a_forked_process_does_not_have_the_memory(locked):
    """Otherwise the parent's next write would get a copy of the page, and the GPU would read the old one."""
    memory = pinned.pinned(SIZE)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        mapped = any(int(start, 16) <= memory.data_ptr() < int(end, 16) for start, end in ranges)
        os.write(write, b"yes" if mapped else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 3) == b"no"
    os.close(read)
    os.close(write)

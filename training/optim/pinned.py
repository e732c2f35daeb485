"""Page-locked host memory, which the GPU reads and writes while the host does other work."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from fp8_suite.core.machine import cores
from torch import Tensor

RESIDENT_AT_ONCE = 2**24  # bytes that a thread makes resident at a time
LOCKERS = 4  # threads: while one of them is in CUDA's driver, another makes the next pages resident
MADV_POPULATE_WRITE = 23  # Linux 5.14: make pages resident and keep their values; Python lacks the constant


class PinnedMemory(mmap.mmap):
    """Zeroed host memory of exactly the given bytes; torch's allocator takes a power of two.

    It is ordinary memory until `lock` page-locks it. Forked processes (of the data loader) do not inherit it:
    by copy-on-write, the parent's next writes would go to other pages than the GPU reads.
    """

    unregister: Callable[[], object] | None = None  # set once the memory is page-locked

    def __new__(cls, nbytes: int) -> PinnedMemory:
        try:
            return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_memory("allocate", nbytes, str(error)) from None

    def __init__(self, nbytes: int):
        self.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel may have no huge pages
            self.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults, and longer runs to lock
        if not _populates():  # before another thread may write
            self._in_threads(lambda part: part[:: mmap.PAGESIZE].zero_())

    def tensor(self) -> Tensor:
        """Return the memory as a uint8 tensor, which keeps it alive."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def lock(self) -> None:
        """Make all pages resident and lock them. MemoryError if the host does not allow it.

        It may run in a thread beside uses of the memory. That thread's CUDA device must be set.
        """
        if _populates():
            self._in_threads(_populate)
        memory, runtime = self.tensor(), torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            raise _no_memory("page-lock", memory.nbytes, f"CUDA error {code}")
        self.unregister = functools.partial(runtime.cudaHostUnregister, memory.data_ptr())

    def _in_threads(self, work: Callable[[Tensor], object]) -> None:
        # Linux allocates a page at its first use, at about 1 GB/s on each core; CUDA would use one core.
        with ThreadPoolExecutor(len(cores())) as pool:
            list(pool.map(work, self.tensor().split(RESIDENT_AT_ONCE)))

    def __del__(self) -> None:
        if self.unregister:
            self.unregister()


def _populate(part: Tensor) -> int:
    """Make whole pages resident. Return 0, or -1 if the host does not allow it."""
    address, nbytes = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.nbytes)
    return ctypes.CDLL(None).madvise(address, nbytes, MADV_POPULATE_WRITE)  # releases the GIL, unlike mmap's


@functools.cache
def _populates() -> bool:
    """True if this kernel has MADV_POPULATE_WRITE."""
    return _populate(torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)) == 0


def _no_memory(action: str, nbytes: int, reason: str) -> MemoryError:
    return MemoryError(f"cannot {action} {nbytes / 1e6:.0f} MB of host memory ({reason})")


def pinned(nbytes: int) -> Tensor:
    """Return page-locked zeros, a uint8 tensor. MemoryError if the host does not allow it.

    It may be called in any thread whose current CUDA device is set.
    """
    memory = PinnedMemory(nbytes)
    memory.lock()
    return memory.tensor()


class PageLocker:
    """Threads that page-lock memory while the caller does other work."""

    def __init__(self, device: torch.device):
        # A new thread's current device is the first one, where locking would allocate a context.
        set_device = torch.get_device_module(device).set_device
        self._pool = ThreadPoolExecutor(LOCKERS, "page-locking", initializer=set_device, initargs=(device,))
        self._pending: deque[Future[None]] = deque()

    def lock(self, memory: PinnedMemory) -> None:
        """Start to lock `memory`, after what was given earlier."""
        self._pending.append(self._pool.submit(memory.lock))

    def wait(self) -> None:
        """Wait until everything is locked. MemoryError if the host does not allow it."""
        while self._pending:
            self._pending.popleft().result()

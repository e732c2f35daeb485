"""Copies of a run's state in host memory, made while the next forward and backward passes run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.training.checkpoint.writer import as_bytes
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.optim.pinned import pinned
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

THREADS = 4  # that copy within host memory
PIECE = 2**26  # bytes that a thread copies at a time
SMALL = 2**20  # bytes: torch's allocator rounds up to a power of two, but is fast


class Stager(AsyncStager):
    """Stages one state at a time for `torch.distributed.checkpoint.async_save`.

    The GPU's part is copied on a stream of its own, host tensors by threads. Nothing waits for the copies but
    the next update of the state, see `finish_copies`. The memory is used again by every save. Without
    `copies_host`, for want of memory, host tensors are written as they are, and the update waits for that.
    """

    _synchronize_after_execute = False

    def __init__(self, device: torch.device, *, copies_host: bool = True):
        self.device, self.copies_host = device, copies_host
        self.api = torch.get_device_module(device)  # streams and events of torch.cpu do nothing
        self.stream, self.copied = self.api.Stream(), self.api.Event()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="staging")
        self.free: dict[int, list[Tensor]] = {}  # host memory by bytes
        self.lent: list[Tensor] = []
        self.copies: list[Future] = []  # within host memory, of the save that has begun
        self.unread = threading.Event()  # no save reads the state itself, rather than a copy
        self.unread.set()
        self.reserved: threading.Thread | None = None

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate memory for tensors of these bytes in the background: page-locking takes 0.3 s a GB."""

        def allocate() -> None:
            self.api.set_device(self.device)  # of a new thread; torch.cpu ignores it
            for size in sizes:
                self.free.setdefault(size, []).append(self._allocate(size))

        self.reserved = threading.Thread(target=allocate, name="page-locking", daemon=True)
        self.reserved.start()

    def stage(self, state: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Start to copy. The state must not change before `finish_copies`."""
        if self.reserved:
            self.reserved.join()
        self.reserved, self.copies = None, []
        staged, sources = {}, []  # sources: keep temporary tensors until they are copied
        self.stream.wait_stream(self.api.current_stream())
        with self.api.stream(self.stream):
            for key, tensor in state.items():
                source = as_bytes(local(tensor))
                if not (source.is_cuda or self.copies_host or len(source) < SMALL):
                    self.unread.clear()
                    staged[key] = tensor
                    continue
                copy = self._take(len(source))
                if source.is_cuda:
                    copy.copy_(source, non_blocking=True)
                else:
                    self._copy_in_threads(copy, source)
                sources.append(source)
                staged[key] = moments.with_layout(_like(copy, local(tensor)), tensor)
            self.copied.record(self.stream)
        return self.threads.submit(self._wait, staged, sources, self.copies)

    def finish_copies(self) -> None:
        """Let the next update wait for the copies: the stream for the GPU's, this thread for the others."""
        self.api.current_stream().wait_event(self.copied)
        for copy in self.copies:
            copy.result()
        self.copies = []
        self.unread.wait()

    def end_reading(self) -> None:
        """Note that the files of the save are written, or that it has failed."""
        self.unread.set()

    def release(self) -> None:
        """Take back the memory of a save that has ended."""
        for memory in self.lent:
            self.free.setdefault(len(memory), []).append(memory)
        self.lent = []

    def close(self) -> None:
        self.threads.shutdown()

    def _wait(
        self, staged: dict[str, Tensor], sources: list[Tensor], copies: list[Future]
    ) -> dict[str, Tensor]:
        self.copied.synchronize()
        for copy in copies:
            copy.result()
        sources.clear()
        return staged

    def _take(self, size: int) -> Tensor:
        free = self.free.get(size)
        memory = free.pop() if free else self._allocate(size)
        self.lent.append(memory)
        return memory

    def _allocate(self, size: int) -> Tensor:
        on_gpu = self.device.type == "cuda"
        if not on_gpu or size < SMALL:
            return torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        try:
            return pinned(size)
        except MemoryError as error:
            raise bad_setting(f"{error}; use --no_async_save", async_save=True) from None

    def _copy_in_threads(self, copy: Tensor, source: Tensor) -> None:
        for start in range(0, len(source), PIECE):
            piece = source[start : start + PIECE]
            arguments = copy[start:].data_ptr(), piece.data_ptr(), len(piece)
            self.copies.append(self.threads.submit(ctypes.memmove, *arguments))


class Unstaged(AsyncStager):
    """Stager for a state that is a copy already, as DeepSpeed's."""

    def stage(self, state: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        future: Future[dict[str, Tensor]] = Future()
        future.set_result(state)
        return future

    def finish_copies(self) -> None: ...
    def end_reading(self) -> None: ...
    def release(self) -> None: ...


def _like(memory: Tensor, tensor: Tensor) -> Any:
    return memory.view(tensor.dtype).view(tensor.shape)

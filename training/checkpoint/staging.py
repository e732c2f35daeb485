"""Copies of a run's state in host memory, made while the next forward and backward passes run."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.training.checkpoint.writer import as_bytes
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.optim.pinned import PinnedMemory, pinned
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

THREADS = 4  # they copy within host memory
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
        timed = {"enable_timing": True} if device.type == "cuda" else {}
        self.stream = self.api.Stream()
        # The GPU's copies are done; it has done what precedes the update.
        self.copied, self.arrived = self.api.Event(**timed), self.api.Event(**timed)
        self.threads = ThreadPoolExecutor(
            THREADS, "staging", initializer=self.api.set_device, initargs=(device,)
        )
        self.memory: dict[str, Tensor] = {}  # of the copies, by key
        self.copies: list[Future] = []  # within host memory, of the save that has begun
        self.unread = threading.Event()  # cleared while a save reads state that it has not copied
        self.unread.set()
        self.reserved: Future[None] | None = None

    def reserve(self, state: dict[str, Tensor]) -> None:
        """Allocate the memory for copies of `state` in the background, as page-locking takes time."""
        shards = {key: local(tensor) for key, tensor in state.items()}
        sizes = {key: (s.nbytes, s.is_cuda) for key, s in shards.items() if self._is_copied(s)}

        def allocate() -> None:
            for key, (size, for_gpu) in sizes.items():
                self.memory[key] = _allocate(size, for_gpu)

        self.reserved = self.threads.submit(allocate)

    def check_reserved(self) -> None:
        """Raise the error of `reserve`, if it has ended: long before the first save may be due."""
        if self.reserved and self.reserved.done():
            self.reserved.result()

    def stage(self, state: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Start to copy. The state must not change before `finish_copies`."""
        if self.reserved:
            self.reserved.result()
        self.reserved, self.copies = None, []
        staged, sources = {}, []  # sources: keep temporary tensors until they are copied
        self.stream.wait_stream(self.api.current_stream())
        with self.api.stream(self.stream):
            for key, tensor in state.items():
                shard = local(tensor)
                if not self._is_copied(shard):
                    self.unread.clear()
                    staged[key] = tensor
                    continue
                source, copy = as_bytes(shard), self.memory.get(key)
                if copy is None or len(copy) != len(source):
                    copy = self.memory[key] = _allocate(len(source), source.is_cuda)
                if source.is_cuda:
                    copy.copy_(source, non_blocking=True)
                else:
                    self._copy_in_threads(copy, source)
                sources.append(source)
                staged[key] = moments.with_layout(copy.view(shard.dtype).view(shard.shape), tensor)
            self.copied.record(self.stream)
        return self.threads.submit(self._wait, staged, sources, self.copies)

    def finish_copies(self) -> None:
        """Let the next update wait for the copies: the stream for the GPU's, this thread for the others."""
        self.arrived.record(self.api.current_stream())
        self.api.current_stream().wait_event(self.copied)
        for copy in self.copies:
            copy.result()
        self.copies = []
        self.unread.wait()

    def gpu_waited(self) -> float:
        """Return the seconds for which the GPU waited for copies before the update, once they are done."""
        if self.device.type != "cuda" or not self.arrived.query():
            return 0.0
        return max(0.0, self.arrived.elapsed_time(self.copied) / 1e3)

    def end_reading(self) -> None:
        """Note that the files of the save are written, or that it has failed."""
        self.unread.set()

    def _is_copied(self, shard: Tensor) -> bool:
        return shard.is_cuda or self.copies_host or shard.nbytes < SMALL

    def _wait(
        self, staged: dict[str, Tensor], sources: list[Tensor], copies: list[Future]
    ) -> dict[str, Tensor]:
        self.copied.synchronize()
        for copy in copies:
            copy.result()
        sources.clear()
        return staged

    def _copy_in_threads(self, copy: Tensor, source: Tensor) -> None:
        for start in range(0, len(source), PIECE):
            piece = source[start : start + PIECE]
            arguments = copy[start:].data_ptr(), piece.data_ptr(), len(piece)
            self.copies.append(self.threads.submit(ctypes.memmove, *arguments))


def _allocate(size: int, for_gpu: bool) -> Tensor:
    if size < SMALL:
        return torch.empty(size, dtype=torch.uint8, pin_memory=for_gpu)
    try:
        # Workers that the loader forks inherit neither. They would keep the pages that the next save changes.
        return pinned(size) if for_gpu else PinnedMemory(size).tensor()
    except MemoryError as error:
        raise bad_setting(f"{error}; use --no_async_save", async_save=True) from None


class Unstaged(AsyncStager):
    """Stager for a state that is a copy already, as DeepSpeed's."""

    _synchronize_after_execute = False

    def stage(self, state: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        future: Future[dict[str, Tensor]] = Future()
        future.set_result(state)
        return future

    def finish_copies(self) -> None: ...
    def gpu_waited(self) -> float:
        return 0.0

    def end_reading(self) -> None: ...

"""Optimizer state in host memory, streamed through the GPU in every optimizer step.

The state passes through a few device buffers in chunks. One stream copies a chunk in, the current stream
steps it, another stream copies it back, so that transfers in both directions overlap each other and the
kernel. Events order the streams, and the host waits for none of them. On a CPU the same code makes plain
copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.training.optim import moments
from fp8_suite.training.optim.pinned import PageLocker, PinnedMemory
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK = 2**23  # elements, a multiple of moments.BLOCK: at most 101 MB of state
BUFFERS = 3  # one chunk arrives, one is stepped, one leaves
ALIGNMENT = 256  # bytes, for the tensors within a buffer

WEIGHT = "weight"  # state of an FP8 parameter: the BF16 weight that it is quantized from
State = dict[str, Tensor]  # a parameter's state tensors by name
Update = Callable[[Tensor, Tensor, State, Tensor, Tensor, dict[str, Any]], None]  # type of adamw.update_


class HostState:
    """Optimizer state in host memory, for parameters on `device`.

    New state can be used at once. It is page-locked in the background, before the first update.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.locker = PageLocker(device) if device.type == "cuda" else None
        self.api = torch.get_device_module(device)  # streams and events of torch.cpu do nothing
        self.arriving, self.leaving = self.api.Stream(), self.api.Stream()
        self.buffer_bytes = 0
        self._when_locked: list[Callable[[], None]] = []

    def place(self, layouts: State, beside: State) -> State:
        """Allocate zeros in host memory with the shapes, dtypes and sharding of these meta tensors.

        Return them together with `beside`, the parameter's state that is there already.
        """
        shards = {}
        for name, layout in layouts.items():
            shard = layout.to_local() if isinstance(layout, DTensor) else layout
            shards[name] = self._zeros(shard.shape, shard.dtype)
        chunk = _chunk(shards | beside, 0)
        self.buffer_bytes = max(self.buffer_bytes, sum(map(_aligned_bytes, chunk.values())))
        return beside | {name: moments.with_layout(shards[name], layout) for name, layout in layouts.items()}

    def _zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self.locker is None or not shape.numel():
            return torch.zeros(shape, dtype=dtype)
        with _explaining_lack_of_memory():
            memory = PinnedMemory(shape.numel() * dtype.itemsize)
        self.locker.lock(memory)
        return memory.tensor().view(dtype).view(shape)

    def when_locked(self, work: Callable[[], None]) -> None:
        """Call `work` in the next `wait_until_locked`, at the latest before the next update."""
        self._when_locked.append(work)

    def wait_until_locked(self) -> None:
        """Wait until the state is page-locked. Copies of other memory are slow and make the host wait."""
        if self.locker is not None:
            with _explaining_lack_of_memory():
                self.locker.wait()
        while self._when_locked:
            self._when_locked.pop()()

    @contextmanager
    def streaming(self, update: Update) -> Iterator[Update]:
        """Wrap one step: yield a version of `update` for parameters whose state is in host memory.

        If the BF16 weight is there too, the weight that is passed only receives its updated values.
        Buffers exist only within a step, when the memory of activations is free.
        """
        self.wait_until_locked()
        current = self.api.current_stream()
        buffers = itertools.cycle([_Buffer(self.buffer_bytes, self.device) for _ in range(BUFFERS)])
        self.arriving.wait_stream(current)  # earlier kernels may still use the memory of the buffers

        def update_streamed(
            weight: Tensor, grad: Tensor, state: State, scalars: Tensor, seed: Tensor, group: dict[str, Any]
        ) -> None:
            flat, grad = weight.view(-1), grad.reshape(-1)
            for first in range(0, len(flat), CHUNK):
                part = slice(first, first + CHUNK)
                with self._on_device(_chunk(state, first), next(buffers), current) as staged:
                    high = staged.get(WEIGHT, flat[part])
                    update(high, grad[part], staged, scalars, moments.seed_at(seed, first), group)
                    if WEIGHT in staged:
                        flat[part].copy_(high)

        try:
            yield update_streamed
        finally:
            current.wait_stream(self.leaving)  # later kernels may use the memory of the buffers

    @contextmanager
    def _on_device(self, chunk: State, buffer: _Buffer, current: Any) -> Iterator[State]:
        """Copy a chunk into a buffer for work on the stream `current`, and back afterwards."""
        staged = buffer.like(chunk)
        with self.api.stream(self.arriving):
            self.arriving.wait_event(buffer.left)
            for name, tensor in chunk.items():
                staged[name].copy_(tensor, non_blocking=True)
            buffer.arrived.record(self.arriving)
        current.wait_event(buffer.arrived)
        yield staged
        buffer.stepped.record(current)
        with self.api.stream(self.leaving):
            self.leaving.wait_event(buffer.stepped)
            for name, tensor in chunk.items():
                tensor.copy_(staged[name], non_blocking=True)
            buffer.left.record(self.leaving)


@contextmanager
def _explaining_lack_of_memory() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise bad_setting(f"{error}; drop it", offload_optimizer=True) from None


class _Buffer:
    """Device memory for one chunk, with the events after which its next user may start."""

    def __init__(self, nbytes: int, device: torch.device):
        event = torch.get_device_module(device).Event
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.arrived, self.stepped, self.left = event(), event(), event()

    def like(self, chunk: State) -> State:
        """Return the buffer as tensors of the chunk's sizes and dtypes."""
        parts, start = {}, 0
        for name, tensor in chunk.items():
            parts[name] = self.memory[start : start + tensor.nbytes].view(tensor.dtype)
            start += _aligned_bytes(tensor)
        return parts


def _chunk(state: State, first: int) -> State:
    """Return the state of a chunk, elements `first` to `first` + CHUNK of the parameter, as vectors."""
    parts = {}
    for name, tensor in state.items():
        values = moments.BLOCK if name.endswith(moments.EXPONENTS) else 1  # values of the parameter per entry
        parts[name] = tensor.view(-1)[first // values : (first + CHUNK) // values]
    return parts


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

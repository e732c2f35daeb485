"""Offload the activations that recomputed layers keep: to pinned host memory in forward, back in backward.

Copies run on their own streams beside the computation. Forward waits while more than two layers are being
copied out, so GPU memory stays bounded. Backward fetches a layer while it runs the layer above.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch
from fp8_suite.te_models.settings import IN_FLIGHT
from torch import Tensor
from torch.utils._pytree import tree_map_only

SMALLEST = 2**20  # bytes; smaller tensors stay on the GPU


@dataclass(eq=False)
class _Copy:
    """A tensor on the host, and its copy on the GPU while backward needs it."""

    buffer: Tensor  # host memory that `host` is a part of
    host: Tensor
    device: torch.device
    on_gpu: Tensor | None = None


@dataclass(eq=False)
class Stored:
    """Values that one layer keeps, with their large tensors on the host."""

    values: Any  # tree with a _Copy in place of each large tensor
    copies: list[_Copy] = field(default_factory=list)
    fetched: torch.cuda.Event | None = None


class ActivationOffload:
    """Host memory and streams of one model. Later micro-batches, also of other lengths, reuse buffers."""

    def __init__(self, device: torch.device):
        self.out, self.back = (torch.cuda.Stream(device) for _ in range(2))
        self.stored: list[Stored] = []  # in the order of forward
        self.leaving: deque[tuple[torch.cuda.Event, Any]] = deque()
        # Free host buffers by size, each with the event after which it may be overwritten.
        self.free: defaultdict[int, list[tuple[Tensor, torch.cuda.Event]]] = defaultdict(list)

    def begin(self) -> None:
        """Drop the activations of an interrupted step."""
        self.stored.clear()

    def store(self, values: Any) -> Stored:
        """Start copying the large tensors in a tree to the host; the caller drops its references."""
        values = tree_map_only(Tensor, Tensor.detach, values)
        main, stored = torch.cuda.current_stream(), Stored(None)
        self.out.wait_stream(main)
        with torch.cuda.stream(self.out):
            stored.values = tree_map_only(Tensor, lambda t: self._copy_out(t, stored), values)
            done = self.out.record_event()
        self.leaving.append((done, values))  # keeps the memory until the copy is done
        while len(self.leaving) > IN_FLIGHT:
            main.wait_event(self.leaving.popleft()[0])
        self.stored.append(stored)
        return stored

    def _copy_out(self, tensor: Tensor, stored: Stored) -> Any:
        if tensor.nbytes < SMALLEST:
            return tensor
        buffer = self._buffer(tensor.nbytes)
        host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        stored.copies.append(_Copy(buffer, host, tensor.device))
        return stored.copies[-1]

    def _buffer(self, nbytes: int) -> Tensor:
        """Return pinned memory for this many bytes. Sizes are powers of two, as PyTorch allocates them."""
        size = 1 << (nbytes - 1).bit_length()
        if not self.free[size]:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        buffer, read = self.free[size].pop()
        self.out.wait_event(read)
        return buffer

    def load(self, stored: Stored) -> Any:
        """Return the tree with its tensors on the GPU, and start fetching the layer before it."""
        main = torch.cuda.current_stream()
        while self.leaving:  # the last layers of forward
            main.wait_event(self.leaving.popleft()[0])
        assert self.stored.pop() is stored, "backward visits layers in reverse order"
        self._fetch(stored)
        if self.stored:
            self._fetch(self.stored[-1])
        main.wait_event(stored.fetched)
        values = tree_map_only(_Copy, lambda copy: copy.on_gpu, stored.values)
        stored.values = None
        stored.copies.clear()
        return values

    def _fetch(self, stored: Stored) -> None:
        if stored.fetched is not None:
            return
        main = torch.cuda.current_stream()
        for copy in stored.copies:
            copy.on_gpu = torch.empty_like(copy.host, device=copy.device, pin_memory=False)
        self.back.wait_stream(main)  # the new memory may still be in use by earlier kernels
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            for copy in stored.copies:
                copy.on_gpu.copy_(copy.host, non_blocking=True)
            stored.fetched = self.back.record_event()
        for copy in stored.copies:
            self.free[len(copy.buffer)].append((copy.buffer, stored.fetched))

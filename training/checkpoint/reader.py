"""Checkpoint files are read once: one rank hashes each file in the pass that loads its tensors."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from fp8_suite.training.checkpoint.manifest import THREADS, damaged
from fp8_suite.training.checkpoint.writer import BLOCK, as_bytes, bounce_buffer, set_direct
from safetensors import safe_open
from torch import Tensor


class Reader(dcp.HuggingFaceStorageReader):
    """Reads files that this rank is to hash in blocks, past the page cache if no other rank reads them.

    Other files are mapped into memory, and so are parts of tensors: ranks have other shards than were saved.
    """

    def __init__(self, path: Path, digests: dict[str, dict]):
        """`digests` are size and checksum of the files to verify; none if the checkpoint is verified."""
        super().__init__(str(path))
        self.digests = digests

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Choose the rank that hashes each file: the one that needs most of it, or has least to hash."""
        needed: list[Counter[str]] = [Counter() for _ in plans]
        for plan, count in zip(plans, needed, strict=True):
            for item in plan.items:
                size = math.prod(item.lengths) * self.storage_data[item.storage_index].dtype.itemsize
                count[self._file_of(item)] += size
        hashed: list[dict[str, bool]] = [{} for _ in plans]  # True: read past the page cache
        totals = [0] * len(plans)
        for name, digest in self.digests.items():
            shares = [count[name] for count in needed]
            rank = max(range(len(plans)), key=lambda rank, shares=shares: (shares[rank], -totals[rank]))
            totals[rank] += digest["size"]
            # What this load leaves out may be read next, see `_load_moments` in state.py.
            hashed[rank][name] = shares[rank] == sum(shares) and 2 * shares[rank] > digest["size"]
        return [replace(plan, storage_data=files) for plan, files in zip(plans, hashed, strict=True)]

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        # Files to hash come first, so that ranks do not all begin with the same file.
        items: dict[str, list[Any]] = {name: [] for name in plan.storage_data}
        for item in plan.items:
            items.setdefault(self._file_of(item), []).append(item)

        def read(name: str) -> None:
            rest = items[name]
            if name in plan.storage_data:
                rest = self._read_and_hash(name, rest, planner, direct=plan.storage_data[name])
            if rest:
                with safe_open(self.path / name, framework="pt") as file:
                    for item in rest:
                        self._process_read_request(file, item, planner)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, items))
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _file_of(self, item: Any) -> str:
        return Path(self.storage_data[item.storage_index].relative_path).name

    def _read_and_hash(
        self, name: str, items: list[Any], planner: dcp.LoadPlanner, *, direct: bool
    ) -> list[Any]:
        """Hash the file and load its whole tensors; return the other items. DamagedCheckpoint if damaged."""
        path, whole, rest = self.path / name, {}, []
        for item in items:
            tensor = planner.resolve_tensor(item).detach()
            is_whole = tensor.shape == self.storage_data[item.storage_index].shape and tensor.is_contiguous()
            if is_whole:
                whole[item.storage_index.fqn] = as_bytes(tensor)
            else:
                rest.append(item)
        checksum, position, starts = xxhash.xxh3_128(), 0, _positions(path) if whole else {}
        buffer = bounce_buffer(BLOCK, pin_memory=any(memory.is_cuda for memory in whole.values()))
        view, descriptor = memoryview(buffer.numpy()), os.open(path, os.O_RDONLY)
        try:
            direct = direct and set_direct(descriptor, True)
            while count := _read(descriptor, view, position, direct):
                checksum.update(view[:count])
                for key, memory in whole.items():
                    _copy(memory, starts[key], buffer[:count], position)
                position += count
        finally:
            os.close(descriptor)
        if {"size": position, "xxh3_128": checksum.hexdigest()} != self.digests[name]:
            raise damaged(path.parent, f"{path}: does not match its checksum")
        return rest


def _positions(path: Path) -> dict[str, int]:
    """Return the first byte of each tensor in a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {key: 8 + length + entry["data_offsets"][0] for key, entry in header.items() if key[:2] != "__"}


def _read(descriptor: int, view: memoryview, position: int, direct: bool) -> int:
    try:
        return os.preadv(descriptor, [view], position)
    except OSError:
        if not direct:
            raise
    set_direct(descriptor, False)  # some file systems refuse it only now, or after a partial read
    return os.preadv(descriptor, [view], position)


def _copy(memory: Tensor, start: int, block: Tensor, position: int) -> None:
    """Copy the part of `block`, at `position` in a file, that belongs to `memory`, at `start`."""
    first, last = max(start, position), min(start + len(memory), position + len(block))
    if first < last:
        memory[first - start : last - start].copy_(block[first - position : last - position])

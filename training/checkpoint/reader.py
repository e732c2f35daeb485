"""Checkpoint files are read once: one rank hashes each file in the pass that loads its tensors."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from fp8_suite.training.checkpoint.manifest import THREADS, check_file, read_manifest
from fp8_suite.training.checkpoint.writer import BLOCK, SHARDING, as_bytes, bounce_buffer, set_direct
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata


class Shard(NamedTuple):
    """A stored tensor, or a shard of one."""

    file: str
    start: int  # first byte in the file
    shape: list[int]
    itemsize: int


class Reader(dcp.StorageReader):
    """Reads files in blocks, hashes those blocks, and copies them into tensors on any device.

    torch's HuggingFaceStorageReader maps files into memory, so verifying them would take a pass of its own.
    """

    def __init__(self, path: Path, *, verify: bool):
        self.path, self.verify = path, verify

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def read_headers(self) -> None:
        """Find every shard. Any exception is possible if a file is damaged, as none is verified yet."""
        manifest = read_manifest(self.path)
        self.digests: dict[str, dict] = manifest["files"]
        self.shards: dict[dcp_metadata.MetadataIndex, Shard] = {}
        chunks = defaultdict(list)
        for name in self.digests:
            if not name.endswith(".safetensors"):
                continue
            with open(self.path / name, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            offsets = json.loads(header.pop("__metadata__")[SHARDING])
            for key, entry in header.items():
                (start, end), shape = entry["data_offsets"], entry["shape"]
                chunk = dcp_metadata.ChunkStorageMetadata(
                    torch.Size(offsets[key]["saved_offsets"]), torch.Size(shape)
                )
                chunks[key].append(chunk)
                itemsize = (end - start) // max(1, math.prod(shape))
                self.shards[dcp_metadata.MetadataIndex(key, chunk.offsets)] = Shard(
                    name, 8 + length + start, shape, itemsize
                )
        self.metadata = dcp_metadata.Metadata(
            {
                key: dcp_metadata.TensorStorageMetadata(
                    dcp_metadata.TensorProperties(), torch.Size(spec["shape"]), chunks[key]
                )
                for key, spec in manifest["tensors"].items()
            }
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self.metadata

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """Choose for each file the rank that hashes it: the one that reads most of it.

        Files that one rank reads are read past the page cache, which is faster.
        """
        needed: list[Counter[str]] = [Counter() for _ in plans]
        for plan, count in zip(plans, needed, strict=True):
            for item in plan.items:
                shard = self.shards[item.storage_index]
                count[shard.file] += math.prod(item.lengths) * shard.itemsize
        hashed = [{} for _ in plans]  # by rank: name of a file, and True if it is read past the page cache
        loads = [0] * len(plans)
        for name, digest in self.digests.items() if self.verify else ():
            rank = max(range(len(plans)), key=lambda rank, name=name: (needed[rank][name], -loads[rank]))
            loads[rank] += digest["size"]
            alone = sum(count[name] > 0 for count in needed) == 1
            # What this load leaves out may be read next, see `_load_moments` in state.py.
            hashed[rank][name] = alone and 2 * needed[rank][name] > digest["size"]
        return [replace(plan, storage_data=names) for plan, names in zip(plans, hashed, strict=True)]

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        # Files that this rank hashes come first, so that ranks do not all begin with the same file.
        items: dict[str, list[Any]] = {name: [] for name in plan.storage_data}
        for item in plan.items:
            items.setdefault(self.shards[item.storage_index].file, []).append(item)

        def read(name: str) -> None:
            self._read_file(name, [self._target(item, planner) for item in items[name]], plan.storage_data)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, items))
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _target(self, item: Any, planner: dcp.LoadPlanner) -> Target:
        shard, tensor = self.shards[item.storage_index], planner.resolve_tensor(item).detach()
        if tensor.is_contiguous() and list(item.lengths[1:]) == shard.shape[1:]:
            first_row = item.storage_offsets[0] if shard.shape else 0
            row = math.prod(shard.shape[1:]) * shard.itemsize
            return Target(shard.start + first_row * row, as_bytes(tensor))
        # Columns of a shard, or strided memory: read the shard, then copy.
        memory = torch.empty(shard.shape, dtype=tensor.dtype)
        sizes = zip(item.storage_offsets, item.lengths, strict=True)
        part = memory[tuple(slice(offset, offset + length) for offset, length in sizes)]
        return Target(shard.start, as_bytes(memory), lambda: tensor.copy_(part))

    def _read_file(self, name: str, targets: list[Target], hashed: dict[str, bool]) -> None:
        """Fill `targets`. Hash the file if this rank is to; DamagedCheckpoint if it is damaged."""
        path, size, checksum = self.path / name, 0, xxhash.xxh3_128()
        spans = None if name in hashed else [(at, at + len(memory)) for at, memory, _ in targets]
        on_gpu = any(target.memory.is_cuda for target in targets)
        for start, block in _blocks(path, spans, direct=hashed.get(name, False), pin_memory=on_gpu):
            if name in hashed:
                checksum.update(memoryview(block.numpy()))
                size += len(block)
            for at, memory, _ in targets:
                first, last = max(start, at), min(start + len(block), at + len(memory))
                if first < last:
                    memory[first - at : last - at].copy_(block[first - start : last - start])
        if name in hashed:
            digest = {"size": size, "xxh3_128": checksum.hexdigest()}
            check_file(path, digest, self.digests[name])
        for target in targets:
            target.finish()


class Target(NamedTuple):
    """Memory for bytes of a file."""

    start: int  # first byte in the file
    memory: Tensor  # uint8 vector
    finish: Callable[[], Any] = lambda: None


def _blocks(
    path: Path, spans: list[tuple[int, int]] | None, *, direct: bool, pin_memory: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield (position, bytes) of `spans` of a file, or of all of it, in a buffer that is used again."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        direct = direct and set_direct(descriptor, True)
        buffer = bounce_buffer(BLOCK, pin_memory=pin_memory)
        view = memoryview(buffer.numpy())
        for start, end in spans or [(0, size)]:
            while start < end:
                try:
                    # Direct reads end at the end of the file, not of the span, to be aligned.
                    count = os.preadv(descriptor, [view[: BLOCK if direct else end - start]], start)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    direct = set_direct(descriptor, False)
                    continue
                if not count:
                    raise EOFError(f"{path}: shorter than its tensors")
                yield start, buffer[:count]
                start += count
    finally:
        os.close(descriptor)

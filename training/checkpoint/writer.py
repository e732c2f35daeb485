"""Checkpoint files: safetensors, hashed in the pass that writes them past the page cache.

Direct writes reach the disk's own rate; buffered ones are slower, and push the data set out of the cache.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

BLOCK = 2**24  # bytes of one write or read, a multiple of every disk's block size
PAGE = 4096  # alignment of direct writes and reads in memory
DTYPES = {  # names in safetensors' header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """Write a new safetensors file, sync it to disk, and return its size and checksum for the manifest.

    The tensors may be on any device; they pass through a buffer of BLOCK bytes. Raises OSError.
    """
    # Larger items first keep every tensor aligned in the file, as readers map it into memory.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    header = torch.frombuffer(bytearray(_header(tensors, metadata)), dtype=torch.uint8)
    parts = [header, *map(as_bytes, tensors.values())]
    size, checksum = sum(map(len, parts)), xxhash.xxh3_128()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for block in _blocks(parts, min(size, BLOCK)):
            checksum.update(block)
            _write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"size": size, "xxh3_128": checksum.hexdigest()}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as a uint8 vector; shares memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return the file's beginning: the length of the header in 8 bytes, and the header in JSON."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"} | metadata}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(parts: list[Tensor], size: int) -> Iterator[memoryview]:
    """Yield the bytes of `parts` in blocks of `size` bytes, in a buffer that is used again."""
    buffer = bounce_buffer(size, pin_memory=any(part.is_cuda for part in parts))
    filled = 0
    for part in parts:
        while len(part):
            count = min(len(part), size - filled)
            buffer[filled : filled + count].copy_(part[:count])
            part, filled = part[count:], filled + count
            if filled == size:
                yield memoryview(buffer.numpy())
                filled = 0
    if filled:
        yield memoryview(buffer[:filled].numpy())


def bounce_buffer(size: int, *, pin_memory: bool) -> Tensor:
    """Return memory for direct writes and reads, page-locked for copies to or from a GPU."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pin_memory)
    return memory[-memory.data_ptr() % PAGE :][:size]


def _write(descriptor: int, block: memoryview) -> None:
    direct = set_direct(descriptor, len(block) == BLOCK)
    while block:
        try:
            block = block[os.write(descriptor, block) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = set_direct(descriptor, False)  # a rest after a partial write is not aligned


def set_direct(descriptor: int, direct: bool) -> bool:
    """Switch direct reads and writes on or off. True if they are on; some file systems do not have them."""
    flags, flag = fcntl.fcntl(descriptor, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError:
        return False
    return direct

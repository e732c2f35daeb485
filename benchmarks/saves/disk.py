"""Rates at which a disk takes several files at a time: direct writes, and buffered ones with fsync."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from fp8_suite.training.parallel import ranks

FILES = 8  # of each rank, at a time
BLOCK = 2**23  # bytes of one write
MOST = 2**31  # bytes of all ranks in one pass
PASSES = 3


def disk_rates(folder: Path, size: int) -> dict[str, float | None]:
    """Return bytes a second of all ranks together, in passes of up to `size` bytes. Collective."""
    folder.mkdir(exist_ok=True)
    blocks = max(1, min(size, MOST) // (FILES * ranks.world_size() * BLOCK))
    try:
        direct = _median_rate(folder, blocks, os.O_DIRECT)
    except OSError:  # some file systems refuse direct writes
        direct = None
    return {"direct": direct, "buffered": _median_rate(folder, blocks, 0)}


def _median_rate(folder: Path, blocks: int, flag: int) -> float:
    paths, seconds = [folder / f"{ranks.rank()}-{number}" for number in range(FILES)], []
    write = partial(_write_file, blocks=blocks, flag=flag)
    with ThreadPoolExecutor(FILES) as pool:
        for _ in range(PASSES):
            ranks.gather(None)  # start together
            began = time.perf_counter()
            ranks.run_on_all_ranks(lambda: list(pool.map(write, paths)))
            seconds.append(time.perf_counter() - began)
            for path in paths:
                path.unlink()
    return blocks * BLOCK * FILES * ranks.world_size() / median(seconds)


def _write_file(path: Path, blocks: int, flag: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    with open(descriptor, "wb", buffering=0) as file, mmap.mmap(-1, BLOCK) as block:
        block.write(os.urandom(BLOCK // 64) * 64)  # zeros might not reach the disk
        for _ in range(blocks):
            file.write(block)  # from memory aligned to a page, as direct writes need it
        os.fsync(descriptor)

"""Rates at which a disk takes several files at a time: direct writes, and buffered ones with fsync."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
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
    """Return the bytes a second of all ranks together, None without direct writes there. Collective.

    Every pass writes `size` bytes, if that is not more than MOST and a quarter of the free space.
    """
    ranks.run_on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
    size = ranks.run_on_rank0(lambda: min(size, MOST, shutil.disk_usage(folder).free // 4))
    blocks = max(1, size // (FILES * ranks.world_size() * BLOCK))
    rates: dict[str, float | None] = {}
    for name, flag in (("direct", getattr(os, "O_DIRECT", 0)), ("buffered", 0)):
        passes = [_write_all(folder, blocks, flag) for _ in range(PASSES)]
        rates[name] = None if None in passes else median(passes)
    ranks.run_on_rank0(lambda: shutil.rmtree(folder))
    return rates


def _write_all(folder: Path, blocks: int, flag: int) -> float | None:
    """Return the rate of one pass of all ranks; None if the file system refuses `flag`."""
    paths = [folder / f"{ranks.rank()}-{number}" for number in range(FILES)]
    ranks.gather(None)  # start together
    began = time.perf_counter()
    with ThreadPoolExecutor(FILES) as pool:
        written = ranks.run_on_all_ranks(
            lambda: all(pool.map(partial(_write_file, blocks=blocks, flag=flag), paths))
        )
    seconds = time.perf_counter() - began
    for path in paths:
        path.unlink(missing_ok=True)
    return blocks * BLOCK * FILES * ranks.world_size() / seconds if all(written) else None


def _write_file(path: Path, blocks: int, flag: int) -> bool:
    """Write and sync a file; False if its file system has no direct writes."""
    with mmap.mmap(-1, BLOCK) as block:  # aligned to a page, as direct writes need it
        block.write(os.urandom(BLOCK // 64) * 64)  # zeros might not reach the disk
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
            try:
                for _ in range(blocks):
                    os.write(descriptor, block)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL or not flag:
                raise
            return False
    return True

"""Read the libraries of a run into the page cache, many files at a time. A process of its own.

Imports wait for one file after another: they took 22 s on a fresh host, and 4 s on the same one later.

    python -S core/read_ahead.py FOLDER ...    with the folders of sys.path
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.machinery import PathFinder

THREADS = 32  # they wait for the disk
BLOCK, PART = 2**20, 2**24  # bytes per read, and per task of a thread
# In the order of their imports.
PACKAGES = ("torch", "nvidia", "numpy", "sympy", "mpmath", "pyarrow", "pandas", "datasets", "transformers")
PACKAGES += ("transformer_engine", "triton", "flash_attn", "cutlass", "quack", "torchao")
UNUSED = {"tests", "test", "testing", "include", "models", "benchmarks", "examples"}  # folders
# Of NVIDIA's other libraries a run reads little but their ends, where the loader finds symbols.
WHOLE = ("libcublas", "libcudart", "libnvrtc")


def files(package: str) -> Iterator[str]:
    """Yield the paths of a package's bytecode and libraries, without importing it."""
    spec = PathFinder.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for top, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name not in UNUSED]
            yield from (os.path.join(top, name) for name in names if name.endswith(".pyc") or ".so" in name)


def parts(path: str) -> list[tuple[str, int]]:
    """Return the parts of a file to read, as (path, first byte)."""
    if path.endswith(".pyc"):
        return [(path, 0)]
    starts = range(0, os.path.getsize(path), PART)
    whole = "/nvidia/" not in path or os.path.basename(path).startswith(WHOLE)
    return [(path, start) for start in (starts if whole else {starts[0], starts[-1]})]


def read(path: str, start: int) -> None:
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        file.seek(start)
        buffer = bytearray(BLOCK)
        for _ in range(PART // BLOCK):
            if file.readinto(buffer) < BLOCK:
                break


def start() -> None:
    """Start the process."""
    nowhere = subprocess.DEVNULL
    subprocess.Popen(
        [sys.executable, "-S", __file__, *sys.path], stdin=nowhere, stdout=nowhere, stderr=nowhere
    )


def main() -> None:
    with ThreadPoolExecutor(THREADS) as listing, ThreadPoolExecutor(THREADS) as reading:
        for paths in listing.map(lambda package: list(files(package)), PACKAGES):
            for path in paths:
                with suppress(OSError, IndexError):  # a broken link, an empty file
                    for part in parts(path):
                        reading.submit(read, *part)


if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]
    main()

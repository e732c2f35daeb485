"""FlashAttention 4's compiled kernels on disk, and processes that compile some beside other work.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CACHE = Path("~/.cache/flash_attention_4")  # compiled kernels, which take 14 s to compile
COMPILER = "fp8_suite.te_models.kernels.flash_attention"
# The compiler must not open the GPU, whose memory the run needs, so it does not see the architecture.
ON_CPU = {"FLASH_ATTENTION_ARCH": "sm_90a", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
COMPILE_SECONDS = 60.0  # the longest wait for a compiler

_compilers: list[subprocess.Popen] = []


def compiled() -> bool:
    """True if compiled kernels are cached, of this or another model."""
    return any(folder().rglob("*.o"))  # an import makes folders


def folder() -> Path:
    return Path(os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", CACHE)).expanduser()


def cache_on_disk() -> None:
    """Cache compiled kernels on disk; call before the import, also before that of Transformer Engine."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder()))


def start_compiler(heads: int, groups: int, head_size: int, packed: bool, deterministic: bool) -> None:
    """Start a process that runs `flash_attention.compile_for_te` with these arguments for Hopper GPUs."""
    environment = os.environ | ON_CPU | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = json.dumps([heads, groups, head_size, packed, deterministic])
    command, nowhere = [sys.executable, "-m", COMPILER, arguments], subprocess.DEVNULL
    _compilers.append(
        subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    )


def wait_for_compilers() -> None:
    """Wait for the compilers that were started. FlashAttention compiles later what they did not."""
    for process in _compilers:
        with suppress(subprocess.TimeoutExpired):
            process.wait(COMPILE_SECONDS)

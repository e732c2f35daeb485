"""FlashAttention 4's compiled kernels on disk, and processes that compile some beside other work.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fp8_suite.core.packages import version

PACKAGE = "flash-attn-4"
COMPILED_BY = (PACKAGE, "nvidia-cutlass-dsl", "apache-tvm-ffi")  # other versions compile anew
CACHE = Path("~/.cache/flash_attention_4")  # compiled kernels, which take 14 s to compile
COMPILER = "fp8_suite.te_models.kernels.flash_attention"
# The compiler must not open the GPU, whose memory the run needs, so it does not see the architecture.
ON_CPU = {"FLASH_ATTENTION_ARCH": "sm_90a", "CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""}
COMPILE_SECONDS = 60.0  # the longest wait for a compiler

_compilers: list[subprocess.Popen] = []


class Variant(NamedTuple):
    """Kernels that are compiled together, as arguments of `flash_attention.compile_ahead`."""

    heads: int
    groups: int
    head_size: int
    packed: bool
    deterministic: bool
    trained: bool  # forward with log-sum-exp, and backward; otherwise forward without gradients

    def record(self) -> Path:
        """Return the empty file that exists once these kernels are compiled by the installed versions."""
        return folder() / "-".join(map(str, ("compiled", *map(version, COMPILED_BY), *self)))


def variants(
    heads: tuple[int, int, int], *, native: bool, packed: bool, deterministic: bool
) -> list[Variant]:
    """Return the kernels of a run with TE's layers, or with Hugging Face's, by query heads, groups and size.

    Packed runs of TE's layers also have unpacked batches. Hugging Face's layers always pack, and compute the
    log-sum-exp without gradients too.
    """
    forms = dict.fromkeys((packed, False)) if native else (True,)
    passes = (True, False) if native else (True,)
    return [Variant(*heads, form, deterministic, trained) for form in forms for trained in passes]


def folder() -> Path:
    return Path(os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", CACHE)).expanduser()


def cache_on_disk() -> None:
    """Cache compiled kernels on disk; call before the import, also before that of Transformer Engine.

    A kernel that is not cached yet, such as context parallelism's, compiles without its compiler's warnings.
    """
    warnings.filterwarnings("ignore", message=".*cannot be converted to a JitArgument")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder()))


def start_compiler(variant: Variant) -> None:
    """Start a process that compiles these kernels for Hopper GPUs."""
    environment = os.environ | ON_CPU | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, nowhere = [sys.executable, "-m", COMPILER, json.dumps(variant)], subprocess.DEVNULL
    _compilers.append(
        subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    )


def wait_for_compilers() -> None:
    """Wait for the compilers that were started. FlashAttention compiles later what they did not."""
    for process in _compilers:
        with suppress(subprocess.TimeoutExpired):
            process.wait(COMPILE_SECONDS)

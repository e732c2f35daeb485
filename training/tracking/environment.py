"""Machine, software and command of a run, for env.json."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fp8_suite.core.packages import ROOT, versions
from fp8_suite.core.redact import redact

# Prefixes of environment variables that affect numerics, speed or memory.
VARIABLES = ("CUBLAS", "CUDA_", "CUDNN_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")


def describe_environment() -> dict[str, Any]:
    """Return machine, software and command; None for missing hardware."""
    import torch

    gpus = torch.cuda.device_count()
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(map(redact, sys.argv)),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "variables": {n: redact(v) for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES)},
        "gpu_name": torch.cuda.get_device_name(0) if gpus else None,
        "gpu_count": gpus,
        "driver": driver.split("\n")[0] if driver else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions(),
        "git": git_state(ROOT),
    }


def git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it (dirty). None if `root` is no checkout."""
    # Naming the folders ignores a repository that contains `root`.
    git = ("git", f"--git-dir={root / '.git'}", f"--work-tree={root}")
    if commit := _output(*git, "rev-parse", "HEAD"):
        dirty = _output(*git, "status", "--porcelain", "--untracked-files=no") != ""
        return {"commit": commit, "dirty": dirty}
    return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

"""Facts for env.json about the machine, the software and the command of a run."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from core.packages import ROOT, versions
from core.redact import redact

# Prefixes of environment variables that affect numerics, speed or memory.
VARIABLES = ("CUBLAS", "CUDA_", "CUDNN_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "TORCH_", "TRITON_")


def describe_environment() -> dict[str, Any]:
    """Return the facts that are known before a run; memory in GB (1e9 bytes), None for missing hardware."""
    import torch

    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(redact(argument) for argument in sys.argv),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "variables": {n: redact(v) for n, v in sorted(os.environ.items()) if n.startswith(VARIABLES)},
        "gpu_name": gpus[0].name if gpus else None,
        "gpu_count": len(gpus),
        "gpus": [{"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
        "driver": (driver or "").split("\n")[0] or None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "versions": versions(),
        "git": git_state(ROOT),
    }


def git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit and if tracked files differ from it (dirty); None if `root` is no checkout."""
    git = ("git", "-C", str(root))
    top, commit = _output(*git, "rev-parse", "--show-toplevel"), _output(*git, "rev-parse", "HEAD")
    # Inside another repository the commit would be that one's.
    if not top or not commit or Path(top).resolve() != root:
        return None
    return {"commit": commit, "dirty": _output(*git, "status", "--porcelain", "--untracked-files=no") != ""}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

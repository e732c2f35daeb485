"""Which cuDNN torch has loaded, and which one Transformer Engine would load beside it.

Nothing here loads a library: a second cuDNN in the process is the very fault that is looked for.
"""

from __future__ import annotations

import glob
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

MAPS = Path("/proc/self/maps")
# Where TE 2.20 looks before the loader's own paths, in this order (transformer_engine/common/__init__.py).
SEARCHED = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
TOOLKIT = "/usr/local/cuda"


def loaded() -> list[Path]:
    """Folders of the cuDNN libraries in this process; more than one is a mix."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    paths = [Path(line.split(maxsplit=5)[5]) for line in lines if "/libcudnn" in line]
    return list(dict.fromkeys(path.parent.resolve() for path in paths if path.name.startswith("libcudnn")))


def of_torch() -> Path | None:
    """The folder of torch's cuDNN: the one in memory, else the one pip installed; None for a CPU build."""
    import torch

    if torch.version.cuda is None:
        return None
    if folders := loaded():
        return folders[0]
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    for location in spec.submodule_search_locations or [] if spec else []:
        if (Path(location) / "lib").is_dir():
            return (Path(location) / "lib").resolve()
    return None


def of_te() -> tuple[Path, str] | None:
    """The folder TE would load cuDNN from, and what leads there; None: pip's, which TE tries last."""
    places = [(name, os.environ[name]) for name in SEARCHED if name in os.environ]
    for name, place in [*places, (TOOLKIT, TOOLKIT)]:
        found = [path for path in glob.glob(f"{place}/**/libcudnn.so*", recursive=True) if "stub" not in path]
        if found:
            return Path(max(found, key=os.path.basename)).resolve().parent, name
    return _on_loader_path()


def _on_loader_path() -> tuple[Path, str] | None:
    """TE asks the loader for `libcudnn.so`, without a version, which only development packages bring."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder and (path := Path(folder) / "libcudnn.so").exists():
            return path.resolve().parent, "LD_LIBRARY_PATH"
    for line in loader_cache().splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.split(" ")[0] == "libcudnn.so" and path:
            return Path(path).resolve().parent, "ldconfig"
    return None


def loader_cache() -> str:
    """What `ldconfig -p` prints; empty where there is none."""
    for command in ("ldconfig", "/sbin/ldconfig"):  # a user's PATH often lacks /sbin
        try:
            return subprocess.run([command, "-p"], capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.SubprocessError):
            continue
    return ""

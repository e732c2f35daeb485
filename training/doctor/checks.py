"""What the doctor asks of the machine and of Python's packages; nothing here needs torch.

A check yields findings and may raise: the doctor turns that into a finding too.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from core.errors import first_line
from core.machine import cores as machine_cores
from core.machine import host_memory
from core.packages import version

ROOT = Path(__file__).resolve().parents[2]
BYTES_PER_PARAMETER = 12  # of a checkpoint: 4 for the FP32 weight, 8 for two moments


@dataclass(frozen=True)
class Finding:
    """One line of the report. A fault breaks training or slows it for good; `cure` is a shell command."""

    status: Literal["ok", "note", "warn", "fault"]
    text: str
    cure: str | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    name: str
    module: str
    purpose: str
    required: bool = False
    minimum: str = "0"


PACKAGES = (
    Package("transformers", "transformers", "models and tokenizers", required=True, minimum="5.0"),
    Package("datasets", "datasets", "training data", required=True),
    Package("safetensors", "safetensors", "weights and checkpoints", required=True),
    Package("numpy", "numpy", "data", required=True),
    Package("pyyaml", "yaml", "--config", required=True),
    Package("tqdm", "tqdm", "the progress display", required=True),
    Package("torchao", "torchao", "--mixed_precision fp8 without --use_te"),
    Package("deepspeed", "deepspeed", "--sharding_mode deepspeed and ds_*"),
    Package("nvdlfw-inspect", "nvdlfw_inspect", "--fp8_stats_interval with native TE layers"),
    Package("wandb", "wandb", "--use_wandb"),
    Package("tensorboard", "tensorboard", "--log_dir"),
    Package("matplotlib", "matplotlib", "benchmarks.report and its curves"),
)
TORCH = Package("torch", "torch", "everything", required=True, minimum="2.11")


def tool(*command: str) -> tuple[int | None, str]:
    """Exit status and all output of a program; (None, "") where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return done.returncode, (done.stdout + done.stderr).strip()


def older(found: str, minimum: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2]]

    return numbers(found) < numbers(minimum)


def python() -> str:
    """This interpreter as a shell word, short where it lies below the current folder."""
    path = Path(sys.executable)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(short))


def pip(command: str) -> str:
    """`pip ...` commands, joined by &&, for this interpreter: a bare pip may be another environment's."""
    return re.sub(r"(^|&& )pip ", rf"\1{python()} -m pip ", command)


def pinned(name: str) -> str:
    """The package as the requirements files pin it for this Python, else its bare name."""
    for file in ("requirements.txt", "requirements-gpu.txt"):
        path = ROOT / file
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            requirement, _, marker = line.split("#")[0].partition(";")
            if requirement.strip().lower().startswith(f"{name}==") and _applies(marker):
                return requirement.strip()
    return name


def _applies(marker: str) -> bool:
    match = re.search(r'python_version (>=|<) "(\d+)\.(\d+)"', marker)
    if not match:
        return True
    at_least = sys.version_info[:2] >= (int(match[2]), int(match[3]))
    return at_least == (match[1] == ">=")


def machine() -> Iterator[Finding]:
    cores = len(machine_cores())
    total, available = memory()
    disk = shutil.disk_usage(".").free
    yield Finding(
        "ok",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} CPU cores, "
        f"{available / 1e9:.1f} of {total / 1e9:.1f} GB RAM free",
        data={"python": platform.python_version(), "cores": cores, "ram": total, "ram_free": available},
    )
    yield Finding(
        "ok" if disk >= 10e9 else "warn",
        f"{disk / 1e9:.1f} GB free in {Path.cwd()}: one checkpoint of {disk / BYTES_PER_PARAMETER / 1e9:.1f} "
        "B parameters",
        data={"disk_free": disk},
    )


def memory() -> tuple[int, int]:
    """(all, available) bytes of RAM."""
    total, free = host_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:  # what the kernel would give back counts as available
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return total, min(total, int(match[1]) * 1024 if match else free)


def packages() -> Iterator[Finding]:
    fine = {}
    for package in PACKAGES:
        found = version(package.name)
        if problem := wrong_with(package, found):
            yield problem
        else:
            fine[package.name] = found
    if fine:
        text = ", ".join(f"{name} {found}" for name, found in fine.items())
        yield Finding("ok", text, data={"versions": fine})


def wrong_with(package: Package, found: str | None) -> Finding | None:
    """A fault of a required package, a note of an optional one; required ones are imported too."""
    status = "fault" if package.required else "note"
    install = pip(f"pip install {shlex.quote(pinned(package.name))}")
    if found is None or find_spec(package.module) is None:
        where = "" if package.required else f": {install}"
        return Finding(status, f"{package.name} is missing, for {package.purpose}{where}", install)
    if older(found, package.minimum):
        text = f"{package.name} {found} is too old, {package.minimum} or newer is needed"
        return Finding(status, text, install)
    if not package.required:
        return None
    try:
        importlib.import_module(package.module)
    except Exception as error:
        again = install.replace("pip install", "pip install --force-reinstall", 1)
        return Finding("fault", f"{package.name} {found} does not load: {first_line(error)}", again)
    return None

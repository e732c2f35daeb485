"""Checks of the machine, Python packages, torch and the GPUs."""

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
from typing import Any, Literal

from fp8_suite.core.errors import first_line
from fp8_suite.core.machine import cores, host_memory
from fp8_suite.core.packages import version
from fp8_suite.core.start import MODULES, REQUIRED

MINIMUM = {"torch": (2, 11), "transformers": (5, 0)}
OPTIONAL = ("torchao", "deepspeed", "wandb", "tensorboard", "matplotlib")
UPDATE_DRIVER = "sudo apt-get install -y nvidia-driver-580-server-open && sudo reboot"  # Ubuntu, Debian
REINSTALL_TORCH = "pip uninstall -y torch && pip install -r requirements.txt"  # pip keeps a CPU build
# Message of torch or nvidia-smi -> the command that fixes it. CUDA 12 needs a driver of branch 525, CUDA 13
# of 580: docs.nvidia.com/deploy/cuda-compatibility.
DRIVER_ERRORS = {
    "library version mismatch|Error 803|unsupported display driver": "sudo reboot",  # an update is half done
    "driver on your system is too old|Error 804|forward compatibility": UPDATE_DRIVER,
    "Error 802|not yet initialized": "sudo systemctl restart nvidia-fabricmanager",
    "Error 999|unknown error": "sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm",
    "communicate with the NVIDIA driver": "sudo modprobe nvidia nvidia_uvm",
    "no kernel image": REINSTALL_TORCH,
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. A fault breaks or severely slows training."""

    status: Literal["ok", "note", "warn", "fault"]
    text: str
    cure: str | None = None  # shell command that fixes it
    install: str | None = None  # shell command that installs what is missing
    data: dict[str, Any] = field(default_factory=dict)


def this_pip(command: str) -> str:
    """Make a command use this interpreter's pip: a bare pip may be another environment's."""
    return re.sub(r"(^|&& )pip ", rf"\1{shlex.quote(sys.executable)} -m pip ", command)


def output(*command: str) -> str | None:
    """Return the output of a program, or None if there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout + done.stderr).strip()


def check_machine() -> Iterator[Finding]:
    """Report Python, CPU cores, memory and disk."""
    free = shutil.disk_usage(".").free
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
    text += f"{len(cores())} CPU cores, {host_memory() / 1e9:.0f} GB RAM, {free / 1e9:.0f} GB free on disk"
    yield Finding("ok" if free >= 10e9 else "warn", text)


def check_packages() -> Iterator[Finding]:
    """Report the versions of packages, and those that are missing, too old or broken."""
    versions = {name: version(name) for name in (*REQUIRED, *OPTIONAL)}
    command, problems = "pip install -r requirements.txt", []
    for name in REQUIRED:
        found = versions[name]
        if found is None:
            problems.append(f"{name} is missing")
        elif tuple(map(int, re.findall(r"\d+", found)[:2])) < MINIMUM.get(name, (0, 0)):
            problems.append(f"{name} {found} is older than {'.'.join(map(str, MINIMUM[name]))}")
        else:
            try:
                importlib.import_module(MODULES.get(name, name))
            except Exception as error:
                problems.append(f"{name} {found} does not load ({first_line(error)})")
                command = "pip install --force-reinstall -r requirements.txt"
    if problems:
        yield Finding("fault", "; ".join(problems), install=this_pip(command))
    text = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    yield Finding("ok", text, data={"versions": versions})
    if missing := [name for name in OPTIONAL if not versions[name]]:
        # requirements.txt has them, too.
        command = None if problems else this_pip(f"pip install {' '.join(missing)}")
        yield Finding("note", f"missing, optional: {', '.join(missing)}", install=command)


def nvcc_cuda() -> str:
    """Return the CUDA version of nvcc, which compiles Transformer Engine's extension, or "none"."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = output(f"{home}/bin/nvcc", "--version") or output("nvcc", "--version") or ""
    match = re.search(r"release (\d+\.\d+)", found)
    return match[1] if match else "none"


def check_gpus() -> Iterator[Finding]:
    """Report the GPUs that torch sees and can compute on, or why it sees none."""
    import torch

    smi, cuda = output("nvidia-smi"), torch.version.cuda
    if not torch.cuda.is_available():
        yield _no_gpu(torch, smi)
        return
    driver = re.search(r"Driver Version: (\S+).*CUDA Version: (\S+)", smi or "")
    driver = f"driver {driver[1]} for CUDA {driver[2]}" if driver else "driver unknown to nvidia-smi"
    yield Finding("ok", f"torch for CUDA {cuda}, {driver}, nvcc {nvcc_cuda()}")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        try:
            free, total = torch.cuda.mem_get_info(i)
            torch.ones(8, device=f"cuda:{i}").add_(1).sum().item()
        except (RuntimeError, AssertionError) as error:
            message = first_line(error)
            yield Finding("fault", f"{i}: {gpu.name} cannot be used: {message}", driver_cure(message))
            continue
        text = f"{i}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
        if (gpu.major, gpu.minor) < (8, 9):
            text += "without FP8 tensor cores (8.9 has them), "
        text += f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        if total - free > 4e9:
            yield Finding("warn", f"{text}; other processes hold the rest", "nvidia-smi")
        else:
            yield Finding("ok", text)


def _no_gpu(torch: Any, smi: str | None) -> Finding:
    """Find out why torch sees no GPU: there is no driver, it is hidden, or something is broken."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if smi is None:
        text = "no NVIDIA driver: TE layers and FP8 are emulated here, right losses at a meaningless speed"
        return Finding("ok", text)
    if "Driver Version" not in smi:
        return Finding("fault", f"nvidia-smi fails: {smi}", driver_cure(smi))
    if torch.version.cuda is None:
        text = "there is a GPU, but torch is a build without CUDA"
        return Finding("fault", text, this_pip(REINSTALL_TORCH))
    if hidden is not None and not re.search(r"\d", hidden.replace("-1", "")):
        return Finding("note", f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs; unset it to use them")
    try:
        torch.cuda.init()
        message = "torch gives no reason"
    except Exception as error:
        message = first_line(error)
    return Finding("fault", f"torch cannot use the GPU: {message}", driver_cure(message))


def driver_cure(message: str) -> str:
    """Return the command that fixes an error of torch or nvidia-smi, or shows more details."""
    commands = (command for pattern, command in DRIVER_ERRORS.items() if re.search(pattern, message))
    return this_pip(next(commands, "nvidia-smi -q"))

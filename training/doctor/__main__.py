"""Print on one screen what this machine can train, what is broken, and the commands that fix it.

python -m training.doctor

Exit code 0: healthy, also without a GPU (TE layers and FP8 are emulated there); 1: something is broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from fp8_suite.core.errors import UserError, first_line
from fp8_suite.core.machine import cores, host_memory
from fp8_suite.core.packages import REQUIRED, hide_interrupts, version

if TYPE_CHECKING:
    from fp8_suite.te_models.backend import Backend

MINIMUM = {"torch": (2, 11), "transformers": (5, 0)}
OPTIONAL = ("torchao", "deepspeed", "wandb", "tensorboard", "matplotlib")
PIP = f"{sys.executable} -m pip"  # a bare pip may be another environment's
INSTALL = f"{PIP} install -r requirements.txt"
REINSTALL_TORCH = f"{PIP} uninstall -y torch && {INSTALL}"  # pip keeps a CPU build
# TE's parts: pip keeps the old ones, and one of another CUDA than torch's is an error. Its extension is
# compiled for the installed torch, so not taken from the cache.
TE_PARTS = "transformer_engine transformer_engine_torch transformer_engine_cu12 transformer_engine_cu13"
INSTALL_TE = (
    f"{PIP} uninstall -y {TE_PARTS} && {PIP} install setuptools wheel ninja && "
    f"{PIP} install --no-build-isolation -r requirements-gpu.txt --no-cache-dir"
)
UPDATE_DRIVER = "sudo apt-get install -y nvidia-driver-580-server-open && sudo reboot"  # Ubuntu, Debian
# Message of torch or nvidia-smi -> the command that fixes it. CUDA 12 needs a driver of branch 525, CUDA 13
# of 580: docs.nvidia.com/deploy/cuda-compatibility.
DRIVER_ERRORS = {
    "library version mismatch|Error 803|unsupported display driver": "sudo reboot",  # an update is half done
    "driver on your system is too old|Error 804|forward compatibility": UPDATE_DRIVER,
    "Error 802|not yet initialized": "sudo systemctl restart nvidia-fabricmanager",
    "communicate with the NVIDIA driver": "sudo modprobe nvidia nvidia_uvm",
}
WIDTH = 128  # tokens and features of the layer trained in every recipe


@dataclass(frozen=True)
class Finding:
    """One line of the report. A fault breaks or severely slows training."""

    status: Literal["ok", "note", "fault"]
    text: str
    cure: str | None = None  # shell command that fixes it


def nvidia_smi() -> str | None:
    """Return the output of nvidia-smi, or the reason why it has none; None if there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run("nvidia-smi", capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:  # a driver that hangs, for example
        return str(error)
    return (done.stdout + done.stderr).strip()


def check_machine() -> Iterator[Finding]:
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
    text += f"{len(cores())} CPU cores, {host_memory() / 1e9:.0f} GB RAM, "
    yield Finding("ok", text + f"{shutil.disk_usage('.').free / 1e9:.0f} GB free on disk")


def check_packages() -> Iterator[Finding]:
    """Report the versions of packages, and those that are missing or too old."""
    versions = {name: version(name) for name in (*REQUIRED, *OPTIONAL)}
    problems = [f"{name} is missing" for name in REQUIRED if not versions[name]]
    for name, minimum in MINIMUM.items():
        if versions[name] and tuple(map(int, re.findall(r"\d+", versions[name])[:2])) < minimum:
            problems.append(f"{name} {versions[name]} is older than {'.'.join(map(str, minimum))}")
    if problems:
        yield Finding("fault", "; ".join(problems), INSTALL)
    text = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    yield Finding("ok", text)
    if missing := [name for name in OPTIONAL if not versions[name]]:
        yield Finding("note", f"missing, optional: {', '.join(missing)}", INSTALL)


def check_gpus() -> Iterator[Finding]:
    """Report the GPUs that torch sees and can compute on, or why it sees none."""
    import torch

    smi = nvidia_smi()
    if not torch.cuda.is_available():
        yield _no_gpu(torch, smi)
        return
    driver = re.search(r"Driver Version: (\S+)", smi or "")
    yield Finding("ok", f"torch for CUDA {torch.version.cuda}, driver {driver and driver[1]}")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        text = f"{i}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, "
        text += "" if (gpu.major, gpu.minor) >= (8, 9) else "without FP8 tensor cores (8.9 has them), "
        text += "" if gpu.major >= 8 else "without BF16 (use --mixed_precision fp16), "
        try:
            free, total = torch.cuda.mem_get_info(i)
            torch.ones(8, device=f"cuda:{i}").add_(1).sum().item()
        except (RuntimeError, AssertionError) as error:
            message = first_line(error)
            yield Finding("fault", f"{text}cannot be used: {message}", driver_cure(message))
        else:
            yield Finding("ok", f"{text}{free / 1e9:.1f} of {total / 1e9:.1f} GB free")


def _no_gpu(torch: Any, smi: str | None) -> Finding:
    """Name the reason why torch sees no GPU: no driver, hidden, or something is broken."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if smi is None:
        text = "no NVIDIA driver: TE layers and FP8 are emulated here, right losses at a meaningless speed"
        return Finding("ok", text)
    if "Driver Version" not in smi:
        return Finding("fault", f"nvidia-smi fails: {smi}", driver_cure(smi))
    if torch.version.cuda is None:
        return Finding("fault", "there is a GPU, but torch is a build without CUDA", REINSTALL_TORCH)
    if visible is not None and not re.search(r"\d", visible.replace("-1", "")):
        return Finding("note", f"CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs; unset it to use them")
    try:
        torch.cuda.init()
        message = "torch gives no reason"
    except Exception as error:
        message = first_line(error)
    return Finding("fault", f"torch cannot use the GPU: {message}", driver_cure(message))


def driver_cure(message: str) -> str:
    """Return the command that fixes an error of torch or nvidia-smi, or shows more details."""
    commands = (command for pattern, command in DRIVER_ERRORS.items() if re.search(pattern, message))
    return next(commands, "nvidia-smi -q")


def check_te() -> Iterator[Finding]:
    """Report whether Transformer Engine loads, and the cuDNN in use."""
    import torch
    from fp8_suite.training.precision import te_runtime

    number, gpu = version("transformer_engine"), torch.cuda.is_available()
    if te_runtime.why_not_te() is None:
        yield Finding("ok", f"Transformer Engine {number} loads")
    elif not gpu:
        yield Finding("ok", f"Transformer Engine {number or 'is not installed'}: TE layers run emulated")
    elif number is None:
        yield Finding("note", "Transformer Engine is not installed; --use_te needs it", INSTALL_TE)
    else:
        reason = first_line(te_runtime.load_error())
        yield Finding("fault", f"Transformer Engine {number} does not load: {reason}", INSTALL_TE)
    folder, loaded = te_runtime.torch_cudnn(), [str(path) for path in te_runtime.loaded_cudnns()]
    if len(loaded) > 1:
        text = f"two cuDNNs are mixed, {' and '.join(loaded)}: attention may run unfused, 4x slower"
        yield Finding("fault", text, f"export CUDNN_HOME={folder}")
    elif gpu:
        yield Finding("ok", f"cuDNN {torch.backends.cudnn.version()} of torch, in {folder}")


def check_recipes() -> Iterator[Finding]:
    """Train a layer in every recipe of Transformer Engine, native or else emulated; look for torchao's."""
    from fp8_suite.core.recipes import RECIPES, TORCHAO_RECIPES
    from fp8_suite.training.precision import recipes, te_runtime, torchao_fp8

    te_backend = "emulated" if te_runtime.why_not_te() else "native"
    for name in RECIPES:
        backend = "without --use_te" if name in TORCHAO_RECIPES else te_backend
        status, text = "ok", "runs"
        try:
            if name in TORCHAO_RECIPES:
                torchao_fp8.require_torchao()
                recipes.fp8_gemms_are_emulated()  # UserError for a GPU without FP8
            elif reason := recipes.why_not(name, te_backend):
                status, text = "note", reason
            else:
                train_layer(name, te_backend)
        except UserError as error:
            status, text = "note", first_line(error)
        except Exception as error:
            status, text = "fault", f"{type(error).__name__}: {first_line(error)}"
        yield Finding(status, f"{name:<18} {backend}: {text}")


def train_layer(recipe: str, backend: Backend) -> None:
    """Run forward and backward of one TE layer."""
    import torch
    from fp8_suite.te_models.backend import te_module
    from fp8_suite.training.precision.recipes import make_recipe
    from fp8_suite.training.precision.settings import PrecisionConfig

    te, device = te_module(backend), "cuda" if torch.cuda.is_available() else "cpu"
    layer = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device)
    with te.autocast(enabled=True, recipe=make_recipe(recipe, PrecisionConfig(), backend)):
        y = layer(torch.ones(WIDTH, WIDTH, device=device, dtype=torch.bfloat16))
    y.sum().backward()


CHECKS = (check_machine, check_packages, check_gpus, check_te, check_recipes)  # the last three import torch


def main(argv: list[str] | None = None) -> int:
    """Run the checks, print their findings as they come, and return the exit code."""
    hide_interrupts()
    faulthandler.enable()  # a library that crashes is named
    summary = (__doc__ or "").split("\n")[0]
    argparse.ArgumentParser(prog="python -m training.doctor", description=summary).parse_args(argv)
    findings: list[Finding] = []
    for check in CHECKS if find_spec("torch") else CHECKS[:2]:
        for finding in check():
            findings.append(finding)
            label = finding.status.upper() if finding.status == "fault" else finding.status
            print(f"{label:<6}{check.__name__.removeprefix('check_'):<9}{finding.text}", flush=True)
    faults = sum(finding.status == "fault" for finding in findings)
    print(f"{faults} broken" if faults else "healthy: nothing is broken")
    for word, status in (("to fix", "fault"), ("to install what is missing", "note")):
        cures = (finding.cure for finding in findings if finding.cure and finding.status == status)
        for command in dict.fromkeys(cures):
            print(f"{word}: {command}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

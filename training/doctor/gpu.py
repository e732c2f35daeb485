"""What the doctor asks of torch, the driver and the GPUs."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shlex
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import first_line
from core.packages import version
from training.doctor.checks import TORCH, Finding, pinned, pip, tool, wrong_with

UPDATE_DRIVER = "sudo apt-get install -y nvidia-driver-580-server-open && sudo reboot"  # Ubuntu, Debian
LOAD_DRIVER = "sudo modprobe nvidia nvidia_uvm"
PCI = Path("/sys/bus/pci/devices")
CONTROL = Path("/dev/nvidiactl")  # in a container only if that was given GPUs


class Cause(NamedTuple):
    """A message of torch or nvidia-smi, what it means, and the command that cures it."""

    pattern: str
    meaning: str
    cure: str


# CUDA 12 needs a driver of branch 525, CUDA 13 of 580: docs.nvidia.com/deploy/cuda-compatibility.
FABRIC = "sudo systemctl restart nvidia-fabricmanager"
RELOAD = "sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm"
CAUSES = (
    Cause("library version mismatch", "the driver was updated, its old module still runs", "sudo reboot"),
    Cause("driver on your system is too old", "the driver is too old for torch's CUDA", UPDATE_DRIVER),
    Cause("Error 802|not yet initialized", "NVLink's fabric manager is not running", FABRIC),
    Cause("Error 803|unsupported display driver", "libcuda is not of the driver's version", "sudo reboot"),
    Cause("Error 804|forward compatibility", "a libcuda newer than the driver is found first", UPDATE_DRIVER),
    Cause("Error 999|unknown error", "the driver's module hangs", RELOAD),
    Cause("communicate with the NVIDIA driver|no NVIDIA driver", "the driver is not loaded", LOAD_DRIVER),
    Cause("no kernel image", "this torch has no kernels for this GPU", ""),
)


def install_torch() -> str:
    """pip takes a CPU build as fulfilling the pin, so that goes first."""
    return pip(f"pip uninstall -y torch && pip install {shlex.quote(pinned('torch'))}")


def smi(*fields: str) -> list[dict[str, str]]:
    """One row per GPU from nvidia-smi; none where it fails or does not know a field."""
    status, text = tool("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if status != 0:
        return []
    return [dict(zip(fields, line.split(", "), strict=False)) for line in text.splitlines()]


def torch_itself() -> Iterator[Finding]:
    """Its version and CUDA; a fault where it does not load."""
    found = version("torch")
    if problem := wrong_with(TORCH, found):
        cure = problem.cure
        if "does not load" in problem.text and os.environ.get("LD_LIBRARY_PATH"):
            cure = "unset LD_LIBRARY_PATH"  # another CUDA's libraries go before torch's own
        yield Finding("fault", problem.text, cure)
    if load_error():
        return
    torch = importlib.import_module("torch")
    cuda, driver, nvcc = torch.version.cuda, driver_cuda(), nvcc_cuda()
    parts = [f"torch {found}", f"CUDA {cuda}" if cuda else "a build without CUDA"]
    if cuda:
        parts += [f"driver for CUDA {driver or '(none)'}", f"nvcc {nvcc or 'none'}"]
        if torch.distributed.is_nccl_available():
            parts.append("NCCL " + ".".join(map(str, importlib.import_module("torch.cuda.nccl").version())))
    yield Finding("ok", ", ".join(parts), data={"torch": found, "cuda": cuda, "driver_cuda": driver})


def load_error() -> str | None:
    """Why torch does not load, or None."""
    try:
        importlib.import_module("torch")
    except Exception as error:
        return first_line(error)
    return None


def driver_cuda() -> str | None:
    """The newest CUDA that the driver runs."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def nvcc_cuda() -> str | None:
    """CUDA of the compiler that would build Transformer Engine's extension."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for nvcc in [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]:
        if match := re.search(r"release (\d+\.\d+)", tool(nvcc, "--version")[1]):
            return match[1]
    return None


def gpus() -> Iterator[Finding]:
    """The GPUs that torch sees, or why it sees none."""
    import torch

    if not torch.cuda.is_available():
        yield no_gpu(torch)
        return
    before = {row["uuid"]: row for row in smi("uuid", "driver_version", "memory.used")}  # before we take any
    for i in range(torch.cuda.device_count()):
        yield from one_gpu(torch, i, before)


def one_gpu(torch: Any, i: int, before: dict[str, dict[str, str]]) -> Iterator[Finding]:
    gpu = torch.cuda.get_device_properties(i)
    row = before.get(f"GPU-{getattr(gpu, 'uuid', '')}", {})
    used = row.get("memory.used", "")
    used_bytes = int(used) * 2**20 if used.isdigit() else 0
    try:
        torch.ones(8, device=f"cuda:{i}").add_(1).sum().item()
        free, total = torch.cuda.mem_get_info(i)
    except (RuntimeError, AssertionError) as error:
        cause = explain(first_line(error))
        yield Finding(
            "fault", f"{i}: {gpu.name} cannot be used: {cause.meaning}", cause.cure or install_torch()
        )
        return
    driver = f", driver {row['driver_version']}" if row else ""
    yield Finding(
        "ok",
        f"{i}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {free / 1e9:.1f} of "
        f"{total / 1e9:.1f} GB free{driver}",
        data={"name": gpu.name, "capability": [gpu.major, gpu.minor], "memory": total, "free": free},
    )
    if (gpu.major, gpu.minor) < (8, 9):
        yield Finding("note", f"{i}: no FP8 tensor cores (compute capability 8.9 has them): BF16 only")
    if used_bytes > 2e9:
        text = f"{i}: other processes hold {used_bytes / 1e9:.1f} GB of it, and slow what is timed here"
        yield Finding("warn", text, "nvidia-smi", {"used_by_others": used_bytes})


def no_gpu(torch: Any) -> Finding:
    """Why torch sees no GPU: there is none, it is hidden on purpose, or something is broken."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    status, text = tool("nvidia-smi", "-L")
    driver = (status == 0 and "GPU " in text) or CONTROL.exists()
    name = text.splitlines()[0] if status == 0 and text else "an NVIDIA GPU"
    if driver and torch.version.cuda is None:
        return Finding("fault", f"{name}: torch is a build without CUDA", install_torch())
    if driver and hidden is not None and not re.search(r"\d", hidden.replace("-1", "")):
        return Finding(
            "note", f"CUDA_VISIBLE_DEVICES={hidden!r} hides the GPUs; to see them: unset CUDA_VISIBLE_DEVICES"
        )
    if driver:
        return unusable(torch, name)
    if status:  # nvidia-smi is there and fails
        cause = explain(text)
        return Finding("fault", f"nvidia-smi fails: {cause.meaning}", cause.cure or LOAD_DRIVER)
    if on_pci_bus():
        text = "an NVIDIA GPU is on the PCI bus, and no driver is here"
        if in_container():
            return Finding("note", f"{text}: start the container with --gpus all to use it")
        return Finding("fault", text, UPDATE_DRIVER)
    return Finding(
        "ok",
        "none. TE layers run emulated here and FP8 is emulated: right losses, meaningless speed",
        data={"gpus": 0},
    )


def unusable(torch: Any, name: str) -> Finding:
    try:
        torch.cuda.init()
    except Exception as error:
        cause = explain(first_line(error))
        return Finding("fault", f"{name} cannot be used: {cause.meaning}", cause.cure or "nvidia-smi -q")
    return Finding("fault", f"{name} cannot be used, torch does not say why", "nvidia-smi -q")


def explain(message: str) -> Cause:
    for cause in CAUSES:
        if re.search(cause.pattern, message):
            return cause._replace(meaning=f"{cause.meaning} ({message})")
    return Cause("", message, "")


def on_pci_bus() -> bool:
    """Whether the kernel sees an NVIDIA display or 3D controller."""
    for device in PCI.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def in_container() -> bool:
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def links() -> Iterator[Finding]:
    """How several GPUs reach each other."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = list(permutations(range(count), 2))
    peers = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
    nvlink = sorted(set(re.findall(r"\bNV\d+\b", tool("nvidia-smi", "topo", "-m")[1])))
    how = f"NVLink ({', '.join(nvlink)})" if nvlink else "no NVLink"
    text = f"{count} GPUs, {how}, peer access in {peers} of {len(pairs)} pairs"
    slow = "" if peers == len(pairs) else ": the others go through host memory, slow for fsdp and ds_* modes"
    yield Finding("warn" if slow else "ok", text + slow, data={"nvlink": nvlink, "peers": peers})

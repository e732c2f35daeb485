"""What an import error of Transformer Engine means, and the command that cures it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

from core.packages import version
from training.doctor.checks import pip
from training.doctor.gpu import nvcc_cuda
from training.precision import te_runtime

CORES = ("transformer_engine_cu12", "transformer_engine_cu13")
# pip's names of CUDA's libraries; CUDA 12's end in -cu12.
LIBRARIES = {
    "cublas": "nvidia-cublas",
    "cublasLt": "nvidia-cublas",
    "cudart": "nvidia-cuda-runtime",
    "curand": "nvidia-curand",
    "cusolver": "nvidia-cusolver",
    "cusolverMp": "nvidia-cusolvermp",
    "nvrtc": "nvidia-cuda-nvrtc",
}
# Their number is CUDA's own; another one's was built for another CUDA.
NUMBERED_AS_CUDA = ("cublas", "cublasLt", "cudart", "nvrtc")
BUILD_TOOLS = ("setuptools", "wheel", "ninja")


def install_te() -> str:
    return _build(te_runtime.INSTALL_TE)


def reinstall_te() -> str:
    """All parts anew, for this torch and its CUDA."""
    parts = ["transformer_engine", "transformer_engine_torch", *CORES]
    there = " ".join(part for part in parts if version(part))
    again = te_runtime.INSTALL_TE.replace("--no-build-isolation", "--no-build-isolation --no-cache-dir")
    return (pip(f"pip uninstall -y {there} && ") if there else "") + _build(again)


def rebuild() -> str:
    return _build(te_runtime.rebuild_te())


def _build(command: str) -> str:
    """TE's extension is compiled where it is installed: before that, what compiles it."""
    if tools := [name for name in BUILD_TOOLS if version(name) is None]:
        command = f"pip install {' '.join(tools)} && {command}"
    cuda = importlib.import_module("torch").version.cuda or ""
    if (nvcc_cuda() or "").split(".")[0] != cuda_major():
        toolkit = f"sudo apt-get install -y cuda-toolkit-{cuda.replace('.', '-')}"
        command = f"{toolkit} && export CUDA_HOME=/usr/local/cuda-{cuda} && {command}"
    return pip(command)


def library(name: str) -> str:
    """The command that installs one of CUDA's libraries, for torch's CUDA."""
    major = cuda_major()
    if name in ("cudnn", "nccl"):
        return pip(f"pip install nvidia-{name}-cu{major}")
    package = LIBRARIES.get(name)
    return pip(f"pip install {package}{'-cu12' if major == '12' else ''}") if package else rebuild()


def cuda_major() -> str:
    return (importlib.import_module("torch").version.cuda or "").split(".")[0]


def _missing_library(match: re.Match) -> tuple[str, str]:
    name, number = match["name"], match["number"]
    if name == "cuda":
        return "the driver's libcuda is not found", "sudo ldconfig"
    if name in NUMBERED_AS_CUDA and number != cuda_major():
        return f"it is built for CUDA {number}, torch for CUDA {cuda_major()}", reinstall_te()
    return f"lib{name} is not found", library(name)


def _dependency(match: re.Match) -> tuple[str, str]:
    return f"its dependency {match['name']} is missing", pip(f"pip install {match['name']}")


# What a message of TE 2.20 or of the loader means, and the command that cures it; the first that fits counts.
CAUSES: tuple[tuple[str, Callable[[re.Match], tuple[str, str]]], ...] = (
    (
        r"shared object file for Transformer Engine torch|No module named '?transformer_engine_torch",
        lambda match: ("it was installed without its PyTorch part, `[pytorch]`", install_te()),
    ),
    (
        r"empty `transformer-engine` meta package|shared object file for Transformer Engine core",
        lambda match: ("only its empty meta package is installed, without `[pytorch]`", install_te()),
    ),
    (
        r"package version mismatch|Could not find .*transformer.engine",
        lambda match: ("its parts are of different versions", reinstall_te()),
    ),
    (
        r"undefined symbol|lib(c10|torch)\w*\.so",
        lambda match: ("its extension is built for another torch", rebuild()),
    ),
    (r"lib(?P<name>\w+)\.so\.(?P<number>\d+)[\d.]*: cannot open shared object", _missing_library),
    (
        r"^(?P<name>\w+) shared object not found",
        lambda match: (f"lib{match['name']} is not found", library(match["name"])),
    ),
    (
        r"requires cuDNN ([\d.]+)",
        lambda match: (f"cuDNN is older than {match[1]}", f"{library('cudnn')} --upgrade"),
    ),
    (r"GLIBC(XX)?_[\d.]+' not found", lambda match: ("it is built on another system", rebuild())),
    (r"No module named '(?P<name>\w+)", _dependency),
)


def diagnose(error: BaseException) -> tuple[str, str]:
    """What an import error of TE means, and the command that cures it."""
    message, cores = str(error), [name for name in CORES if version(name)]
    major = cuda_major()
    if len(cores) > 1:
        return f"{' and '.join(cores)} overwrite each other", reinstall_te()
    if cores and major and not cores[0].endswith(major):
        return f"{cores[0]} is installed, torch has CUDA {major}", reinstall_te()
    for pattern, explain in CAUSES:
        if match := re.search(pattern, message):
            return explain(match)
    return "its import fails", rebuild()

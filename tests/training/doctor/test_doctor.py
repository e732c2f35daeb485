"""The doctor: run for real on this machine, and each fault made at the lowest layer that can have it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.recipes import RECIPES
from te_models.kernels import flash_attention
from training.doctor import checks as doctor_checks
from training.doctor import gpu as doctor_gpu
from training.doctor import screen as doctor
from training.doctor import speed as doctor_speed
from training.doctor import te as doctor_te
from training.doctor.checks import Finding
from training.doctor.screen import Check
from training.precision import recipes as precision
from training.precision import te_runtime

ROOT = Path(__file__).resolve().parents[3]
PIP = f"{doctor_checks.python()} -m pip"
GPU = "GPU-11111111-2222-3333-4444-555555555555"
OPTIONS = "--no-build-isolation --no-cache-dir --force-reinstall --no-deps"
REBUILD = f"{PIP} install {OPTIONS} transformer_engine_torch==2.20.2"


def start(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, *options, "-m", "training.doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def says(monkeypatch, capsys):
    """Run these checks in this process: (exit code, findings)."""

    def run(*names: str, **others: Check):
        checks = {name: doctor.CHECKS[name] for name in names} | others
        monkeypatch.setattr(doctor, "CHECKS", checks)
        monkeypatch.setattr(doctor, "supervise", lambda wanted: [row[:2] for row in doctor.examine(wanted)])
        code = doctor.main(["--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["exit_code"] == code
        return code, report["findings"]

    return run


@pytest.fixture
def tools(monkeypatch):
    """Programs that are there: words of a command line -> (exit status, output)."""
    there: dict[str, tuple[int, str]] = {}

    def tool(*command: str):
        line = " ".join(command)
        return next((answer for words, answer in there.items() if words in line), (None, ""))

    monkeypatch.setattr(doctor_checks, "tool", tool)
    for module in (doctor_gpu, doctor_speed):
        monkeypatch.setattr(module, "tool", tool)
    return there


@pytest.fixture
def gpu(monkeypatch, tools, tmp_path):
    """A machine with one H200, torch of CUDA 13 and its cuDNN, as far as the checks can see."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid=GPU.removeprefix("GPU-"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
        "mem_get_info": (149 * 10**9, 150 * 10**9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, answer=answer, **k: answer)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: ones(*a))
    tools["nvcc --version"] = (0, "Cuda compilation tools, release 13.0, V13.0.88")
    folder = tmp_path / "site-packages" / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudnn.so.9").touch()
    mapped(monkeypatch, tmp_path, folder)
    for name in ("CUDNN_HOME", "LD_LIBRARY_PATH", "NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN"):
        monkeypatch.setenv(name, "")  # what is set below is undone too
        monkeypatch.delenv(name)
    te_runtime.load_error.cache_clear()
    yield folder
    te_runtime.load_error.cache_clear()


def mapped(monkeypatch, tmp_path, *folders: Path) -> None:
    lines = [f"7f0000-7f1000 r-xp 00000000 08:01 4242      {folder}/libcudnn.so.9" for folder in folders]
    lines += [f"7f2000-7f3000 r-xp 00000000 08:01 4243      {folders[0]}/libcudnn_graph.so.9"]
    lines += ["7f4000-7f5000 rw-p 00000000 00:00 0", "7f6000-7f7000 r--p 00000000 08:01 9   /lib/libc.so.6"]
    maps = tmp_path / "maps"
    maps.write_text("\n".join(lines))
    monkeypatch.setattr(te_runtime, "MAPS", maps)


@pytest.fixture
def transformer_engine(monkeypatch, tmp_path):
    """Install a Transformer Engine whose import runs this code; `dists` are the packages pip knows."""

    def install(
        code: str, dists=("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13")
    ):
        site = tmp_path / "te"
        (site / "transformer_engine" / "pytorch").mkdir(parents=True)
        (site / "transformer_engine" / "__init__.py").write_text("")
        (site / "transformer_engine" / "pytorch" / "__init__.py").write_text(code)
        for name in dists:
            (site / f"{name}-2.20.2.dist-info").mkdir()
            (site / f"{name}-2.20.2.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 2.20.2\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
        monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def faults(findings):
    return [(finding["text"], finding["cure"]) for finding in findings if finding["status"] == "fault"]


def test_a_machine_without_gpu_is_healthy():
    done = start("--json")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 0, done.stdout
    by_check = {}
    for finding in report["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    assert set(by_check) == {"machine", "torch", "gpu", "te", "packages", "recipes"}
    assert by_check["torch"][0]["data"]["torch"] == torch.__version__
    assert by_check["machine"][0]["data"]["ram"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = {f["data"]["recipe"]: f["data"] for f in by_check["recipes"] if f["data"]}
    assert set(rows) == {"bf16", *RECIPES}
    assert rows["delayed"]["emulated"] and not rows["delayed"]["native"]


def test_the_report_fits_a_screen_and_says_what_is_emulated():
    done = start("--no_speed")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "" and lines[-1] == "healthy: nothing is broken"
    assert len(lines) <= 50 and max(map(len, lines)) <= 110
    assert "TE layers run emulated here and FP8 is emulated" in done.stdout


def test_nothing_is_installed():
    """Without site-packages there is no torch either; every line is there, and a command for each package."""
    done = start(options=("-S",))
    assert done.returncode == 1 and done.stderr == ""
    needed = ["torch", *(package.name for package in doctor_checks.PACKAGES if package.required)]
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    cures = re.findall(r"^\d+\. .* -m pip install (.*)$", done.stdout, re.MULTILINE)
    assert [cure.split("==")[0] for cure in cures] == needed
    assert f"torch=={pins['torch']}" in cures and f"transformers=={pins['transformers']}" in cures
    optional = [package for package in doctor_checks.PACKAGES if not package.required]
    text = re.sub(r"\s+", " ", done.stdout)
    assert all(f"{package.name} is missing, for {package.purpose}: " in text for package in optional)


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        doctor.main(["--speed"])
    assert refused.value.code == 2


def test_checks_that_crash_hang_or_raise_become_lines(monkeypatch):
    monkeypatch.setattr(doctor, "SECONDS", 5)
    checks = {
        "crash": Check("os:abort"),
        "hang": Check("signal:pause"),
        "raise": Check("json:loads"),
        "fine": Check("training.doctor.checks:machine"),
    }
    found = dict(doctor.supervise(checks))
    assert list(found) == list(checks)
    texts = {name: findings[0].text for name, findings in found.items()}
    assert "SIGABRT" in texts["crash"] and "no answer in 5 s" in texts["hang"]
    assert texts["raise"].startswith("this check failed: TypeError: loads()")
    assert {name: findings[0].status for name, findings in found.items()} == {
        "crash": "fault", "hang": "fault", "raise": "fault", "fine": "ok",
    }  # fmt: skip


def test_findings_before_an_exception_are_kept(says, monkeypatch, gpu, tools):
    monkeypatch.setattr(doctor_gpu, "one_gpu", lambda torch, i, before: (_ for _ in [1 / i]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, findings = says("gpu")
    assert code == 1 and findings[-1]["text"] == "this check failed: ZeroDivisionError: division by zero"


def test_cures_are_numbered_and_stand_once():
    same = Finding("fault", "a", "sudo reboot")
    lines = doctor.cures([same, Finding("fault", "b", "do this"), same, Finding("fault", "c")])
    assert lines[:3] == ["4 broken; what cures it:", "1. sudo reboot", "2. do this"] and "others" in lines[3]


@pytest.mark.parametrize("name, found, wrong", [
    ("torch", "2.10.1", True), ("torch", "2.11.0+cu130", False), ("torch", "2.9.0", True),
    ("transformers", "4.57.1", True), ("transformers", "5.0.0rc1", False), ("datasets", "1.0", False),
])  # fmt: skip
def test_packages_too_old(name, found, wrong, monkeypatch):
    package = next(p for p in (doctor_checks.TORCH, *doctor_checks.PACKAGES) if p.name == name)
    problem = doctor_checks.wrong_with(package, found)
    assert (problem is not None) == wrong
    if wrong:
        pin = re.search(rf"^{name}==.*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[0]
        assert problem.status == "fault" and problem.cure == f"{PIP} install {pin}" and found in problem.text


def test_a_required_package_that_does_not_load(says, monkeypatch, tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    code, findings = says("packages")
    pin = re.search(r"^datasets==.*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[0]
    assert code == 1 and faults(findings)[0][1] == f"{PIP} install --force-reinstall {pin}"
    assert "numpy.dtype size changed" in faults(findings)[0][0]


def test_pins_follow_the_python_version(monkeypatch):
    lines = (ROOT / "requirements.txt").read_text()
    pins = {
        marker: pin for pin, marker in re.findall(r"^(numpy==\S+); python_version (\S+)", lines, re.MULTILINE)
    }
    assert pins.keys() == {"<", ">="}
    for python, marker in {(3, 10): "<", (3, 11): ">=", (3, 13): ">="}.items():
        monkeypatch.setattr(doctor_checks.sys, "version_info", python)
        assert doctor_checks.pinned("numpy") == pins[marker]
    assert re.fullmatch(r"deepspeed==[\d.]+", doctor_checks.pinned("deepspeed"))  # without its comment
    assert doctor_checks.pinned("nvdlfw-inspect").startswith("nvdlfw-inspect==")  # of requirements-gpu.txt
    assert doctor_checks.pinned("flash-attn") == "flash-attn"


def test_torch_with_cuda(says, gpu, monkeypatch):
    class Driver:
        @staticmethod
        def cuDriverGetVersion(number):
            number._obj.value = 12080
            return 0

    monkeypatch.setattr(doctor_gpu.ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver}[name])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    text = says("torch")[1][0]["text"]
    assert text == f"torch {torch.__version__}, CUDA 13.0, driver for CUDA 12.8, nvcc 13.0, NCCL 2.28.9"


def test_a_gpu_that_works(says, gpu, tools):
    tools["driver_version"] = (0, f"{GPU}, 580.159.04, 512")
    code, findings = says("gpu")
    assert code == 0 and findings[0]["status"] == "ok"
    text = findings[0]["text"]
    assert text == "0: NVIDIA H200, compute capability 9.0, 149.0 of 150.0 GB free, driver 580.159.04"


def test_a_gpu_that_others_use_is_a_warning(says, gpu, tools):
    tools["driver_version"] = (0, f"GPU-other, 580.159.04, 0\n{GPU}, 580.159.04, 70000")
    code, findings = says("gpu")
    assert code == 0 and findings[1]["status"] == "warn" and "73.4 GB" in findings[1]["text"]


@pytest.mark.parametrize("message, meaning, cure", [
    ("CUDA error: no kernel image is available for execution on the device", "no kernels", "pip uninstall"),
    ("CUDA error: unknown error", "hangs", "sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm"),
])  # fmt: skip
def test_a_gpu_that_computes_nothing(says, gpu, monkeypatch, message, meaning, cure):
    def fails(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "ones", fails)
    code, findings = says("gpu")
    [(text, command)] = faults(findings)
    assert code == 1 and meaning in text and message in text and cure in command


SMI = f"GPU 0: NVIDIA H200 (UUID: {GPU})"
BEFORE = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? Error "


@pytest.mark.parametrize("init, meaning, cure", [
    ("The NVIDIA driver on your system is too old (found version 12040).", "too old", "nvidia-driver-"),
    (f"{BEFORE}802: system not yet initialized", "fabric manager", "nvidia-fabricmanager"),
    (f"{BEFORE}803: system has unsupported display driver", "libcuda", "sudo reboot"),
    (f"{BEFORE}804: forward compatibility was attempted on non supported HW", "newer", "nvidia-driver-"),
    ("CUDA unknown error - this may be due to", "hangs", "rmmod nvidia_uvm"),
    ("something new", "something new", "nvidia-smi -q"),
])  # fmt: skip
def test_a_gpu_that_torch_cannot_use(says, tools, monkeypatch, init, meaning, cure):
    def fails():
        raise RuntimeError(init)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tools["nvidia-smi -L"] = (0, SMI)
    code, findings = says("gpu")
    [(text, command)] = faults(findings)
    assert code == 1 and meaning in text and init in text and cure in command


@pytest.mark.parametrize("cuda, smi, meaning, cure", [
    (None, (0, SMI), "a build without CUDA", f"{PIP} uninstall -y torch && {PIP} install torch=="),
    ("13.0", (18, "Failed to initialize NVML: Driver/library version mismatch"), "updated", "sudo reboot"),
    ("13.0", (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
     "not loaded", "sudo modprobe nvidia"),
])  # fmt: skip
def test_a_gpu_that_torch_does_not_see(says, tools, monkeypatch, cuda, smi, meaning, cure):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tools["nvidia-smi -L"] = smi
    code, findings = says("gpu")
    [(text, command)] = faults(findings)
    assert code == 1 and meaning in text and cure in command


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_no_fault(says, tools, monkeypatch, hidden):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    tools["nvidia-smi -L"] = (0, SMI)
    code, findings = says("gpu")
    assert code == 0 and "unset CUDA_VISIBLE_DEVICES" in findings[0]["text"]


def test_a_gpu_without_driver(says, tools, monkeypatch, tmp_path):
    device = tmp_path / "0000:17:00.0"
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor_gpu, "PCI", tmp_path)
    monkeypatch.setattr(doctor_gpu, "CONTROL", tmp_path / "none")
    monkeypatch.setattr(doctor_gpu, "in_container", lambda: False)
    code, findings = says("gpu")
    assert code == 1 and faults(findings)[0][1] == doctor_gpu.UPDATE_DRIVER
    monkeypatch.setattr(doctor_gpu, "in_container", lambda: True)
    code, findings = says("gpu")
    assert code == 0 and "--gpus all" in findings[0]["text"]
    (device / "class").write_text("0x020000\n")  # a network card of the same vendor
    assert says("gpu")[1][0]["data"] == {"gpus": 0}


def test_torch_that_does_not_load(says, monkeypatch):
    real = doctor_checks.importlib.import_module

    def loads(name, *arguments):
        if name == "torch":
            raise ImportError("libtorch_cuda.so: undefined symbol: ncclCommWindowRegister")
        return real(name, *arguments)

    monkeypatch.setattr(doctor_checks.importlib, "import_module", loads)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    code, findings = says("torch", "gpu", "recipes")
    [(text, cure)] = faults(findings)
    assert code == 1 and "ncclCommWindowRegister" in text and f"{PIP} install --force-reinstall torch" in cure
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda-12.4/lib64")
    assert faults(says("torch")[1])[0][1] == "unset LD_LIBRARY_PATH"


MISSING = "cannot open shared object file: No such file or directory"
SYMBOL = "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c106detail14torchC"
MISMATCH = "Transformer Engine package version mismatch. Found transformer_engine_torch v2.19"
EMPTY = "Found empty `transformer-engine` meta package installed."
NO_TORCH = "Could not find shared object file for Transformer Engine torch lib."
OLD_CUDNN = "Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0."
GLIBC = "/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found"
INSTALL, ANEW = "-r requirements-gpu.txt", "uninstall -y transformer_engine "
CUDNN = f"{PIP} install nvidia-cudnn-cu13"


@pytest.mark.parametrize("error, meaning, cure", [
    (RuntimeError(EMPTY), "without `[pytorch]`", INSTALL),
    (FileNotFoundError(NO_TORCH), "without its PyTorch part", INSTALL),
    (ImportError(SYMBOL), "built for another torch", REBUILD),
    (ImportError(f"libc10.so: {MISSING}"), "built for another torch", REBUILD),
    (OSError(f"libcublas.so.12: {MISSING}"), "built for CUDA 12, torch for CUDA 13", ANEW),
    (OSError(f"libcudart.so.12: {MISSING}"), "built for CUDA 12, torch for CUDA 13", ANEW),
    (OSError(f"libcublas.so.13: {MISSING}"), "libcublas is not found", f"{PIP} install nvidia-cublas"),
    (OSError(f"libcurand.so.10: {MISSING}"), "libcurand is not found", f"{PIP} install nvidia-curand"),
    (OSError(f"libcudnn.so.9: {MISSING}"), "libcudnn is not found", CUDNN),
    (OSError(f"libcuda.so.1: {MISSING}"), "the driver's libcuda", "sudo ldconfig"),
    (RuntimeError("cudnn shared object not found."), "libcudnn is not found", CUDNN),
    (RuntimeError("cublas shared object not found."), "libcublas", f"{PIP} install nvidia-cublas"),
    (RuntimeError(OLD_CUDNN), "older than 9.12.0", f"{CUDNN} --upgrade"),
    (AssertionError(MISMATCH), "different versions", ANEW),
    (ImportError(GLIBC), "another system", REBUILD),
    (ModuleNotFoundError("No module named 'onnxscript'"), "onnxscript", f"{PIP} install onnxscript"),
    (RuntimeError(""), "its import fails", REBUILD),
])  # fmt: skip
def test_broken_transformer_engine(says, gpu, transformer_engine, error, meaning, cure):
    transformer_engine(f"raise {type(error).__name__}({str(error)!r})")
    code, findings = says("cudnn", "te")
    [(text, command)] = faults(findings)
    assert code == 1 and meaning in text and str(error) in text
    # Before it there may be tools to build with.
    assert cure in command if cure in (INSTALL, ANEW) else command.endswith(cure)
    assert te_runtime.why_not_te().startswith("Transformer Engine does not load (")
    if "for another torch" in meaning:
        assert REBUILD.split(" -m ")[1] in te_runtime.why_not_te()


def test_cuda_12_libraries_have_other_names(says, gpu, transformer_engine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    transformer_engine(f"raise OSError('libcublas.so.12: {MISSING}')", dists=("transformer_engine",))
    assert faults(says("te")[1])[0][1] == f"{PIP} install nvidia-cublas-cu12"


@pytest.mark.parametrize("cores, meaning", [
    (("transformer_engine_cu12",), "transformer_engine_cu12 is installed, torch has CUDA 13"),
    (("transformer_engine_cu12", "transformer_engine_cu13"), "overwrite each other"),
])  # fmt: skip
def test_transformer_engine_of_another_cuda(says, gpu, transformer_engine, cores, meaning):
    transformer_engine(f"raise ImportError({SYMBOL!r})", dists=("transformer_engine", *cores))
    [(text, cure)] = faults(says("te")[1])
    gone = " ".join(("transformer_engine", *cores))
    assert meaning in text and cure.startswith(f"{PIP} uninstall -y {gone} && {PIP} install")
    assert cure.endswith("--no-build-isolation --no-cache-dir -r requirements-gpu.txt")


def test_transformer_engine_missing_is_a_note_with_its_command(says, gpu):
    code, findings = says("te")
    assert code == 0 and findings[0]["status"] == "note" and "-r requirements-gpu.txt" in findings[0]["cure"]


def test_building_needs_nvcc_of_torchs_cuda(says, gpu, tools):
    """What pip would compile without it fails, or does not load."""
    before = (
        f"sudo apt-get install -y cuda-toolkit-13-0 && export CUDA_HOME=/usr/local/cuda-13.0 && {PIP} install"
    )
    for nvcc in [(0, "Cuda compilation tools, release 12.8, V12.8.61"), (None, "")]:
        tools["nvcc --version"] = nvcc
        assert says("te")[1][0]["cure"].startswith(before)
    tools["nvcc --version"] = (0, "Cuda compilation tools, release 13.1, V13.1.1")
    assert says("te")[1][0]["cure"].startswith(f"{PIP} install")


def test_transformer_engine_too_old(says, gpu, transformer_engine):
    transformer_engine("TransformerLayer = checkpoint = fp8_autocast = None")
    [(text, cure)] = faults(says("te")[1])
    assert "has no autocast, quantized_model_init" in text and "-r requirements-gpu.txt" in cure


def test_transformer_engine_that_loads(says, gpu, transformer_engine):
    transformer_engine("TransformerLayer = checkpoint = autocast = quantized_model_init = None")
    code, findings = says("cudnn", "te")
    assert code == 0 and findings[-1]["text"] == "Transformer Engine 2.20.2, its extension loads"
    assert findings[0]["text"] == f"cuDNN 9.19.0 of torch, in {gpu}; CUDNN_HOME not set"


def second_cudnn(tmp_path: Path) -> Path:
    folder = tmp_path / "usr" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudnn.so", "libcudnn.so.9"):
        (folder / name).touch()
    return folder


def test_two_cudnns_mixed(says, gpu, transformer_engine, monkeypatch, tmp_path):
    other = second_cudnn(tmp_path)
    monkeypatch.setenv("CUDNN_HOME", str(other))
    transformer_engine("import training.cudnn")
    mapped(monkeypatch, tmp_path, gpu, other)
    code, findings = says("cudnn")
    [(text, cure)] = faults(findings)
    assert code == 1 and str(gpu) in text and str(other) in text
    assert cure == f"export CUDNN_HOME={gpu}" and findings[0]["data"]["cudnn_home"] == str(other)


def test_torch_without_cudnn(says, gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert faults(says("cudnn")[1]) == [("torch loads no cuDNN", f"{PIP} install nvidia-cudnn-cu13")]


WRONG = "flash-attn-4 4.0.0b36 computes wrong attention"


@pytest.mark.parametrize("missing, wrong, status, text", [
    ("it is not installed", None, "note", "it is not installed"),
    (None, WRONG, "warn", WRONG),
    (None, None, "ok", "runs with BF16 attention take it"),
])  # fmt: skip
def test_flash_attention_4_is_tried(says, gpu, monkeypatch, missing, wrong, status, text):
    tried = []
    monkeypatch.setattr(flash_attention, "why_not", lambda size: missing)
    monkeypatch.setattr(flash_attention, "as_te_calls", lambda **how: how)
    monkeypatch.setattr(
        flash_attention, "self_test", lambda how, *heads: tried.append((how, *heads)) or wrong
    )
    code, findings = says("flash")
    assert code == 0 and findings[0]["status"] == "ok" and text in findings[1]["text"]
    forms = [] if missing else [True] if wrong else [True, False]
    assert findings[1]["status"] == status
    assert tried == [({"packed": packed}, 32, 8, 128) for packed in forms]
    assert (findings[1]["cure"] is not None) == (status == "warn")


@pytest.mark.parametrize("backend, switched_off, cure", [
    ("fused", (), None), ("flash", (), None),
    ("unfused", (), "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"),
    ("unfused", ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN"), "unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN"),
])  # fmt: skip
def test_attention_backends(says, gpu, monkeypatch, backend, switched_off, cure):
    ran = []

    def one_layer(*, packed, tokens):
        return None, {"bf16": lambda: ran.append(packed)}

    monkeypatch.setattr(te_runtime, "why_not_te", lambda: None)
    monkeypatch.setattr(te_runtime, "attention_backend", lambda: backend if ran[-1] else "fused")
    monkeypatch.setattr(doctor_te, "one_layer", one_layer)
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    for name in switched_off:
        monkeypatch.setenv(name, "0")
    code, findings = says("attention")
    assert ran == [True, False] and [finding["data"]["packed"] for finding in findings] == [True, False]
    assert code == (backend == "unfused")
    if cure:
        assert faults(findings)[0][1].startswith(cure)


@pytest.mark.parametrize(
    "ms, share, status", [(1.4823, 0.75, "ok"), (2.2234, 0.5, "ok"), (2.3, 0.4834, "warn")]
)
def test_share_of_peak(gpu, tools, monkeypatch, ms, share, status):
    """8192^3 multiplications and additions, 1.0995 TFLOP, take 1.1118 ms at the H200's 989 TFLOP/s."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    fields = "clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    tools[fields] = (0, f"GPU-other, 1, 1, 1, 1, 1\n{GPU}, 1200, 1980, 349.5, 350.0, 61")
    tools["clocks_event_reasons"] = (0, f"{GPU}, 0x0000000000000024")
    tools["compute-apps"] = (0, f"{GPU}, 11\n{GPU}, 12\nGPU-other, 13")
    found = doctor_speed.rate("GEMM", "bf16", 2 * 8192**3, ms, 0.5, lambda: None)
    assert found.status == status and found.data["share"] == pytest.approx(share, rel=1e-3)
    if status == "warn":
        assert "1200 of 1980 MHz, 349.5 of 350.0 W, 61 C" in found.text
        assert "held back by the power limit, heat, 2 processes on it" in found.text


def test_speed_of_an_unknown_gpu_is_told_without_a_share(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X1000")
    found = doctor_speed.rate("GEMM", "fp8", 1e12, 2.0, 0.5, lambda: None)
    assert found.status == "ok" and found.data["share"] is None and "500 TFLOP/s" in found.text


def test_links(says, gpu, tools, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    tools["topo -m"] = (
        0,
        "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \nLegend:\n  NV#  = bonded set of # NVLinks",
    )
    _, findings = says("links")
    assert findings[0]["text"] == "2 GPUs, NVLink (NV18), peer access in 2 of 2 pairs"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i < j)
    code, findings = says("links")
    assert code == 0 and findings[0]["status"] == "warn" and "1 of 2 pairs" in findings[0]["text"]


def test_an_engine_that_raises_is_a_fault(says, monkeypatch):
    def raises(name, backend):
        raise AttributeError("module has no attribute 'DelayedScaling'")

    monkeypatch.setattr(precision, "why_not", raises)
    code, findings = says("recipes")
    assert code == 1 and "AttributeError: module has no attribute" in faults(findings)[0][0]
    assert "no [" in findings[1]["text"]


def test_recipes_without_torchao(says, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    code, findings = says("recipes")
    rows = {finding["data"]["recipe"]: finding for finding in findings if finding["data"]}
    assert code == 0 and re.search(r"without --use_te: no \[\d\]", rows["rowwise"]["text"])
    assert any("pip install torchao" in finding["text"] for finding in findings)


def test_recipes_without_fp8_on_the_gpu(says, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    _, findings = says("recipes")
    rows = {finding["data"]["recipe"]: finding for finding in findings if finding["data"]}
    assert re.search(r"without --use_te: no \[\d\]", rows["tensorwise"]["text"])
    assert any("need compute capability 8.9" in finding["text"] for finding in findings)


@pytest.mark.parametrize("packed", [True, False])
def test_the_layer_that_is_tried_takes_steps_in_both_precisions(packed, monkeypatch):
    monkeypatch.setattr(doctor_te, "MODEL", "tiny-llama")
    model, steps = doctor_te.one_layer(packed=packed, tokens=64, device="cpu", backend="emulated")
    assert list(steps) == ["bf16", "fp8"] and len(model.blocks) == 1
    weights = [weight for weight in model.blocks[0].parameters() if weight.dim() == 2]
    gradients = {}
    for name, step in steps.items():
        step()
        step()  # from no gradients again
        gradients[name] = [weight.grad.float().clone() for weight in weights]
    for one, other in zip(gradients["bf16"], gradients["fp8"], strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.5 * one.norm()


def test_layer_speed_counts_the_flops_of_one_layer(says, gpu, monkeypatch):
    """One 8B layer and a head of 2,048 words: 6 FLOPs per weight and token, and causal attention."""
    config = SimpleNamespace(
        model_type="llama", hidden_size=4096, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=14336, vocab_size=2048,
    )  # fmt: skip
    tokens = 8192
    weights = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 4096 * 2048
    flops = 6 * weights * tokens + 6 * 32 * 128 * tokens**2
    steps = {"bf16": lambda: 20.0, "fp8": lambda: 15.0}
    monkeypatch.setattr(te_runtime, "why_not_te", lambda: None)
    monkeypatch.setattr(doctor_te, "one_layer", lambda **_: (SimpleNamespace(config=config), steps))
    monkeypatch.setattr(doctor_speed, "milliseconds", lambda step: step())
    code, findings = says("layer")
    assert code == 0 and [finding["status"] for finding in findings] == ["ok"] * 3
    assert findings[0]["data"]["tflops"] == pytest.approx(flops / 20e-3 / 1e12)
    assert findings[1]["data"]["share"] == pytest.approx(flops / 15e-3 / 1979e12)
    assert findings[2]["text"] == "the layer is 1.33x as fast in FP8 as in BF16"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * 10**9, 150 * 10**9))
    assert [finding["status"] for finding in says("layer")[1]] == ["note"]

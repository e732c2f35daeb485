"""The doctor: run on this machine, and each fault made at the lowest layer that can have it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.recipes import RECIPES, TE_RECIPES
from fp8_suite.training.doctor import layers, machine, report
from fp8_suite.training.doctor.machine import Finding
from fp8_suite.training.precision import recipes as precision
from fp8_suite.training.precision import te_runtime

ROOT = Path(__file__).resolve().parents[3]
PIP = f"{sys.executable} -m pip"
SMI = "NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0"
INSPECT_MISSING = "nvdlfw-inspect is missing, optional: --fp8_stats_interval needs it"
TE_PARTS = ("transformer_engine", "transformer_engine_torch", "transformer_engine_cu13")


def start(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-m", "training.doctor", *arguments]
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess:
    return start("--json")


@pytest.fixture
def tools(monkeypatch):
    """Programs that are installed: words of a command line -> output."""
    there: dict[str, str] = {}

    def output(*command: str) -> str | None:
        return next((text for words, text in there.items() if words in " ".join(command)), None)

    monkeypatch.setattr(machine, "output", output)
    return there


@pytest.fixture
def gpu(monkeypatch, tools, tmp_path) -> Path:
    """A machine with an H200 and torch for CUDA 13, as far as the checks see; returns torch's cuDNN."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    answers = {"is_available": True, "device_count": 1, "get_device_properties": properties}
    answers |= {"get_device_name": "NVIDIA H200", "get_device_capability": (9, 0)}
    answers["mem_get_info"] = (149 * 10**9, 150 * 10**9)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, answer=answer, **k: answer)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: ones(*a))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    tools |= {"nvcc": "Cuda compilation tools, release 13.0, V13.0.88", "nvidia-smi": SMI}
    map_cudnns(monkeypatch, tmp_path, tmp_path / "torch")
    monkeypatch.setenv("CUDNN_HOME", "")  # what is set below is undone too
    monkeypatch.delenv("CUDNN_HOME")
    te_runtime.load_error.cache_clear()
    yield tmp_path / "torch"
    te_runtime.load_error.cache_clear()


def map_cudnns(monkeypatch, tmp_path: Path, *folders: Path) -> None:
    """Have the process's memory map show a cuDNN in each folder."""
    files = [f"{folder}/libcudnn{part}.so.9" for folder in folders for part in ("", "_ops")]
    lines = [f"7f0-7f1 r-xp 000 08:01 4242      {file}" for file in (*files, "/lib/libc.so.6")]
    (tmp_path / "maps").write_text("\n".join([*lines, "7f4-7f5 rw-p 00 00:00 0"]))
    monkeypatch.setattr(te_runtime, "MAPS", tmp_path / "maps")


@pytest.fixture
def install_te(monkeypatch, tmp_path):
    """Install a Transformer Engine whose import runs this code, in these parts."""

    def install(code: str, parts=TE_PARTS) -> None:
        package = tmp_path / "te" / "transformer_engine" / "pytorch"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("")
        (package / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / "te")
        monkeypatch.setattr(layers, "version", lambda name: "2.20.2" if name in parts else None)
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            monkeypatch.delitem(sys.modules, name, raising=False)

    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_a_machine_without_gpu_is_healthy(done):
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 0 and done.stderr == "", done.stdout
    assert {row["check"] for row in found["findings"]} == {"machine", "packages", "gpu", "te", "recipes"}
    rows = {row["data"]["recipe"]: row["data"] for row in found["findings"] if "recipe" in row["data"]}
    assert set(rows) == {"bf16", *RECIPES} and rows["bf16"]["without --use_te"]
    assert all(row["emulated"] == (name != "nvfp4") for name, row in rows.items() if name in TE_RECIPES)
    assert not any(row.get("native") for row in rows.values())
    assert all(row["without --use_te"] for name, row in rows.items() if name not in TE_RECIPES)


def test_the_report_fits_a_screen(done, monkeypatch, capsys):
    rows = [(row.pop("check"), [Finding(**row)]) for row in json.loads(done.stdout)["findings"]]
    monkeypatch.setattr(report, "supervise", lambda names: rows)
    assert report.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 110 and "healthy: nothing is broken" in lines


def test_without_any_package_one_command_installs_all():
    done = start(options=("-S",))
    assert done.returncode == 1 and done.stderr == ""
    install = f"to install what is missing: {PIP} install -r requirements.txt"
    assert done.stdout.splitlines()[-2:] == ["1 broken", install]
    assert "torch is missing; transformers is missing" in done.stdout


def test_checks_that_crash_raise_or_hang_are_faults_and_the_rest_runs(monkeypatch, capsys):
    with pytest.raises(SystemExit) as refused:
        report.main(["--speed"])
    assert refused.value.code == 2
    fine = "fp8_suite.training.doctor.machine:check_machine"
    checks = {"crash": "os:abort", "raise": "json:loads", "machine": fine}
    monkeypatch.setattr(report, "CHECKS", checks)
    assert report.main(["--json"]) == 1
    texts = {row["check"]: row["text"] for row in json.loads(capsys.readouterr().out)["findings"]}
    assert texts["crash"] == "this check crashes its process"
    assert texts["raise"].startswith("this check failed: TypeError") and texts["machine"].startswith("Python")
    monkeypatch.setattr(report, "CHECKS", {"hang": "signal:pause"})
    monkeypatch.setattr(report, "SECONDS", 0.1)
    [(name, [fault])] = report.supervise(["hang"])
    assert (name, fault.status, fault.text) == ("hang", "fault", "this check hangs: no answer in 0.1 s")


def test_packages_that_are_too_old_or_do_not_load_are_faults(monkeypatch, tmp_path):
    (tmp_path / "datasets.py").write_text("raise ImportError('numpy.dtype size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    versions = {"torch": "2.10.1+cu130", "transformers": "5.0.0rc1", "wandb": None}
    monkeypatch.setattr(machine, "version", lambda name: versions.get(name, "9.9"))
    fault, _, missing = machine.check_packages()
    assert fault.text.startswith("torch 2.10.1+cu130 is older than 2.11; datasets 9.9 does not load (numpy.")
    assert fault.install == f"{PIP} install --force-reinstall -r requirements.txt"
    assert missing.status == "note" and missing.install is None, "requirements.txt has it, too"
    monkeypatch.setattr(machine, "version", lambda name: None if name == "wandb" else "9.9")
    monkeypatch.setattr(machine.importlib, "import_module", lambda name: None)
    *_, missing = machine.check_packages()
    assert missing.text == "missing, optional: wandb" and missing.install == f"{PIP} install wandb"


def test_one_command_installs_all_that_is_missing(monkeypatch, capsys):
    findings = [Finding("note", "a", install=f"{PIP} install wandb"), Finding("note", "b", install="make")]
    monkeypatch.setattr(report, "supervise", lambda names: [("packages", findings)])
    assert report.main([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"to install what is missing: {PIP} install wandb && make"


def test_a_gpu_is_described_and_tried(gpu, monkeypatch):
    versions, found = machine.check_gpus()
    assert versions.text == "torch for CUDA 13.0, driver 580.159.04 for CUDA 13.0, nvcc 13.0"
    assert found.status == "ok" and "H200, compute capability 9.0, 149.0 of 150.0 GB free" in found.text
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (76 * 10**9, 150 * 10**9))
    assert [f.status for f in machine.check_gpus()] == ["ok", "warn"]

    def fails(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", fails)
    *_, fault = machine.check_gpus()
    assert fault.status == "fault" and "no kernel image" in fault.text and "uninstall -y torch" in fault.cure


@pytest.mark.parametrize(
    ("smi", "cuda", "hidden", "error", "status", "cure"),
    [
        (None, "13.0", "", "", "ok", ""),
        (SMI, None, "0", "", "fault", f"{PIP} uninstall -y torch && {PIP} install -r requirements.txt"),
        (SMI, "13.0", "-1", "", "note", ""),
        (SMI, "13.0", "0", "The NVIDIA driver on your system is too old", "fault", machine.UPDATE_DRIVER),
        (SMI, "13.0", "0", "Error 803: system has unsupported display driver", "fault", "sudo reboot"),
        (SMI, "13.0", "0", "something new", "fault", "nvidia-smi -q"),
        ("Failed: Driver/library version mismatch", "13.0", "0", "", "fault", "sudo reboot"),
    ],
)
def test_the_reason_for_an_unusable_gpu_is_named(tools, monkeypatch, smi, cuda, hidden, error, status, cure):
    def init():
        raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    tools.update({"nvidia-smi": smi} if smi else {})
    [found] = machine.check_gpus()
    assert found.status == status and error in found.text and (found.cure or "").endswith(cure)


def test_a_transformer_engine_that_does_not_load_is_a_fault_with_its_cure(gpu, install_te, tools):
    parts = (*TE_PARTS[:2], "transformer_engine_cu12", TE_PARTS[2])  # for two CUDAs
    install_te("raise ImportError('x.so: undefined symbol: _ZN3c10')", parts)
    [found] = layers.check_te()
    assert found.status == "fault" and found.text.endswith("does not load: x.so: undefined symbol: _ZN3c10")
    assert found.cure.startswith(f"{PIP} uninstall -y {' '.join(parts)} && {PIP} install setuptools")
    assert found.cure.endswith("-r requirements-gpu.txt --no-cache-dir")
    tools["nvcc"] = "release 12.8"
    [found] = layers.check_te()
    assert found.cure.startswith("sudo apt-get install -y cuda-toolkit-13-0 && export CUDA_HOME=")
    assert te_runtime.why_not_te().startswith("Transformer Engine does not load (x.so")


def test_transformer_engine_missing_is_a_note_and_loading_is_ok(gpu, install_te, monkeypatch):
    [missing] = layers.check_te()
    assert missing.status == "note" and missing.install.endswith(
        "--no-build-isolation -r requirements-gpu.txt"
    )
    install_te("")
    te_runtime.load_error.cache_clear()
    assert [f.text for f in layers.check_te()] == ["Transformer Engine 2.20.2 loads", INSPECT_MISSING]
    assert os.environ["CUDNN_HOME"] == str(gpu)  # torch's cuDNN, unless the user chose another
    monkeypatch.setenv("CUDNN_HOME", "/own")
    te_runtime.point_te_at_torchs_cudnn()
    assert os.environ["CUDNN_HOME"] == "/own"


def test_two_mixed_cudnns_are_a_fault(gpu, monkeypatch, tmp_path):
    [ok] = layers.check_cudnn()
    assert ok.status == "ok" and ok.data["loaded"] == [str(gpu)]
    map_cudnns(monkeypatch, tmp_path, gpu, tmp_path / "system")
    [found] = layers.check_cudnn()
    assert found.status == "fault" and str(tmp_path / "system") in found.text
    assert found.cure == f"export CUDNN_HOME={gpu}"
    warning = te_runtime.unfused_warning(deterministic=True, flash_attention=True)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    off = te_runtime.unfused_warning(deterministic=False, flash_attention=False)
    assert "unset NVTE_FUSED_ATTN. NVTE_DEBUG=1" in off
    assert "UNFUSED" in warning and f"{gpu} and {tmp_path / 'system'}: set CUDNN_HOME" in warning


def test_a_recipe_that_should_run_and_raises_is_a_fault(monkeypatch):
    assert layers.try_recipe("delayed", "emulated") == (None, False)
    monkeypatch.setitem(sys.modules, "torchao", None)
    reason, broken = layers.try_recipe("rowwise", None)
    assert "pip install torchao" in reason and not broken

    def raises(name, backend):
        raise AttributeError("module has no attribute 'DelayedScaling'")

    monkeypatch.setattr(precision, "why_not", raises)
    reason, broken = layers.try_recipe("delayed", "emulated")
    assert reason == "delayed, emulated layers: AttributeError: module has no attribute 'DelayedScaling'"
    assert broken and {f.status for f in layers.check_recipes()} == {"ok", "note", "fault"}

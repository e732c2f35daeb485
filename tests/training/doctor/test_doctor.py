"""The doctor: run on this machine, and each fault made at the lowest layer that can have it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fp8_suite.training.doctor.__main__ as doctor
import pytest
import torch
from fp8_suite.core.packages import ROOT
from fp8_suite.core.recipes import RECIPES
from fp8_suite.training.precision import te_runtime

SMI = "NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0"


def start(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-m", "training.doctor"]
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture
def te_folder(monkeypatch, tmp_path) -> Iterator[Path]:
    """Folder for a package transformer_engine.pytorch, on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)
    te_runtime.load_error.cache_clear()
    yield tmp_path / "transformer_engine" / "pytorch"
    te_runtime.load_error.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_a_machine_without_gpu_is_healthy_on_one_screen():
    done = start()
    assert done.returncode == 0 and done.stderr == "", done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 30 and "healthy: nothing is broken" in lines
    assert {name for name in RECIPES if any(name in line for line in lines)} == set(RECIPES)


def test_a_recipe_that_should_run_and_raises_is_a_fault(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.delattr("fp8_suite.te_models.emulation.Linear")
    rows = {finding.text.split()[0]: finding for finding in doctor.check_recipes()}
    assert rows["delayed"].status == "fault" and "AttributeError" in rows["delayed"].text
    assert rows["rowwise"].status == "note" and "pip install torchao" in rows["rowwise"].text


def test_without_any_package_one_command_installs_all():
    done = start("-S")
    assert done.returncode == 1 and done.stderr == ""
    assert "torch is missing" in done.stdout and f"to fix: {doctor.INSTALL}\n" in done.stdout


def test_packages_that_are_too_old_are_a_fault(monkeypatch):
    versions = {"torch": "2.10.1+cu130", "transformers": "5.0.0rc1", "wandb": None}
    monkeypatch.setattr(doctor, "version", lambda name: versions.get(name, "9.9"))
    fault, _, missing = doctor.check_packages()
    assert (fault.text, fault.cure) == ("torch 2.10.1+cu130 is older than 2.11", doctor.INSTALL)
    assert missing.status == "note" and missing.text.endswith("wandb")


@pytest.mark.parametrize(
    ("text", "cuda", "visible", "error", "status", "cure"),
    [
        (None, "13.0", "", "", "ok", None),
        (SMI, None, "0", "", "fault", doctor.REINSTALL_TORCH),
        (SMI, "13.0", "-1", "", "note", None),
        (SMI, "13.0", "0", "The NVIDIA driver on your system is too old", "fault", doctor.UPDATE_DRIVER),
        (SMI, "13.0", "0", "something new", "fault", "nvidia-smi -q"),
        ("Failed: Driver/library version mismatch", "13.0", "0", "", "fault", "sudo reboot"),
    ],
)
def test_the_reason_for_an_unusable_gpu_is_named(monkeypatch, text, cuda, visible, error, status, cure):
    def init():
        raise RuntimeError(error)

    monkeypatch.setattr(doctor, "nvidia_smi", lambda: text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [finding] = doctor.check_gpus()
    assert (finding.status, finding.cure) == (status, cure) and error in finding.text


def test_transformer_engine_is_missing_broken_or_loads(te_folder, monkeypatch):
    missing, _ = doctor.check_te()
    assert missing.status == "note" and missing.cure == doctor.INSTALL_TE
    te_folder.mkdir(parents=True)
    code = "import os\nif not os.environ.get('WORKS'): raise ImportError('x.so: undefined symbol')"
    (te_folder / "__init__.py").write_text(code)
    monkeypatch.setattr(doctor, "version", {"transformer_engine": "2.20.2"}.get)
    te_runtime.load_error.cache_clear()
    broken, _ = doctor.check_te()
    assert broken.status == "fault" and broken.text.endswith("does not load: x.so: undefined symbol")
    assert broken.cure == doctor.INSTALL_TE
    monkeypatch.setenv("WORKS", "1")
    te_runtime.load_error.cache_clear()
    assert [finding.status for finding in doctor.check_te()] == ["ok", "ok"]

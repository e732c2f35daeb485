"""The doctor on a healthy GPU host, and on the same host with faults injected by environment variables."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from fp8_suite.core.recipes import TE_RECIPES
from fp8_suite.training.precision.recipes import why_not
from fp8_suite.training.precision.te_runtime import torch_cudnn

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def examine(**environment: str) -> tuple[int, dict[str, list[str]]]:
    """Run `python -m training.doctor` in a subprocess; return its exit code and lines by check."""
    env = {n: value for n, value in os.environ.items() if n not in ("CUDNN_HOME", "CUDNN_PATH")}
    command = [sys.executable, "-m", "training.doctor"]
    done = subprocess.run(
        command, cwd=ROOT, env=env | environment, capture_output=True, text=True, timeout=500
    )
    print(done.stdout)
    checks: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        checks.setdefault(line[6:15].strip(), []).append(line)
    return done.returncode, checks


def cudnn(checks: dict[str, list[str]]) -> str:
    """Return the line about cuDNN."""
    return next(line for line in checks["te"] if "cuDNN" in line)


@cache
def healthy() -> tuple[int, dict[str, list[str]]]:
    return examine()


def test_a_healthy_host():
    code, checks = healthy()
    assert code == 0 and {"gpus", "te", "recipes"} <= checks.keys()
    assert cudnn(checks).startswith("ok ")


def test_reported_recipes_are_those_available_to_training():
    rows = {line.split()[2]: line for line in healthy()[1]["recipes"]}
    assert {name: rows[name].startswith("ok ") for name in TE_RECIPES} == {
        name: why_not(name) is None for name in TE_RECIPES
    }
    assert all(" native: " in rows[name] for name in TE_RECIPES)


@pytest.fixture
def second(tmp_path):
    """Folder with a copy of torch's cuDNN, which the loader treats as another library."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for path in torch_cudnn().glob("libcudnn*.so*"):
        shutil.copy(path, folder)
    yield folder
    shutil.rmtree(folder)


def test_libraries_from_two_cudnns_are_a_fault(second):
    code, checks = examine(CUDNN_HOME=str(second))
    fault = cudnn(checks)
    assert code == 1 and fault.startswith("FAULT ")
    assert str(second.resolve()) in fault and str(torch_cudnn()) in fault
    cure = f"to fix: export CUDNN_HOME={torch_cudnn()}"
    assert any(cure in lines for lines in checks.values())


def test_a_second_cudnn_is_not_loaded(second):
    code, checks = examine(CUDNN_PATH=str(second))
    assert code == 0 and cudnn(checks).startswith("ok ") and cudnn(checks).endswith(f" in {torch_cudnn()}")

"""The doctor on a healthy GPU host, and on the same host with faults injected by environment variables."""

import json
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


def examine(*arguments: str, **environment: str) -> tuple[int, dict[str, list[dict]]]:
    """Run `python -m training.doctor` in a subprocess; return its exit code and findings by check."""
    env = {n: value for n, value in os.environ.items() if n not in ("CUDNN_HOME", "CUDNN_PATH")}
    command = [sys.executable, "-m", "training.doctor", "--json", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=env | environment, capture_output=True, text=True, timeout=500
    )
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    print(done.stdout)
    checks: dict[str, list[dict]] = {}
    for finding in report["findings"]:
        checks.setdefault(finding["check"], []).append(finding)
    return done.returncode, checks


def cudnn(checks: dict[str, list[dict]]) -> dict:
    """Return the finding about cuDNN."""
    return next(finding for finding in checks["te"] if "loaded" in finding["data"])


@cache
def healthy() -> tuple[int, dict[str, list[dict]]]:
    return examine()


def test_a_healthy_host():
    code, checks = healthy()
    assert code == 0 and {"gpus", "te", "recipes"} <= checks.keys()
    assert len(cudnn(checks)["data"]["loaded"]) == 1


def test_reported_recipes_are_those_available_to_training():
    rows = {finding["data"]["recipe"]: finding["data"] for finding in healthy()[1]["recipes"]}
    assert {name: rows[name]["runs"] for name in TE_RECIPES} == {
        name: why_not(name) is None for name in TE_RECIPES
    }
    assert all(rows[name]["backend"] == "native" for name in TE_RECIPES)


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
    assert code == 1 and set(fault["data"]["loaded"]) == {str(second.resolve()), str(torch_cudnn())}
    assert fault["status"] == "fault" and fault["cure"] == f"export CUDNN_HOME={torch_cudnn()}"


def test_a_second_cudnn_is_not_loaded(second):
    code, checks = examine(CUDNN_PATH=str(second))
    assert code == 0 and cudnn(checks)["status"] == "ok"
    assert cudnn(checks)["data"]["loaded"] == [str(torch_cudnn())]

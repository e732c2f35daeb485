"""Requirements files agree with pyproject.toml, and a wheel holds the whole suite under one name."""

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fp8_suite.core.packages import ROOT, code_digest
from packaging.requirements import Requirement
from packaging.version import Version

tomllib = pytest.importorskip("tomllib")  # Python 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOLDERS = ("benchmarks", "core", "data", "ds_configs", "te_models", "training")
READ = {".py", ".j2", ".json", ".yaml", ".gz", ".xz", ".md"}  # files that the suite reads


@pytest.mark.parametrize(
    ("file", "ranges"),
    [
        ("requirements.txt", PROJECT["dependencies"] + EXTRAS["integrations"] + EXTRAS["dev"]),
        ("requirements-gpu.txt", EXTRAS["gpu"]),
    ],
)
def test_pins_are_within_the_ranges_of_the_same_packages(file, ranges):
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    allowed = {r.name: r for r in map(Requirement, ranges)}
    assert {pin.name for pin in pins} == set(allowed)
    for pin in pins:
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert allowed[pin.name].specifier.contains(exact.version, prereleases=True)
        assert allowed[pin.name].extras == pin.extras


@pytest.mark.parametrize("target", PROJECT["scripts"].values())
def test_console_commands_exist(target):
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the suite, built from a copy of the clone without a network."""
    setuptools = pytest.importorskip("setuptools")
    if Version(setuptools.__version__) < Version("77"):
        pytest.skip("setuptools is older than pyproject.toml requires")
    clone = tmp_path_factory.mktemp("clone")
    for name in (*FOLDERS, "fp8_suite"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    program = "from setuptools import build_meta; build_meta.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = clone.glob("*.whl")
    return file


def test_a_wheel_holds_all_that_the_suite_reads_under_one_name(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0].split("-")[0] for name in names} == {"fp8_suite", "fp8_training_suite"}
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in READ]
    expected = {f"fp8_suite/{path.relative_to(ROOT).as_posix()}" for path in sources}
    scripts = {f"fp8_suite/{name}" for name in ("__init__.py", "train_fp8.py", "train_multi_gpu.py")}
    assert expected | scripts <= names
    assert {Path(name).suffix for name in expected} == READ


def test_an_installed_suite_works_beside_other_packages_of_its_folders_names(wheel, tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("core/errors.py", "data/__init__.py", "training/config.py"):
        for root in (site, project):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("raise ImportError('of another package')")

    def run(*command: str) -> str:
        options = {"cwd": project, "env": os.environ | {"PYTHONPATH": str(site)}}
        done = subprocess.run([sys.executable, *command], **options, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "--model_name" in run("-m", "fp8_suite.train_fp8", "--help")
    assert "--sharding_mode" in run("-m", "fp8_suite.train_multi_gpu", "--help")
    digest = "from fp8_suite.core.packages import ROOT, code_digest; print(ROOT, code_digest())"
    assert run("-c", digest).split() == [str(site / "fp8_suite"), code_digest()]

"""pyproject.toml and the requirements files agree."""

import importlib

import pytest
from fp8_suite.core.packages import ROOT
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib")  # Python 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("file", "ranges"),
    [
        ("requirements.txt", PROJECT["dependencies"] + EXTRAS["dev"]),
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

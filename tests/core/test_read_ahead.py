import subprocess
import sys

from fp8_suite.core import read_ahead
from fp8_suite.core.packages import ROOT


def test_bytecode_and_libraries_of_a_package_are_read_without_importing_it(monkeypatch, tmp_path):
    package = tmp_path / "torch"
    used = [package / "__pycache__" / "__init__.cpython-311.pyc", package / "lib" / "libtorch.so.2"]
    for path in (*used, package / "__init__.py", package / "test" / "__pycache__" / "a.pyc"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise ImportError")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert sorted(read_ahead.files("torch")) == sorted(map(str, used))
    assert list(read_ahead.files("absent")) == []
    command = [sys.executable, "-S", str(ROOT / "core" / "read_ahead.py"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_large_libraries_are_read_in_parts(tmp_path):
    part = read_ahead.PART
    sizes = {"torch/lib/libtorch.so": 3, "nvidia/cudnn/lib/libcudnn.so.9": 2, "nvidia/lib/libcublas.so.13": 3}
    for name, count in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(2 * part + 1)
        assert len(read_ahead.parts(str(path))) == count

"""The first second of every command: missing packages and Ctrl-C."""

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from fp8_suite.core.packages import ROOT

from tests.children import running

COMMANDS = [
    *(["train_fp8.py"], ["train_multi_gpu.py", "--help"]),
    *(
        ["-m", f"benchmarks.{name}"]
        for name in ("compare", "evaluate", "sweep", "report", "plan", "throughput", "peers")
    ),
    *(["-m", f"benchmarks.{name}"] for name in ("chart", "records.add")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_missing_packages_are_one_line_with_the_command_that_installs_them(command):
    bare = [sys.executable, "-S"]  # without site-packages
    done = subprocess.run([*bare, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    command = f"error: missing packages; install: {sys.executable} -m pip install torch transformers datasets"
    assert done.stderr.startswith(command)
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ([f"PYTHON={sys.executable} -S"], "error: missing packages; install: "),
        ([f"PYTHON={sys.executable}", "ARGS=--max_step 3"], "error: unknown flag --max_step; did you mean"),
    ],
)
def test_make_train_refuses_before_it_looks_for_a_gpu(variables, error):
    done = subprocess.run(["make", "train", *variables], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(error)
    from_make = re.compile(r"make(\[\d+\])?: \*\*\*")  # with a number if the tests run in make themselves
    assert [line for line in done.stderr.splitlines()[1:] if not from_make.match(line)] == []


@pytest.mark.parametrize(
    ("command", "busy"),
    [
        (["train_fp8.py"], "yaml"),  # settings are parsed
        (["train_fp8.py"], "numpy"),  # libraries load
        (["-m", "benchmarks.sweep"], "yaml"),
        (["-m", "benchmarks.report"], "matplotlib"),
    ],
)
def test_ctrl_c_while_modules_load_is_silent(command, busy, tmp_path):
    (tmp_path / f"{busy}.py").write_text("import time; print('loading', flush=True); time.sleep(60)")
    code = f"""
import runpy, sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
sys.argv = {command!r}[-1:]
run = runpy.run_module if {command!r}[0] == "-m" else runpy.run_path
run({command!r}[-1], run_name="__main__")
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with running([sys.executable, "-c", code], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "loading\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode in (130, -signal.SIGINT)

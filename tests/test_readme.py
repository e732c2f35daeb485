"""The README's commands run as written, on a tiny model and few rows."""

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from fp8_suite.benchmarks.launch import grid
from fp8_suite.core.packages import ROOT
from fp8_suite.training import outcome
from torch.distributed import run as distributed_run

from tests.benchmarks.folders import launch_here
from tests.children import forked, preload
from tests.training.parallel.jobs import LIMIT, redirect

preload(__name__)

BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
TEXT = "\n".join(BLOCKS).replace("\\\n", " ")
# Commands but `make` and `pip`, with the lines shown below them; tests/training/doctor runs the doctor.
COMMANDS = re.findall(
    r"^(?:\$ )?(\S*(?:python|torchrun) .*)\n((?:(?:[|-]|PASS).*\n|\n(?=\|))*)", TEXT, re.MULTILINE
)
COMMANDS = [(command, shown) for command, shown in COMMANDS if "training.doctor" not in command]
# What is added to a command; later flags win.
FEW = " --max_steps 2 --num_of_samples 24 --eval_samples 4 --num_workers 0"
TINY = f" --model_name tiny-llama --dataset_name demo{FEW}"
ADDED = {
    "train_fp8.py": f"{TINY}",
    "train_multi_gpu.py": TINY,
    "benchmarks.compare": f"{FEW} --variants bf16,delayed --paired_seeds 1",
    "benchmarks.plan": "",
}


def find_program(command: str) -> str:
    return next(word for word in command.split() if word in ADDED)


def return_or_exit(code: int) -> None:
    """Return from a rank that succeeded: torchrun waits for the result of a rank that it forked."""
    if code:
        os._exit(code)


def execute(words: list[str], folder: Path) -> None:
    """Run a command in this process, which has imported everything, in `folder`."""
    redirect(folder / "output")
    os.chdir(folder)
    torch.set_num_threads(1)
    grid.launch = launch_here
    program, *sys.argv = (word for word in words if word != "-m")
    if program == "torchrun":
        outcome.exit_process = return_or_exit
        distributed_run.main(["--start_method=fork", "--run_path", *sys.argv])
    elif "-m" in words:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=map(str, range(len(COMMANDS))))
def test_a_command_runs_as_written(command, shown, tmp_path):
    link_scripts(tmp_path)
    with forked(execute, shlex.split(command + ADDED[find_program(command)]), tmp_path) as child:
        child.join(LIMIT)
        code, printed = child.exitcode, (tmp_path / "output").read_text()
    assert code == 0, printed
    check(command, shown, tmp_path, printed)


def link_scripts(folder: Path) -> None:
    for name in ("configs", "train_fp8.py", "train_multi_gpu.py"):
        (folder / name).symlink_to(ROOT / name)


def check(command: str, shown: str, folder: Path, printed: str) -> None:
    """Check what a command wrote to `folder` and printed, beside what the README shows."""
    program = find_program(command)
    if program.endswith(".py"):
        (summary,) = folder.glob("runs/*/summary.json")
        assert json.loads(summary.read_text())["steps"] == 2 and summary.with_name("export").is_dir()
    elif program == "benchmarks.plan":
        assert shown.count("\n") == 4 and shown in printed
    else:
        assert (folder / "compared/demo/report.html").exists()
        answer, table = shown.split("\n\n")
        assert answer.startswith("PASS for delayed: ") and " for delayed: " in printed
        headings = next(line for line in printed.splitlines() if line.startswith("| variant "))
        # On a GPU there are more: rates, which an emulated run does not have.
        assert set(table.splitlines()[0].split()) <= set(headings.split())


def test_every_kind_of_command_is_in_the_readme():
    assert {find_program(command) for command, _ in COMMANDS} == set(ADDED)

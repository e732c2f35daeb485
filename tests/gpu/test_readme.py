"""The README's commands run as written on GPUs, on a tiny model and few rows."""

import os
import subprocess
import sys

import pytest
import torch
from fp8_suite.core.packages import ROOT

from tests.children import running
from tests.test_readme import ADDED, COMMANDS, check, find_program, link_scripts


@pytest.mark.gpu
@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=map(str, range(len(COMMANDS))))
def test_a_command_runs_as_written(command, shown, tmp_path):
    program = find_program(command)
    if program == "train_multi_gpu.py" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    link_scripts(tmp_path)
    command = command.replace("torchrun", "python -m torch.distributed.run")
    words = f"{command}{ADDED[program]}".replace("python", sys.executable, 1)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with running(words, shell=True, cwd=tmp_path, env=environment, **output) as process:
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    check(command, shown, tmp_path, printed)
    if program == "train_fp8.py":
        assert ", Transformer Engine layers, on cuda" in printed

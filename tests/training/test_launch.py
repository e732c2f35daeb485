"""The training scripts parse their command line before torch is imported, once."""

import gc
import sys
import traceback
from pathlib import Path

import pytest
import torch
from fp8_suite.core.packages import ROOT
from fp8_suite.training.launch import parse_early

from fp8_suite import train_fp8


def test_settings_are_parsed_except_under_torchrun_where_ranks_report_errors_together(monkeypatch, tmp_path):
    (tmp_path / "settings.yaml").write_text("max_steps: 3")
    monkeypatch.delenv("RANK", raising=False)
    for words in (["--max_steps", "3"], [f"--config={tmp_path}/settings.yaml"]):
        monkeypatch.setattr(sys, "argv", ["train_fp8.py", *words])
        assert parse_early("description").optim.max_steps == 3
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--max_step", "3"])
    assert parse_early("description") is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch_size 0", "--batch_size 0: must be at least 1"),
        ("--model_name ./none", "--model_name ./none: there is no such folder"),
        ("--model_name tiny-lama", "--model_name tiny-lama: there is no such preset or folder; did you mean"),
        ("--init pretrained", "--init pretrained: the preset tiny-llama has no weights"),
        ("--global_batch_size 7 --batch_size 2", "cannot be shared by 1 rank; use 8 sequences"),
        ("--grad_reduce_dtype fp8", "--grad_reduce_dtype fp8: one device exchanges no gradients"),
        ("--tokenizer_name /none", "--tokenizer_name /none: there is no such folder"),
        ("--dataset_name none.csv", "--dataset_name none.csv: no such file"),
        ("--dataset_name README.md", "--dataset_name README.md: not a data file"),
        ("--deepspeed_config none.json --sharding_mode deepspeed", "no such file; ds_configs/ has"),
        ("--deepspeed_config README.md --sharding_mode deepspeed", "not valid JSON"),
    ],
)
def test_wrong_inputs_are_refused_at_once(flags, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", *flags.split()])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        parse_early("description")
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_few_frames_lie_between_the_command_and_backward(monkeypatch, tmp_path):
    """A traceback, or a reader, passes them all."""
    files = []

    def backward(self):
        assert gc.isenabled(), "collection was disabled while libraries were loading"
        files.extend(frame.filename for frame in traceback.extract_stack())
        raise ArithmeticError

    flags = "--max_steps 1 --num_of_samples 20 --max_seq_length 128 --num_proc 1 --num_workers 0"
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", *flags.split(), "--output_dir", str(tmp_path / "run")])
    monkeypatch.setattr("fp8_suite.training.outcome.exit_process", pytest.fail)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with pytest.raises(ArithmeticError):
        train_fp8.main()
    in_clone = [Path(file).relative_to(ROOT).parts for file in files if Path(file).is_relative_to(ROOT)]
    frames = [parts for parts in in_clone if parts[0] not in ("tests", ".venv")]
    assert frames[0] == ("fp8_suite", "train_fp8.py") and len(frames) <= 7, frames

"""The training scripts parse their command line before torch is imported, once."""

import gc
import subprocess
import sys

import pytest
from fp8_suite.core.packages import ROOT
from fp8_suite.training.launch import launch, parse_early


def test_settings_are_parsed_except_under_torchrun_where_ranks_report_errors_together(monkeypatch, tmp_path):
    (tmp_path / "settings.yaml").write_text("max_steps: 3")
    monkeypatch.delenv("RANK", raising=False)
    for words in (["--max_steps", "3"], [f"--config={tmp_path}/settings.yaml"]):
        monkeypatch.setattr(sys, "argv", ["train_fp8.py", *words])
        assert parse_early("description").optim.max_steps == 3
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--max_step", "3"])
    assert parse_early("description") is None


def test_a_wrong_value_ends_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--batch_size", "0"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        parse_early("description")
    assert capsys.readouterr().err == "error: --batch_size 0: must be at least 1\n"


def test_garbage_is_collected_again_once_libraries_are_loaded(monkeypatch):
    ended = []
    monkeypatch.setattr(sys, "argv", ["train_fp8.py"])
    monkeypatch.setattr("fp8_suite.training.run.main", lambda *_, **__: gc.isenabled())
    monkeypatch.setattr("fp8_suite.training.outcome.exit_process", ended.append)
    launch("description", start=None, started=0.0)
    assert ended == [True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model_name ./none", "--model_name ./none: there is no such folder"),
        ("--model_name tiny-lama", "--model_name tiny-lama: there is no such preset or folder; did you mean"),
        ("--init pretrained", "--init pretrained: the preset tiny-llama has no weights"),
        ("--max_seq_length 4096", "--max_seq_length 4096: the model has only 2048 positions"),
        ("--recompute layer:4", "--recompute layer:4: for 4 layers, but the model has 3; give fewer"),
        ("--global_batch_size 7 --batch_size 2", "each of 1 rank has 7 sequences per step; use --batch_"),
        ("--grad_reduce_dtype fp8", "--grad_reduce_dtype fp8: one device exchanges no gradients"),
        ("--tokenizer_name /none", "--tokenizer_name /none: there is no such folder"),
        ("--dataset_name none.csv", "--dataset_name none.csv: no such file"),
        ("--dataset_name README.md", "--dataset_name README.md: not a data file"),
        (
            "--deepspeed_config none.json --sharding_mode deepspeed",
            "no such file; ds_configs/ has ds_configs/",
        ),
        ("--deepspeed_config README.md --sharding_mode deepspeed", "not valid JSON"),
    ],
)
def test_what_needs_no_torch_is_refused_before_it_is_imported(flags, message):
    program = f"""
import sys
from fp8_suite.training.launch import parse_early
sys.argv = {["train_fp8.py", *flags.split()]}
try:
    parse_early("")
finally:
    assert not {{"torch", "datasets", "transformers", "pandas"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr

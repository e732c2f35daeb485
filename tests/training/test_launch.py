"""What the training scripts answer before torch is imported, and what they leave to the run."""

import gc
import sys

import pytest

from training.launch import answer_early, launch


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--max_steps", "3"], {}),
        (["--config", "/dev/null/settings.yaml"], {}),  # it may be a pipe, which can be read once
        (["--config=settings.yaml"], {}),
        (["--max_step", "3"], {"RANK": "1"}),  # ranks find an error together
    ],
)
def test_it_leaves_these_to_the_run(words, environment, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", *words])
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    answer_early("description")


def test_a_wrong_value_ends_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--batch_size", "0"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        answer_early("description")
    assert capsys.readouterr().err == "error: --batch_size 0: must be at least 1\n"


def test_garbage_is_collected_again_once_libraries_are_loaded(monkeypatch):
    ended = []
    monkeypatch.setattr(sys, "argv", ["train_fp8.py"])
    monkeypatch.setattr("training.run.main", lambda *_, **__: gc.isenabled())
    monkeypatch.setattr("training.outcome.exit_process", ended.append)
    launch("description", start=None, started=0.0)
    assert ended == [True]

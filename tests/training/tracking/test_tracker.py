"""Metrics survive kills, full disks and failing services; records contain no secrets."""

import errno
import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from importlib import metadata

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.training.tracking import display, tracker
from fp8_suite.training.tracking.display import Display
from fp8_suite.training.tracking.environment import describe_environment, git_state
from fp8_suite.training.tracking.metrics import perplexity, tail_mean
from fp8_suite.training.tracking.settings import LogConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.full_disk import disk_that_takes

TOKEN = "hf_" + "AbCdEfGh" * 4
LOGGED = {"train/loss": 1.23456, "train/grad_norm": 0.5, "train/learning_rate": 1e-5, "perf/mfu_bf16": 0.381}


def build(folder, resume_step=None, *, config=None, tags=(), evaluates_again=False, **settings):
    return tracker.build_tracker(
        LogConfig(**settings),
        folder,
        config=config or {},
        tags=list(tags),
        resume_step=resume_step,
        evaluates_again=evaluates_again,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def logged(tmp_path):
    """Folder of a run that logged steps 1 to 4."""
    log = build(tmp_path)
    for step in (1, 2, 3, 4):
        log.log(step, {"train/loss": float(step)})
    log.log(4, {"eval/loss": 9.0})
    log.summary({"steps": 4})
    log.finish()
    return tmp_path


def test_each_line_is_strict_json_on_disk_when_it_is_logged(tmp_path):
    log = build(tmp_path)
    for step in (10, 20):
        log.log(step, {"loss": math.nan, "x": math.inf, "y": -math.inf, "note": "a\nb"})
        text = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
        record = json.loads(text, parse_constant=pytest.fail)
        assert record.pop("time") == pytest.approx(time.time(), abs=1000)
        assert record == {"step": step, "loss": "NaN", "x": "Infinity", "y": "-Infinity", "note": "a\nb"}
    log.summary({"loss": math.nan, "rows": [{"x": math.inf}], "none": None})
    log.finish()
    log.finish()
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary == {"loss": "NaN", "rows": [{"x": "Infinity"}], "none": None}


@pytest.mark.parametrize(
    ("torn", "saved"),
    [('{"step": 5, "tra', []), ('{"step": 5, "train/loss": 5}', [5]), ("[5]", [])],
    ids=["half", "whole", "not a record"],
)
def test_a_resume_discards_later_lines_and_torn_ones(torn, saved, logged):
    with (logged / "metrics.jsonl").open("a") as file:
        file.write(torn)
    kept, discarded = logged / "metrics.jsonl", logged / "metrics.discarded.jsonl"
    log = build(logged, resume_step=2)
    assert not (logged / "summary.json").exists()
    assert json.loads((logged / "summary.previous.json").read_text()) == {"steps": 4}
    log.log(3, {"train/loss": 30.0})
    log.finish()
    assert [(line["step"], line["train/loss"]) for line in lines(kept)] == [(1, 1), (2, 2), (3, 30)]
    assert [line["step"] for line in lines(discarded)] == [3, 4, 4, *saved]
    build(logged, resume_step=1).finish()  # a second one adds to what was discarded
    assert [line["step"] for line in lines(kept)] == [1]
    assert [line["step"] for line in lines(discarded)] == [3, 4, 4, *saved, 2, 3]
    build(logged).finish()  # a new run in an old folder starts with an empty log
    assert lines(kept) == [] and [line["step"] for line in lines(discarded)][-1] == 1


def test_a_resume_that_evaluates_again_discards_the_evaluation_of_its_step(logged):
    build(logged, resume_step=4, evaluates_again=True).finish()
    assert [line["step"] for line in lines(logged / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line["eval/loss"] for line in lines(logged / "metrics.discarded.jsonl")] == [9.0]


def test_a_resume_that_fails_half_way_loses_no_line(logged, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tracker, "replace_file", full)
    build(logged, resume_step=4).finish()  # an unchanged file is not rewritten
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device; free space"):
        build(logged, resume_step=1)
    everywhere = lines(logged / "metrics.jsonl") + lines(logged / "metrics.discarded.jsonl")
    assert {line["step"] for line in everywhere} == {1, 2, 3, 4}


def test_a_full_disk_is_one_error_and_a_resume_has_complete_lines(tmp_path):
    log = build(tmp_path)
    log.log(1, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    with disk_that_takes(path.stat().st_size + 10):
        with pytest.raises(UserError, match=r"metrics\.jsonl: File too large; free space"):
            log.log(2, {"train/loss": 2.0})
        with pytest.raises(UserError, match=r"summary\.json: File too large; free space"):
            log.summary({"note": "x" * 200})
    log = build(tmp_path, resume_step=1)
    log.log(2, {"train/loss": 2.0})
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_perplexity_of_large_losses():
    assert perplexity(2.0) == pytest.approx(7.389056) and perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize(("count", "expected"), [(1, 1.0), (20, 19.5), (29, 28.5), (30, 29.0)])
def test_the_tail_mean_covers_the_last_tenth(count, expected):
    assert tail_mean([float(i) for i in range(1, count + 1)]) == expected


def test_a_failed_run_does_not_wait_for_uploads(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "FAILED_RUN_SECONDS", 0.1)
    released, codes = threading.Event(), []

    class Slow:
        def finish(self, exit_code):
            codes.append(exit_code)
            released.wait(300)

    log = tracker.Tracker(tracker.JsonlWriter(tmp_path, None))
    log.add_service("W&B", Slow)
    log.give_up(1)
    assert codes == [1] and not released.is_set()
    released.set()


def test_tensorboard_has_the_metrics_and_hides_what_a_resume_repeats(tmp_path):
    log_dir = tmp_path / "tensorboard"
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2,))):
        log = build(tmp_path / "run", resume_step, log_dir=str(log_dir))
        for step in steps:
            log.log(step, {"train/loss": 1.0 / step})
        log.summary({"steps": steps[-1]})
        log.finish()
    events = EventAccumulator(str(log_dir)).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]


def test_the_environment_is_json_without_secrets(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--model_name", f"https://me:{TOKEN}@h/m o"])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCH_HOME", f"/{TOKEN}")
    facts = json.loads(json.dumps(describe_environment()))
    assert facts["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PATH" not in facts["variables"] and TOKEN not in json.dumps(facts)
    assert shlex.split(facts["command"]) == ["train_fp8.py", "--model_name", "https://***@h/m o"]
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["gpu_count"] == torch.cuda.device_count()


def test_git_state_is_that_of_the_folder_s_own_repository(tmp_path):
    def git(*arguments):
        author = ["-c", "user.name=Tester", "-c", "user.email=tester@example.com"]
        subprocess.run(["git", *author, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    (tmp_path / "file").write_text("1")
    git("init")
    git("add", "file")
    git("commit", "-m", "first")
    (tmp_path / "untracked").write_text("")
    state = git_state(tmp_path.resolve())
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path.resolve()) == state | {"dirty": True}
    (tmp_path / "inside").mkdir()
    assert git_state(tmp_path.resolve() / "inside") is None


def test_progress_is_a_line_per_log_with_the_time_left(capsys, monkeypatch):
    clock = iter([50.0, 70.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    progress = Display(1000, initial=900, enabled=True)
    progress.update(910, LOGGED | {"perf/tokens_per_second": 14376.4, "perf/unknown": 1})
    progress.message("eval loss 1.0")
    line, message = capsys.readouterr().out.splitlines()
    # 10 steps of this launch in 20 s, 90 to go.
    assert line.startswith("step 910/1000 | loss 1.2346") and line.endswith("left 0:03:00")
    assert "14,376 tokens/s" in line and message == "eval loss 1.0"
    assert display.progress_texts({"emulated/tokens_per_second": 7.0}) == ["7 tokens/s (emulated)"]

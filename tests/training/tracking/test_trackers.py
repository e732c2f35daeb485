"""Metrics survive kills, full disks and W&B's outages; secrets never leave the machine."""

import errno
import http.server
import io
import json
import math
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core.errors import UserError
from training.tracking import display, wandb_writer, writers
from training.tracking import tracker as trackers
from training.tracking.display import Display
from training.tracking.environment import describe_environment, git_state
from training.tracking.settings import LogConfig
from training.tracking.tracker import build_tracker


def build(folder, resume_step=None, *, config=None, tags=(), enabled=True, **settings):
    return build_tracker(
        LogConfig(**settings),
        folder,
        config=config or {},
        tags=list(tags),
        resume_step=resume_step,
        enabled=enabled,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def strict(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_each_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    tracker = build(tmp_path)
    for step in (10, 20):
        tracker.log(step, {"train/loss": 1.5, "note": "a\nb"})
        record = lines(tmp_path / "metrics.jsonl")[-1]
        assert record.pop("time") == pytest.approx(1.76e9, rel=0.5)
        assert record == {"step": step, "train/loss": 1.5, "note": "a\nb"}
    tracker.summary({"steps": 20, "eval_loss": None})
    tracker.finish()
    tracker.finish()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 20, "eval_loss": None}


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    tracker = build(tmp_path)
    tracker.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    tracker.summary({"loss": math.nan, "rows": [{"x": math.inf}]})
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=strict)
    assert [record[key] for key in "abc"] == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(float(record["a"])) and float(record["c"]) == -math.inf
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=strict)
    assert summary == {"loss": "NaN", "rows": [{"x": "Infinity"}]}


def test_other_ranks_write_nothing(tmp_path):
    folder = tmp_path / "run"
    tracker = build(folder, enabled=False, use_wandb=True, log_dir=str(tmp_path / "tensorboard"))
    tracker.log(1, {"train/loss": 1.0})
    tracker.summary({"steps": 1})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("torn", "saved"),
    [('{"step": 5, "tra', []), ('{"step": 5, "train/loss": 5}', [5])],
    ids=["half", "no newline"],
)
def test_resume_moves_later_lines_aside_and_drops_a_torn_one(torn, saved, tmp_path):
    tracker = build(tmp_path)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"train/loss": float(step)})
    tracker.summary({"steps": 4})
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)

    tracker = build(tmp_path, resume_step=2)
    assert not (tmp_path / "summary.json").exists()
    assert json.loads((tmp_path / "summary.previous.json").read_text()) == {"steps": 4}
    tracker.log(3, {"train/loss": 30.0})
    tracker.finish()
    kept, discarded = tmp_path / "metrics.jsonl", tmp_path / "metrics.discarded.jsonl"
    assert [(line["step"], line["train/loss"]) for line in lines(kept)] == [(1, 1), (2, 2), (3, 30)]
    assert [line["step"] for line in lines(discarded)] == [3, 4, *saved]

    build(tmp_path, resume_step=1).finish()  # a second rewind adds to what was discarded
    assert [line["step"] for line in lines(kept)] == [1]
    assert [line["train/loss"] for line in lines(discarded)] == [3, 4, *saved, 2, 30]

    build(tmp_path, resume_step=None).finish()  # a new run in an old folder starts with an empty file
    assert lines(kept) == [] and len(lines(discarded)) == 5 + len(saved)


def test_a_resume_killed_half_way_loses_no_line(tmp_path, monkeypatch):
    tracker = build(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish()
    replaced = []

    def killed_at_the_second_file(path, content):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(path)
        write(path, content)

    write = writers.replace_file
    monkeypatch.setattr(writers, "replace_file", killed_at_the_second_file)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, resume_step=1)
    everywhere = lines(tmp_path / "metrics.jsonl") + lines(tmp_path / "metrics.discarded.jsonl")
    assert {line["step"] for line in everywhere} == {1, 2, 3}


def test_a_resume_rewrites_no_file_in_vain_and_tells_of_a_full_disk(tmp_path, monkeypatch):
    tracker = build(tmp_path)
    for step in (1, 2):
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish()

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writers, "replace_file", full)
    build(tmp_path, resume_step=2).finish()
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device; free space"):
        build(tmp_path, resume_step=1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_full_disk_stops_with_the_reason_and_leaves_whole_lines(tmp_path):
    tracker = build(tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"metrics\.jsonl: File too large; free space"):
            tracker.log(2, {"train/loss": 2.0})
        with pytest.raises(UserError, match=r"summary\.json: File too large; free space"):
            tracker.summary({"note": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.log(3, {"train/loss": 3.0})
    assert [line["step"] for line in lines(path)] == [1, 3]


HUGGING_FACE_TOKEN = "hf_" + "AbCdEfGh" * 4
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(monkeypatch):
    """W&B as on a machine without network; secrets where W&B could pick them up."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(
        sys, "argv", ["train_fp8.py", "--model_name", f"https://me:{HUGGING_FACE_TOKEN}@host/m"]
    )
    yield
    wandb.teardown()


def wandb_bytes(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_wandb_offline_writes_a_run_without_secrets_and_resume_continues_it(tmp_path, offline, capsys):
    folder = tmp_path / "my-run"
    settings = {"use_wandb": True, "wandb_tags": "x, y", "wandb_group": "my-group"}
    config = {"model_name": f"https://me:{HUGGING_FACE_TOKEN}@host/m", "learning_rate": 0.125}
    tracker = build(folder, config=config, tags=["fp8-tag"], **settings)
    tracker.log(10, {"train/loss": 1.5, "fp8/amax": math.nan})
    tracker.summary({"train_loss": 1.25})
    tracker.finish()
    run_id = (folder / "wandb_id.txt").read_text().strip()

    tracker = build(folder, resume_step=10, **settings)
    tracker.log(20, {"train/loss": 1.0})
    tracker.finish(exit_code=1)
    tracker = build(folder, **settings)  # of no checkpoint, as it died before its first
    tracker.summary({"train_loss": 1.0})
    tracker.finish()
    build(folder, **settings).finish()

    files = sorted(path.name for path in folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert files.count(f"run-{run_id}.wandb") == 3
    assert len(set(files)) == 2, "a new run in the folder of a finished one must not continue its W&B run"
    written = wandb_bytes(folder)
    for text in ("my-run", "my-group", "fp8-tag", "llm-fp8", "train/step", "train_loss", "***@host"):
        assert text.encode() in written, text
    for secret in (HUGGING_FACE_TOKEN, WANDB_KEY):
        assert secret.encode() not in written
    assert "WARNING" not in capsys.readouterr().err


PRINTS_A_TOKEN = """
from pathlib import Path
from training.tracking.settings import LogConfig
from training.tracking.tracker import build_tracker
folder = Path({folder!r})
tracker = build_tracker(LogConfig(use_wandb=True), folder, config={{}}, tags=[], resume_step=None)
print({token!r}, flush=True)
tracker.finish()
"""


def test_wandb_does_not_copy_the_terminal(tmp_path, offline):
    # In a process of its own, because pytest's capture hides the terminal from W&B.
    script = PRINTS_A_TOKEN.format(folder=str(tmp_path), token=HUGGING_FACE_TOKEN)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert HUGGING_FACE_TOKEN in done.stdout
    assert HUGGING_FACE_TOKEN.encode() not in wandb_bytes(tmp_path)


class Failing(http.server.BaseHTTPRequestHandler):
    """Its front page is there; what W&B asks for is out of order, if it answers at all."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        if self.server.answers == 0:
            self.server.silence.wait()
        self.server.answers -= 1
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def broken_server(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.status, server.answers, server.silence = 503, 99, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wandb.teardown()  # the settings are read once a process
    yield server
    server.silence.set()
    server.shutdown()
    server.server_close()
    wandb.teardown()


@pytest.mark.parametrize("outage", ["nobody listens", "server error", "silence"])
def test_wandb_out_of_reach_is_one_warning_and_the_run_is_kept_for_it(
    outage, tmp_path, monkeypatch, capsys, broken_server
):
    url = os.environ["WANDB_BASE_URL"]
    if outage == "nobody listens":
        monkeypatch.setenv("WANDB_BASE_URL", url := "http://127.0.0.1:9")
    if outage == "silence":
        broken_server.answers = 0
        monkeypatch.setattr(wandb_writer, "SERVER_SECONDS", 0.5)
    reason = {
        "nobody listens": "does not answer (ConnectionError)",
        "server error": "is out of order (HTTP 503)",
        "silence": "does not answer (ReadTimeout)",
    }[outage]
    tracker = build(tmp_path, use_wandb=True, wandb_mode="online")
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    shown = capsys.readouterr().err
    assert shown.count("WARNING") == 1 and f"WARNING: W&B: {url} {reason}; logging offline to" in shown
    wandb.teardown()  # waits for its service, which writes the file
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in written.read_bytes()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


def test_wandb_that_falls_silent_later_does_not_hold_a_run_up(tmp_path, monkeypatch, capsys, broken_server):
    broken_server.status, broken_server.answers = 200, 1
    monkeypatch.setattr(wandb_writer, "INIT_SECONDS", 1.0)
    tracker = build(tmp_path, use_wandb=True, wandb_mode="online")
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    shown = capsys.readouterr().err
    assert "WARNING: W&B failed and is disabled" in shown and "not done within 1 s" in shown
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


def test_wandb_that_refuses_to_start_or_breaks_down_is_one_warning(tmp_path, offline, capsys):
    # A project name W&B refuses, so that wandb.init itself raises.
    tracker = build(tmp_path / "refused", use_wandb=True, wandb_project="a/b:c")
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish()
    assert capsys.readouterr().err.count("WARNING: W&B failed") == 1

    tracker = build(tmp_path / "broken", use_wandb=True)
    wandb.run.finish()  # logging to a finished run raises
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert capsys.readouterr().err.count("WARNING: W&B failed") == 1
    assert [line["step"] for line in lines(tmp_path / "broken" / "metrics.jsonl")] == [1, 2, 3]


def test_a_failed_run_waits_for_no_upload_and_is_marked_as_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "FAILED_RUN_SECONDS", 0.2)
    held, codes = threading.Event(), []

    class Slow:
        def finish(self, exit_code):
            codes.append(exit_code)
            held.wait(60)

    tracker = trackers.Tracker(writers.JsonlWriter(tmp_path, None), {"W&B": Slow()})
    began = time.monotonic()
    tracker.give_up(1)
    assert time.monotonic() - began < 30 and codes == [1]
    held.set()


@pytest.mark.parametrize("found", [None, types.ModuleType("wandb")], ids=["missing", "a folder named wandb"])
def test_wandb_not_installed_is_an_error_before_anything_is_written(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(UserError, match=r"--use_wandb: wandb is not usable.*; run: pip install wandb"):
        build(tmp_path / "run", use_wandb=True)
    assert not (tmp_path / "run").exists()


def read_events(folder):
    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return scalars, events.Tags()["tensors"]


def test_tensorboard_holds_the_metrics_and_hides_what_a_resume_repeats(tmp_path):
    log_dir = tmp_path / "tensorboard"
    for resume_step, steps in ((None, (0, 1, 2, 3, 4)), (None, (1, 2, 3)), (1, (2,))):
        tracker = build(tmp_path / "run", resume_step, log_dir=str(log_dir))
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / max(step, 1), "note": "text"})
        tracker.summary({"steps": steps[-1]})
        tracker.finish()
    scalars, texts = read_events(log_dir)
    assert scalars == {"train/loss": [(1, 1.0), (2, 0.5)]}
    assert "note/text_summary" in texts


def test_tensorboard_that_cannot_write_is_one_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    tracker = build(tmp_path / "run", log_dir=str(tmp_path / "file"))
    tracker.log(1, {"train/loss": 1.0})
    assert capsys.readouterr().err.count("WARNING: TensorBoard failed") == 1
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


def test_describe_environment_is_json_and_has_no_secrets(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["train_fp8.py", "--model_name", f"https://me:{HUGGING_FACE_TOKEN}@h/m o"]
    )
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCH_HOME", f"/{HUGGING_FACE_TOKEN}")
    found = json.loads(json.dumps(describe_environment()))
    assert found["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PATH" not in found["variables"]
    assert HUGGING_FACE_TOKEN not in json.dumps(found)
    assert shlex.split(found["command"]) == ["train_fp8.py", "--model_name", "https://***@h/m o"]
    import torch

    assert found["versions"]["torch"] == torch.__version__
    assert (found["gpu_name"] is not None) == torch.cuda.is_available()
    assert found["gpu_count"] == len(found["gpus"]) == torch.cuda.device_count()


def git(folder, *arguments):
    author = ["-c", "user.name=Tester", "-c", "user.email=tester@example.com"]
    subprocess.run(["git", *author, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_git_state_knows_commit_and_changes_and_takes_no_other_repository(tmp_path):
    root = tmp_path.resolve()
    assert git_state(root) is None
    git(root, "init")
    (root / "file").write_text("1")
    git(root, "add", "file")
    git(root, "commit", "-m", "first")
    (root / "untracked").write_text("")
    state = git_state(root)
    assert len(state["commit"]) == 40 and state["dirty"] is False
    (root / "file").write_text("2")
    assert git_state(root) == {"commit": state["commit"], "dirty": True}
    (root / "inside").mkdir()
    assert git_state(root / "inside") is None


METRICS = {"train/loss": 1.23456, "train/grad_norm": 0.5, "train/learning_rate": 1e-5, "perf/mfu_bf16": 0.381}


def test_progress_prints_plain_lines_away_from_a_terminal(capsys):
    progress = Display(1000, initial=100)
    progress.update(101, {})
    progress.update(110, METRICS | {"perf/tokens_per_second": 14376.4, "perf/unknown": 1})
    progress.message("eval loss 1.0")
    progress.close()
    first, second = capsys.readouterr().out.splitlines()
    shown = (
        "step 110/1000 | loss 1.2346 | grad norm 0.5 | lr 1.00e-05 | 14,376 tokens/s | MFU 38.1% | left 0:0"
    )
    assert first.startswith(shown) and second == "eval loss 1.0"


def test_progress_time_left_counts_the_steps_of_this_start(monkeypatch, capsys):
    clock = iter([50.0, 70.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    Display(1000, initial=900).update(910, METRICS)  # 10 steps in 20 s, 90 to go
    assert capsys.readouterr().out.rstrip().endswith("left 0:03:00")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_draws_a_bar_on_a_terminal(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Display(20, initial=5)
    progress.update(6, {})
    progress.update(10, METRICS)
    progress.message("checkpoint saved")
    progress.close()
    assert "10/20" in terminal.getvalue() and "loss 1.2346" in terminal.getvalue()
    assert capsys.readouterr().out == "checkpoint saved\n"


def test_progress_of_other_ranks_is_silent(capsys):
    progress = Display(20, initial=0, enabled=False)
    progress.update(10, METRICS)
    progress.message("text")
    progress.close()
    assert capsys.readouterr() == ("", "")

"""W&B: resumed runs continue theirs, secrets stay on the machine, and no outage stops training."""

import http.server
import math
import os
import sys
import threading

import pytest
import wandb
from fp8_suite.core.errors import UserError
from fp8_suite.training.tracking import tracker, wandb_writer

from tests.training.tracking.test_tracker import TOKEN, build, lines

KEY = "0123456789abcdef0123456789abcdef01234567"
MODEL = f"https://me:{TOKEN}@host/m"


@pytest.fixture
def offline(monkeypatch, wandb_offline):
    """Secrets where W&B could pick them up."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--model_name", MODEL])


def written_in(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_resumed_run_continues_its_wandb_run_and_uploads_no_secrets(tmp_path, offline, monkeypatch, capsys):
    folder = tmp_path / "my-run"
    settings = {"use_wandb": True}
    monkeypatch.setenv("WANDB_TAGS", "x,own-tag")
    monkeypatch.setenv("WANDB_RUN_GROUP", "my-group")
    log = build(folder, config={"model_name": MODEL, "learning_rate": 0.125}, tags=["fp8-tag"], **settings)
    log.log(10, {"train/loss": 1.5, "fp8/amax": math.nan})
    log.summary({"train_loss": 1.25})
    log.finish()
    run_id = (folder / "wandb_id.txt").read_text().strip()
    log = build(folder, resume_step=10, **settings)
    assert wandb.run.settings.console == "off", "the terminal's output is not uploaded"
    log.finish(exit_code=1)
    log = build(folder, **settings)  # killed before its first checkpoint
    log.summary({"train_loss": 1.0})
    log.finish()
    build(folder, **settings).finish()  # a new run in the folder of a finished one
    files = sorted(path.name for path in folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert files.count(f"run-{run_id}.wandb") == 3 and len(set(files)) == 2
    content = written_in(folder)
    for text in ("my-run", "my-group", "own-tag", "fp8-tag", "train/step", "train_loss", "***@host"):
        assert text.encode() in content, text
    assert TOKEN.encode() not in content and KEY.encode() not in content
    assert "WARNING" not in capsys.readouterr().err


class Failing(http.server.BaseHTTPRequestHandler):
    """A server with a front page, and an API that fails or stops answering."""

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
def server(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    server.status, server.answers, server.silence = 503, 99, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wandb.teardown()
    yield server
    server.silence.set()
    server.shutdown()
    server.server_close()
    wandb.teardown()


def log_one_step(folder, **settings):
    log = build(folder, use_wandb=True, **settings)
    log.log(1, {"train/loss": 1.0})
    log.finish()
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    ("outage", "problem"), [("refused", "ConnectionError"), ("error", "HTTP 503"), ("silence", "ReadTimeout")]
)
def test_an_unreachable_server_is_one_warning_and_the_run_is_logged_offline(
    outage, problem, tmp_path, monkeypatch, capsys, server
):
    if outage == "refused":
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if outage == "silence":
        server.answers = 0
        monkeypatch.setattr(wandb_writer, "SERVER_SECONDS", 0.2)
    log_one_step(tmp_path)
    warning = capsys.readouterr().err
    assert warning.count("WARNING") == 1 and os.environ["WANDB_BASE_URL"] in warning and problem in warning
    wandb.teardown()  # waits for its service, which writes the file
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in file.read_bytes()


def test_a_server_that_stops_answering_does_not_hold_a_run_up(tmp_path, monkeypatch, capsys, server):
    server.status, server.answers = 200, 1
    monkeypatch.setattr(wandb_writer, "INIT_SECONDS", 0.5)
    log_one_step(tmp_path)
    warning = capsys.readouterr().err
    assert "WARNING: W&B failed and is disabled" in warning and "TimeoutError" in warning


@pytest.mark.parametrize(("package", "flag"), [("wandb", "use_wandb"), ("tensorboard", "log_dir")])
def test_a_service_that_is_not_installed_is_refused(package, flag, tmp_path, monkeypatch):
    installed = tracker.version
    monkeypatch.setattr(tracker, "version", lambda name: None if name == package else installed(name))
    with pytest.raises(UserError, match=f"--{flag}.*: {package} is not installed; pip install {package}"):
        build(tmp_path, use_wandb=True, log_dir=str(tmp_path / "logs"))


def test_wandb_that_refuses_to_start_or_breaks_later_is_one_warning(tmp_path, offline, capsys):
    log_one_step(tmp_path / "refused", wandb_project="a/b:c")  # wandb.init raises
    assert capsys.readouterr().err.count("WARNING: W&B failed") == 1
    log = build(tmp_path / "broken", use_wandb=True)
    wandb.run.finish()  # logging to a finished run raises
    for step in (1, 2, 3):
        log.log(step, {"train/loss": 1.0})
    log.finish()
    assert capsys.readouterr().err.count("WARNING: W&B failed") == 1
    assert [line["step"] for line in lines(tmp_path / "broken" / "metrics.jsonl")] == [1, 2, 3]

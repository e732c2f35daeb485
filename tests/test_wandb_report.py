"""A comparison's verdict on W&B, written offline and read back from its files."""

import pytest
import wandb
from matplotlib.figure import Figure

from benchmarks.verdict import Row
from benchmarks.wandb_report import upload
from training.config import LogConfig

ROWS = [
    Row("bf16", "REFERENCE", None, "", {"train_loss": 2.5}),
    Row("delayed", "PASS", "bf16", "", {"train_loss": 2.505, "gap": 0.2}),
]


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # the settings are read once a process
    yield
    wandb.teardown()


def test_table_figures_and_page_are_one_run_of_the_group(tmp_path, offline, capsys):
    folder = tmp_path / "my-comparison"
    folder.mkdir()
    Figure().savefig(folder / "loss.png")
    (folder / "report.html").write_text("<p>a page of its own</p>")
    cfg = LogConfig(use_wandb=True, wandb_group="my-group", wandb_project="my-project")
    assert upload(folder, cfg, ROWS, {"max_loss_gap_percent": 0.5})
    wandb.teardown()  # everything is on disk after it
    (run,) = folder.glob("wandb/offline-run-*")
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    for text in ("my-comparison-verdict", "my-group", "my-project", "report/verdict", "report/loss"):
        assert text.encode() in written, text
    for text in ("a page of its own", "REFERENCE", "delayed", "2.505", "max_loss_gap_percent"):
        assert text.encode() in written, text
    assert "WARNING" not in capsys.readouterr().err


def test_what_w_and_b_cannot_take_is_kept_with_one_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    assert upload(tmp_path, LogConfig(use_wandb=True, wandb_mode="online"), ROWS, {})
    shown = capsys.readouterr().err
    assert shown.count("WARNING: W&B") == 1 and "`wandb sync` uploads it" in shown
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    wandb.teardown()

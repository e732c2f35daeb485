"""A report, and a comparison's verdict, on W&B: written offline and read back from its files."""

import json

import pytest
import wandb
from matplotlib.figure import Figure

from benchmarks.report.main import main, read_all
from benchmarks.report.verdict import Row
from benchmarks.report.wandb_report import upload
from tests.benchmarks.test_html_report import whole_run
from training.tracking.settings import LogConfig

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
    for drawn in ("loss", "drawn-before"):
        Figure().savefig(folder / f"{drawn}.png")
    (folder / "report.html").write_text("<p>a page of its own</p>")
    cfg = LogConfig(use_wandb=True, wandb_group="my-group", wandb_project="my-project")
    runs, _ = read_all([whole_run(tmp_path / "my-run")], None)
    assert upload(folder, cfg, runs, [folder / "loss.png"], ROWS, {"max_loss_gap_percent": 0.5})
    wandb.teardown()  # everything is on disk after it
    (run,) = folder.glob("wandb/offline-run-*")
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    for text in ("my-comparison-verdict", "my-group", "my-project", "report/verdict", "report/loss"):
        assert text.encode() in written, text
    for text in ("a page of its own", "REFERENCE", "delayed", "2.505", "max_loss_gap_percent"):
        assert text.encode() in written, text
    assert b"drawn-before" not in written and "WARNING" not in capsys.readouterr().err


def tables(folder):
    """{table: {heading: column}} of the one W&B run in `folder`."""
    wandb.teardown()
    (run,) = folder.glob("wandb/offline-run-*")
    found = {}
    for path in run.glob("files/media/table/report/*.table.json"):
        table = json.loads(path.read_text())
        columns = zip(*table["data"], strict=True)
        found[path.name.split("_0_")[0]] = dict(zip(table["columns"], map(list, columns), strict=True))
    return found


def test_a_report_s_tables_are_numbers_in_the_runs_group(tmp_path, offline):
    """Of a single run they lie in its own folder, whose W&B run stays another."""
    folder = whole_run(tmp_path / "run", wandb_group="my-group", wandb_project="my-project")
    (folder / "wandb_id.txt").write_text("of-training")
    assert main([str(folder), "--use_wandb"]) == 0
    found = tables(folder)
    assert set(found) == {"runs", "hours", "training_loss", "validation_loss"}
    assert found["runs"]["run"] == ["run"] and found["runs"]["tokens/s"] == [14376.4]
    assert found["hours"]["GPU-hours"] == [3.0] and found["training_loss"]["minimum"] == [2.0]
    assert (folder / "wandb_id.txt").read_text() == "of-training"
    assert (folder / "wandb_report_id.txt").read_text().strip() != "of-training"
    (run,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert b"my-group" in run.read_bytes() and b"my-project" in run.read_bytes()


def test_what_is_uploaded_needs_a_folder(tmp_path, capsys):
    runs = [str(whole_run(tmp_path / name)) for name in ("a", "b")]
    assert main([*runs, "--use_wandb"]) == 2
    assert capsys.readouterr().err.startswith("error: --use_wandb: several runs need --output_dir")


def test_what_w_and_b_cannot_take_is_kept_with_one_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    assert upload(tmp_path, LogConfig(use_wandb=True, wandb_mode="online"), [], [], ROWS)
    shown = capsys.readouterr().err
    assert shown.count("WARNING: W&B") == 1 and "`wandb sync` uploads it" in shown
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    wandb.teardown()

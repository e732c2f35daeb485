"""Run records: from run folders, whole, crashed and damaged, and from the table of recorded runs."""

import json
import math

import pytest
from fp8_suite.benchmarks.records import add
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.records.table import MAX_POINTS, PRESET_OR_HUB_ID, TABLE, read_table, thin
from fp8_suite.benchmarks.report import main as report
from fp8_suite.benchmarks.report.judge import judge_runs
from fp8_suite.benchmarks.report.tables import report_tables
from fp8_suite.core.errors import UserError

from tests.benchmarks.folders import COVERAGE, ENVIRONMENT, SUMMARY, append, write_run


def row(run, *others):
    """Return {heading: cell} of a run in the table of runs."""
    headings, rows = report_tables([run, *others])["runs"]
    return dict(zip(headings[1:], rows[0][1:], strict=True))


def test_a_finished_run_has_its_summary_in_the_table(tmp_path, capsys):
    run = read_run(write_run(tmp_path / "my-run", losses=[3.0], summary=SUMMARY, environment=ENVIRONMENT))
    assert row(run) == {
        **{"precision": "fp8 delayed (instead of mxfp8), TE layers", "model": "org/some | model"},
        **{"train loss": "1.2346", "train loss, mean of last 10 %": "1.3000"},
        **{"eval loss": "1.5000", "perplexity": "4.48", "token accuracy": "61.23%"},
        **{"tokens/s": "14,376", "tokens/s per GPU": "7,188", "TFLOP/s per GPU": "739.9"},
        **{"MFU of BF16 peak": "74.8%", "MFU of FP8 peak": "37.4%", "peak GB": "91.3"},
        **{"goodput": "93.1%", "GPU-hours": "2.46", "steps": "1,200", "GPUs": "2", "mode": "fsdp_full"},
    }
    report.write([run], judge_runs([run], run), None)
    lines = capsys.readouterr().out.splitlines()
    assert "org/some \\| model" in lines[2]
    assert "2 x NVIDIA H200, 2026-01-02, torch 2.11.0" in lines[4] and "uncommitted changes" in lines[4]


def test_a_crashed_run_has_its_metrics_in_the_table(tmp_path):
    losses = [9.0, math.nan, *map(float, range(20, 0, -1))]
    folder = write_run(tmp_path / "crashed", losses=losses, environment={"gpu_name": "NVIDIA H200"})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 230, "train/lo')
    assert row(read_run(folder)) == {
        **{"precision": "bf16, HF layers", "model": "tiny-llama", "train loss": "1.0000"},
        "train loss, mean of last 10 %": "1.5000",  # of 21 finite losses the last two: 2 and 1
        **{"eval loss": "0.5000", "perplexity": "1.65"},
        "tokens/s": "1,200",  # median of 200, 300 .. 2200: the first interval warms up
        **{"tokens/s per GPU": "1,200", "peak GB": "9.0", "steps": "220", "GPUs": "1", "mode": "single"},
    }


def test_gpus_and_mode_of_a_crashed_run_come_from_its_environment(tmp_path):
    environment = ENVIRONMENT | {"world_size": 8, "sharding_mode": "hsdp"}
    run = read_run(write_run(tmp_path / "crashed", losses=[3.0, 2.0], environment=environment))
    assert (run.gpus, run.mode, run.tokens_per_gpu) == (8, "hsdp", 25.0)  # 200 / 8


def test_hours_of_an_unfinished_run_come_from_its_wall_time(tmp_path):
    folder = write_run(tmp_path / "killed", losses=[3.0], environment={"gpu_name": "NVIDIA H200"})
    append(folder, step=10, **{"perf/goodput": 0.8})
    by_kind = {"start": 90.0, "steps": 720.0, "lost": 90.0, "other": 0.0}
    totals = {"wall_seconds": 900.0, "gpu_seconds": 7200.0, "seconds_by_kind": by_kind}
    (folder / "wall_time.json").write_text(json.dumps(totals))
    run = read_run(folder)
    hours = [run.value(name) for name in ("runtime_seconds", "gpu_hours", "node_hours")]
    assert hours == [900.0, 2.0, None], "older runs have no node_seconds"
    headings, ((_, *cells),) = report_tables([run])["hours"]
    shown = {"runtime, hours": "0.250", "GPUs": "1", "GPU-hours": "2.000"}
    assert dict(zip(headings[1:], cells, strict=True)) == shown | {
        **{"goodput": "80.0%", "start": "10.0%", "lost": "10.0%"},
    }


def test_a_precision_map_is_named_by_the_recipes_that_ran(tmp_path):
    shares = {"bf16": 0.6, "fp8 block": 0.1, "fp8 current": 0.3}
    rows = [{"modules": k, "count": 1, "precision": k, "gemm_share": v} for k, v in shares.items()]
    settings = {"mixed_precision": "fp8", "use_te": True, "precision_map": "layers.*=current"}
    environment = {"recipe": "delayed", "coverage": {"rows": rows}}
    trained = read_run(write_run(tmp_path / "a", environment=environment, **settings))
    assert trained.precision == "current and block by map"
    before_a_step = read_run(write_run(tmp_path / "b", environment={"recipe": "delayed"}, **settings))
    assert before_a_step.precision == "delayed by map"


@pytest.mark.parametrize("finished", [True, False])
def test_an_emulated_run_has_no_speed(tmp_path, finished):
    emulated = {"emulated": True}
    summary = SUMMARY | emulated if finished else None
    run = read_run(write_run(tmp_path, losses=[3.0], summary=summary, environment=ENVIRONMENT | emulated))
    assert "(emulated)" in row(run)["precision"]
    assert not any(
        word in name for name in row(run) for word in ("tokens/s", "scaling", "TFLOP", "MFU", "goodput")
    )


def test_runs_in_the_table_are_those_of_their_folders(tmp_path, capsys):
    losses = [4.0, math.nan, 2.0, 1.5]
    environment = ENVIRONMENT | {"coverage": COVERAGE, "hostname": "secret"}
    done = SUMMARY | {"model_name": "org/model"}
    write_run(tmp_path / "runs/done", losses=losses, summary=done, environment=environment, seed=7)
    write_run(tmp_path / "runs/stopped", losses=losses, environment=environment, output_dir="/private")
    table = tmp_path / "table.jsonl.gz"
    for _ in range(2):  # the second time each run replaces itself
        assert add.main([str(tmp_path / "runs"), "--study", "mine/a", "--table", str(table)]) == 0
    assert "added 2 runs to study mine/a" in capsys.readouterr().out
    for recorded, name in zip(read_table("mine", table), ("done", "stopped"), strict=True):
        original = read_run(tmp_path / "runs" / name)
        assert recorded.name == name
        assert (recorded.summary, recorded.coverage) == (original.summary, original.coverage)
        assert recorded.series("eval/loss") == original.series("eval/loss")
        assert recorded.series("train/loss") == original.series("train/loss")
        assert len(recorded.logged("train/loss")) == 4 and recorded.global_batch == original.global_batch
        assert row(recorded) == row(original)
        assert "hostname" not in recorded.environment and "output_dir" not in recorded.config
    assert add.main([str(tmp_path / "nowhere"), "--study", "x"]) == 2


def test_thinned_losses_keep_their_means():
    thousand = [(step, float(step)) for step in range(1, 1001)]
    means, last = (thin(thousand, average=average) for average in (True, False))
    assert means[:2] == [(5, 3.0), (10, 8.0)] and last[:2] == [(5, 5.0), (10, 10.0)]
    for number in (MAX_POINTS, 201, 999, 70_001):
        assert len(thin([(i, 0.0) for i in range(number)], average=True)) <= MAX_POINTS


def test_the_recorded_table_is_small_and_whole():
    runs = read_table()
    assert TABLE.stat().st_size < 2**20 and len(runs) > 400
    assert len({run.folder for run in runs}) == len(runs)
    names = {name for run in runs for name in (run.value("model_name"), run.config["model_name"])}
    assert all(map(PRESET_OR_HUB_ID.fullmatch, names))
    assert all(run.environment["date"] and run.environment["versions"] for run in runs)
    assert sum(run.summary is None for run in runs) < 11
    with pytest.raises(UserError, match=r"--study nope: no such study in .* choose from batch_one, "):
        read_table("nope")


@pytest.mark.parametrize("model_name", [".gpu/l8b", "/models/llama", "runs/a/export", "export/"])
def test_a_model_trained_from_a_folder_is_recorded_under_a_name(tmp_path, capsys, model_name):
    summary = SUMMARY | {"model_name": model_name}
    write_run(tmp_path / "run", losses=[2.0], summary=summary, model_name=model_name)
    table = tmp_path / "table.jsonl.gz"
    command = [str(tmp_path / "run"), "--study", "mine", "--table", str(table)]
    assert add.main(command) == 2
    assert f"--model_name {model_name}: {tmp_path}/run trained a model from a" in capsys.readouterr().err
    assert add.main([*command, "--model_name", "org/model"]) == 0
    (run,) = read_table("mine", table)
    assert run.summary["model_name"] == run.config["model_name"] == "org/model"


def test_two_runs_of_one_name_are_refused_instead_of_losing_one(tmp_path, capsys):
    for folder in ("1b", "8b"):
        write_run(tmp_path / folder / "bf16")
    table = tmp_path / "runs.jsonl.gz"
    folders = [str(tmp_path / "1b"), str(tmp_path / "8b")]
    assert add.main([*folders, "--study", "both", "--table", str(table)]) == 2
    assert f"--study both: {tmp_path}/1b/bf16 and {tmp_path}/8b/bf16 have one name" in capsys.readouterr().err
    assert not table.exists()

"""Reports from run folders as the trackers write them, whole, crashed and broken."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.records.runs import short_labels, smooth
from benchmarks.report.figures import draw_coverage, draw_gap, draw_losses
from benchmarks.report.gaps import (
    comparison,
    loss_gap,
    noise_band,
    other_settings,
    pick_reference,
    tail_gap,
    tail_noise,
)
from benchmarks.report.main import main, read_all, read_run, table
from core.files import write_json
from training.config import Config
from training.tracking.settings import LogConfig
from training.tracking.tracker import build_tracker

ENVIRONMENT = {
    "gpu_name": "NVIDIA H200",
    "gpu_count": 4,
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.11.0", "transformer_engine": "2.20.2", "transformers": None},
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
    "requested_recipe": "mxfp8",
    "recipe": "delayed",
    "fallback_reason": "needs compute capability 10.0",
}
SUMMARY = {
    "model_name": "org/some | model",
    "mixed_precision": "fp8",
    "use_te": True,
    **{name: ENVIRONMENT[name] for name in ("requested_recipe", "recipe", "fallback_reason", "gpu_name")},
    "steps": 1200,
    "train_loss": 1.23456,
    "train_loss_tail_mean": 1.3,
    "eval_loss": 1.5,
    "eval_perplexity": 4.4817,
    "eval_token_accuracy": 0.61234,
    "tokens_per_second": 14376.4,
    "model_tflops_per_gpu": 739.94,
    "mfu_bf16": 0.7482,
    "mfu_fp8": 0.3739,
    "peak_memory_gb": 91.26,
    "gpu_hours": 2.456,
    "gpus": 2,
    "world_size": 2,
    "sharding_mode": "fsdp_full",
}


def write_run(folder, *, losses=(), summary=None, environment=None, **settings):
    """A run folder with a loss every 10 steps and an evaluation of half that loss every 20."""
    tracker = build_tracker(LogConfig(), folder, config={}, tags=[], resume_step=None)
    write_json(folder / "config.json", Config().to_dict() | settings)
    (folder / "env.json").write_text(json.dumps(environment or {}))
    for i, loss in enumerate(losses, 1):
        rates = {"perf/tokens_per_second": 100.0 * i, "perf/peak_memory_gb": 10.0 - i}
        tracker.log(10 * i, {"train/loss": loss, **rates})
        if i % 2 == 0:
            tracker.log(10 * i, {"eval/loss": loss / 2})
    if summary:
        tracker.summary(summary)
    tracker.finish()
    return folder


def cells(run, *others):
    head, _, row = (line.strip("| ") for line in table([run, *others]).splitlines()[:3])
    values = row.replace("\\|", "\0").split(" | ")
    return {name: value.replace("\0", "|") for name, value in zip(head.split(" | "), values, strict=True)}


def test_table_of_a_finished_run(tmp_path):
    run = read_run(write_run(tmp_path / "my-run", losses=[3.0], summary=SUMMARY, environment=ENVIRONMENT))
    assert cells(run) == {
        "run": "my-run",
        "precision": "fp8 delayed (asked for mxfp8), TE layers",
        "train loss": "1.2346",
        "train loss, mean of last 10 %": "1.3000",
        "eval loss": "1.5000",
        "perplexity": "4.48",
        "token accuracy": "61.23%",
        "tokens/s": "14,376",
        "tokens/s per GPU": "7,188",
        "MFU (utilisation) of BF16 peak": "74.8%",
        "MFU of FP8 peak": "37.4%",
        "TFLOP/s per GPU": "739.9",
        "peak GB": "91.3",
        "GPU-hours": "2.46",
        "steps": "1,200",
        "GPUs": "2",
        "mode": "fsdp_full",
        "model": "org/some | model",
    }
    note = table([run]).splitlines()[-1]
    assert note == (
        "- my-run: 2 x NVIDIA H200, 2026-01-02, torch 2.11.0, transformer_engine 2.20.2, "
        "commit 0123456789ab with changes"
    )


def test_table_of_a_crashed_run_comes_from_its_metrics(tmp_path):
    losses = [9.0, math.nan] + [float(i) for i in range(20, 0, -1)]
    folder = write_run(tmp_path / "crashed", losses=losses)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 230, "train/lo')
    shown = cells(read_run(folder))
    assert shown == {
        "run": "crashed (unfinished)",
        "precision": "bf16, HF layers",
        "train loss": "1.0000",
        "train loss, mean of last 10 %": "1.5000",  # of 21 finite losses the last two: 2 and 1
        "eval loss": "0.5000",
        "perplexity": "1.65",
        "tokens/s": "1,200",  # median of 200, 300 .. 2200: the first interval warms up
        "peak GB": "9.0",
        "steps": "220",
        "model": "tiny-llama",
    }


@pytest.mark.parametrize(
    ("kept", "hours"),
    [
        ('{"wall_seconds": 900.0, "gpu_seconds": 7200.0, "node_seconds": 900.0}', (900.0, 2.0, 0.25)),
        ('{"wall_seconds": "none", "gpu_sec', (None, None, None)),
        ('{"wall_seconds": "none", "gpu_seconds": 7200.0}', (None, 2.0, None)),
        ("[]", (None, None, None)),
    ],
)
def test_hours_of_an_unfinished_run_come_from_its_wall_time(tmp_path, kept, hours):
    """Whatever that file holds, there is a report."""
    folder = write_run(tmp_path / "killed", losses=[3.0])
    (folder / "wall_time.json").write_text(kept)
    run = read_run(folder)
    assert tuple(map(run.value, ("runtime_seconds", "gpu_hours", "node_hours"))) == hours
    assert cells(run).get("GPU-hours") == ("2.00" if hours[1] else None)


def test_a_run_that_crashed_before_its_first_line_has_a_row(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "env.json").unlink()
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "(unfinished) | bf16, HF layers | 0 | tiny-llama |" in shown
    assert "stopped before it looked at the machine" in shown and "no loss.png: no loss was logged" in shown
    assert not (tmp_path / "loss.png").exists()


def rated(folder, gpus, tokens_per_second, *, recipe="delayed", **settings):
    values = {"gpus": gpus, "tokens_per_second": tokens_per_second, "recipe": recipe}
    return read_run(write_run(folder, summary=SUMMARY | values, environment=ENVIRONMENT, **settings))


def test_scaling_is_against_the_one_gpu_run_of_the_same_work(tmp_path):
    one = rated(tmp_path / "one", 1, 10_000.0)
    four = rated(tmp_path / "four", 4, 30_000.0)
    strangers = [
        rated(tmp_path / "current", 1, 9_000.0, recipe="current"),
        rated(tmp_path / "longer", 1, 8_000.0, max_seq_length=2048),
        rated(tmp_path / "two", 2, 18_000.0),
        rated(tmp_path / "accumulating", 1, 11_000.0, gradient_accumulation_steps=8),
        rated(tmp_path / "small-moments", 1, 12_000.0, moment_dtype="bf16"),
        rated(tmp_path / "deterministic", 1, 7_000.0, deterministic=True),
        rated(tmp_path / "exact-scales", 1, 9_500.0, fp8_fp32_scales=True),
    ]
    shown = cells(four, one, *strangers)
    assert (shown["GPUs"], shown["tokens/s"], shown["tokens/s per GPU"]) == ("4", "30,000", "7,500")
    assert shown["scaling"] == "75.0%"  # 7,500 of 10,000
    assert cells(strangers[2], four, one)["scaling"] == "90.0%"
    assert cells(one, four)["scaling"] == "-"  # what others are compared with
    assert "scaling" not in cells(four, *strangers)
    again = rated(tmp_path / "again", 1, 10_100.0)
    assert "scaling" not in cells(four, one, again)  # which of the two?


def test_a_precision_map_names_what_ran(tmp_path):
    rows = [
        {"modules": "a", "count": 1, "precision": "bf16", "gemm_share": 0.6, "note": ""},
        {"modules": "b", "count": 1, "precision": "fp8 block", "gemm_share": 0.1, "note": ""},
        {"modules": "c", "count": 1, "precision": "fp8 current", "gemm_share": 0.3, "note": ""},
    ]
    environment = {"recipe": "delayed", "coverage": {"rows": rows}}
    settings = {"mixed_precision": "fp8", "use_te": True, "precision_map": "layers.*=current"}
    run = read_run(write_run(tmp_path / "run", environment=environment, **settings))
    assert cells(run)["precision"] == "fp8 current and block by map, TE layers"
    before = read_run(write_run(tmp_path / "early", environment={"recipe": "delayed"}, **settings))
    assert cells(before)["precision"] == "fp8 delayed by map, TE layers"


def test_a_run_recorded_before_there_were_several_gpus_had_one(tmp_path):
    summary = {k: v for k, v in SUMMARY.items() if k not in ("gpus", "world_size", "sharding_mode")}
    run = read_run(write_run(tmp_path / "old", summary=summary, environment=ENVIRONMENT))
    shown = cells(run)
    assert (shown["GPUs"], shown["mode"]) == ("1", "single")
    assert shown["tokens/s per GPU"] == shown["tokens/s"] == "14,376"
    assert table([run]).splitlines()[-1].startswith("- old: 1 x NVIDIA H200, ")


def test_gpus_and_mode_of_a_crashed_run_come_from_its_environment(tmp_path):
    gpus = [{"name": "NVIDIA H200", "memory_gb": 150.1}] * 4  # of rank 0's node
    environment = ENVIRONMENT | {"gpus": gpus, "world_size": 8, "sharding_mode": "hsdp"}
    run = read_run(write_run(tmp_path / "crashed", losses=[3.0, 2.0], environment=environment))
    shown = cells(run)
    assert (shown["GPUs"], shown["mode"], shown["tokens/s per GPU"]) == ("8", "hsdp", "25")  # 200 / 8
    assert table([run]).splitlines()[-1].startswith("- crashed: 8 x NVIDIA H200, ")
    alone = read_run(write_run(tmp_path / "alone", losses=[3.0], environment=ENVIRONMENT | {"gpus": gpus}))
    assert (cells(alone)["GPUs"], cells(alone)["mode"]) == ("1", "single")


def test_smooth_averages_noise_and_keeps_a_slope():
    assert smooth([1.0, 2.0, 6.0]) == [1.0, 2.0, 6.0]  # too few to average
    noisy = smooth([float(i % 2) for i in range(400)])
    assert noisy[200] == pytest.approx(10 / 21)  # 190 to 210
    assert noisy[0] == 0 and noisy[1] == pytest.approx(1 / 3) and noisy[399] == 1
    slope = [float(i) for i in range(400)]
    assert smooth(slope) == pytest.approx(slope)
    huge = smooth([2.0] * 100 + [1e30] + [2.0] * 299)
    assert huge[300] == 2.0 and huge[100] == pytest.approx(1e30 / 21)


def test_the_curve_shows_all_runs_without_non_finite_losses(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    write_run(folders[0], losses=[4.0, math.nan, 2.0])
    write_run(folders[1], losses=[8.0, 6.0])
    figure = draw_losses([read_run(folder) for folder in folders])
    (axes,) = figure.axes
    assert [line.get_linestyle() for line in axes.lines] == ["-"] * 4 + ["None"], "evaluations are dots"
    drawn = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert drawn == [
        [(10, 4.0), (30, 2.0)],
        [(10, 4.0), (30, 2.0)],
        [(10, 8.0), (20, 6.0)],
        [(10, 8.0), (20, 6.0)],
        [(20, 3.0)],
    ]
    (legend,) = figure.legends
    labels = [text.get_text().replace("\n", "") for text in legend.get_texts()]
    assert labels == [
        f"{folders[0]}: training, smoothed",
        f"{folders[1]}: training, smoothed",
        f"{folders[1]}: evaluation",
    ]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 10_000


def test_command_line_writes_the_curve_into_the_run(tmp_path):
    write_run(tmp_path, losses=[3.0, 2.0, 1.0], summary=SUMMARY)
    command = [sys.executable, "-m", "benchmarks.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert f"loss curve: {tmp_path / 'loss.png'}" in lines
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"
    assert is_png(tmp_path / "loss.png")


def test_several_runs_share_a_curve_in_the_output_folder(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name, losses=[3.0, 2.0])) for name in ("a", "b")]
    assert main([*runs, "--output_dir", str(tmp_path / "new" / "report")]) == 0
    assert is_png(tmp_path / "new" / "report" / "loss.png")
    assert main(runs) == 0
    assert "several runs need --output_dir" in capsys.readouterr().out
    assert not (tmp_path / "a" / "loss.png").exists()


def test_a_folder_of_runs_is_all_of_them(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, losses=[3.0, 2.0])
    runs, _ = read_all([tmp_path / "runs"], None)
    assert [run.name for run in runs] == ["a", "b"]


def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys):
    good = write_run(tmp_path / "good", losses=[1.0])
    for name in ("empty", "export"):
        (tmp_path / name).mkdir()
    (tmp_path / "export" / "config.json").write_text('{"model_type": "llama"}')
    broken = write_run(tmp_path / "broken", losses=[1.0])
    (broken / "summary.json").write_text("{")
    foreign = write_run(tmp_path / "foreign", losses=[1.0], environment={"versions": [1]})
    counts = write_run(tmp_path / "counts", losses=[1.0], batch_size="2")
    for arguments, reason in (
        ([tmp_path / "export"], "export: not a run folder (its config.json has no mixed_precision)"),
        ([good, tmp_path / "export"], "export: not a run folder"),
        ([tmp_path / "empty"], "empty: not a run folder (it has no config.json)"),
        ([good, tmp_path / "nowhere"], "nowhere: there is no such folder"),
        ([good, "--reference", tmp_path / "nowhere"], "nowhere: there is no such folder"),
        ([broken], "summary.json: cannot be read"),
        ([foreign], "env.json: not of a run (versions is [1])"),
        ([counts], "counts: not a run folder (batch_size of its config.json is '2')"),
        ([good, "--output_dir", ""], "--output_dir: '': no folder; name one"),
        ([good, "--reference", tmp_path / "empty"], "empty: not a run folder"),
        ([good, "--output_dir", broken / "summary.json"], "summary.json: File exists"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and reason in shown and shown.count("\n") == 1


def trained(folder, losses, recipe="bf16", **settings):
    values = {"recipe": recipe, "mixed_precision": "bf16" if recipe == "bf16" else "fp8"}
    folder = write_run(
        folder, losses=losses, summary=SUMMARY | values | {"gpus": 1, "world_size": 1}, **settings
    )
    return read_run(folder)


def test_the_reference_is_the_first_bf16_run_else_the_first(tmp_path):
    fp8 = trained(tmp_path / "fp8", [2.0], "delayed")
    empty, bf16 = trained(tmp_path / "empty", []), trained(tmp_path / "bf16", [2.0])
    assert pick_reference([fp8, empty, bf16]) is bf16
    assert pick_reference([fp8, empty]) is fp8
    other = trained(tmp_path / "other", [2.0], seed=43)
    assert pick_reference([other, fp8, bf16]) is bf16, "of FP8's own seed"
    assert pick_reference([other, bf16]) is other


def test_another_seed_is_told_as_a_setting_that_differs(tmp_path):
    reference = trained(tmp_path / "a", [2.0] * 20)
    fp8 = trained(tmp_path / "b", [2.0] * 20, "delayed", seed=43)
    assert other_settings(fp8, reference) == ["seed"] and other_settings(reference, reference) == []


def test_gap_and_noise_band_against_the_reference(tmp_path):
    reference = trained(tmp_path / "a", [4.0, 2.0, 2.0], seed=1)
    twin = trained(tmp_path / "b", [4.4, 2.2, 1.9], seed=2)
    fp8 = trained(tmp_path / "c", [4.0, 2.1, 2.04, 1.0], "delayed", seed=1, mixed_precision="fp8")
    again = trained(tmp_path / "d", [9.0, 9.0, 9.0], seed=1)  # no other seed: says nothing of noise
    warmer = trained(tmp_path / "e", [9.0, 9.0, 9.0], seed=3, learning_rate=1.0)  # nor another setting
    runs = [reference, twin, fp8, again, warmer]
    against = comparison(runs, reference)
    pairs = [(run, reference) for run in runs[1:]]
    assert (against.pairs, against.family, against.left_out) == (pairs, [reference, twin], {})
    assert loss_gap(fp8, reference) == [(10, 0.0), (20, pytest.approx(0.05)), (30, pytest.approx(0.02))]
    assert noise_band(against.family) == [
        (10, pytest.approx(0.1)),
        (20, pytest.approx(0.1)),
        (30, pytest.approx(0.05)),
    ]
    assert noise_band([reference]) == [] and tail_noise([reference]) is None
    assert tail_gap(fp8, reference) == pytest.approx(0.02)  # of step 30, which both have
    assert tail_noise(against.family) == pytest.approx(0.05)


def test_the_noise_of_three_seeds_is_their_whole_spread(tmp_path):
    family = [trained(tmp_path / str(loss), [loss], seed=i) for i, loss in enumerate((2.0, 2.2, 1.9))]
    assert noise_band(family) == [(10, pytest.approx(0.15))]
    assert tail_noise(family) == pytest.approx(0.15)


def test_the_gap_s_axis_fits_neither_the_start_nor_the_end(tmp_path):
    reference = trained(tmp_path / "a", [2.0] * 200)
    fp8 = trained(tmp_path / "b", [4.0] * 3 + [2.02] * 195 + [6.0] * 2, "delayed")
    (axes,) = draw_gap([reference, fp8], comparison([reference, fp8], reference)).axes
    low, high = axes.get_ylim()
    assert low == pytest.approx(0, abs=0.002) and 0.01 < high < 0.02


def test_a_spike_leaves_the_other_gaps_readable(tmp_path):
    reference = trained(tmp_path / "a", [2.0] * 200)
    fp8 = trained(tmp_path / "b", [2.02] * 100 + [4e5] + [2.01] * 99, "delayed")
    (axes,) = draw_gap([reference, fp8], comparison([reference, fp8], reference)).axes
    assert 0.01 < axes.get_ylim()[1] < 0.2 and "spikes cut off" in axes.get_ylabel()


def test_a_run_that_is_far_off_all_the_time_is_no_spike(tmp_path):
    reference = trained(tmp_path / "a", [2.0] * 200)
    close = [trained(tmp_path / f"close{i}", [2.002] * 200, "delayed") for i in range(5)]
    runs = [reference, *close, trained(tmp_path / "far", [2.1] * 200, "delayed")]
    (axes,) = draw_gap(runs, comparison(runs, reference)).axes
    assert axes.get_ylim()[1] > 0.05 and "cut off" not in axes.get_ylabel()


def test_a_run_whose_baseline_did_not_run_is_set_against_no_other(tmp_path):
    runs = [trained(tmp_path / name, [2.0]) for name in ("bf16", "tensorwise")]
    found = comparison(runs, runs[0], {runs[1].folder: None})
    assert not found.pairs and found.left_out == {"tensorwise": "what it is held against has not run"}


def test_each_gap_is_drawn_against_its_own_baseline(tmp_path):
    te, hf = trained(tmp_path / "bf16", [2.0]), trained(tmp_path / "bf16_hf", [4.0])
    runs = [te, hf, trained(tmp_path / "tensorwise", [4.4], "tensorwise")]
    (axes,) = draw_gap(runs, comparison(runs, te, {runs[2].folder: hf})).axes
    gaps = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert gaps["bf16_hf"] == pytest.approx(1.0) and gaps["tensorwise"] == pytest.approx(0.1)
    assert axes.get_ylabel() == "loss against its baseline"


def test_long_names_are_cut_in_the_middle_unless_that_makes_two_alike(tmp_path):
    names = [f"{'long-' * 40}{i}" for i in range(2)]
    runs = [trained(tmp_path / name, [2.0]) for name in names]
    short = short_labels(runs)
    assert [len(name) for name in short] == [99, 99] and [name[-1] for name in short] == ["0", "1"]
    alike = [trained(tmp_path / f"{'x' * 90}{i}{'x' * 90}", [2.0]) for i in range(2)]
    assert short_labels(alike) == [run.name for run in alike]
    text = draw_losses(runs).legends[0].get_texts()[0].get_text()
    assert max(map(len, text.replace(": training, smoothed", "").split("\n"))) <= 44


def test_long_names_of_variants_are_broken_at_their_settings(tmp_path):
    name = "delayed+moment_dtype=bf16+batch_size=4+gradient_accumulation_steps=2+grad_reduce_dtype=bf16"
    runs = [trained(tmp_path / "bf16", [2.0]), trained(tmp_path / name, [2.0], "delayed")]
    figure = draw_coverage(runs)
    (axes,) = figure.axes
    short, long = (label.get_text() for label in axes.get_yticklabels())
    assert short == "bf16" and long.replace("\n", "") == name
    assert all(line.startswith(("delayed", "+")) and len(line) <= 44 for line in long.split("\n"))
    assert figure.get_size_inches()[1] > draw_coverage(runs[:1]).get_size_inches()[1] + 0.35 * 2


def test_losses_of_other_work_are_not_compared(tmp_path):
    reference = trained(tmp_path / "a", [2.0])
    longer = trained(tmp_path / "longer", [2.0], max_seq_length=2048)
    larger = trained(tmp_path / "larger", [2.0], batch_size=4 * reference.config["batch_size"])
    silent = trained(tmp_path / "silent", [])
    lost = trained(tmp_path / "lost", [math.nan])
    against = comparison([reference, longer, larger, silent, lost], reference)
    assert against.pairs == []
    rows = reference.config["batch_size"]
    assert against.left_out == {
        "longer": f"max_seq_length is 2048, the reference's {reference.config['max_seq_length']}",
        "larger": f"its global batch is {4 * rows} rows, the reference's {rows}",
        "silent": "it logged no training loss",
        "lost": "none of its training losses is finite",
    }


def test_an_emulated_run_shows_no_speed(tmp_path):
    folder = write_run(tmp_path / "done", summary=SUMMARY | {"emulated": True}, environment=ENVIRONMENT)
    stopped = write_run(tmp_path / "stopped", losses=[3.0, 2.0], environment=ENVIRONMENT | {"emulated": True})
    for run in (read_run(folder), read_run(stopped)):
        shown = cells(run)
        assert "(emulated)" in shown["precision"]
        assert not any(word in name for name in shown for word in ("tokens/s", "scaling", "TFLOP", "MFU"))

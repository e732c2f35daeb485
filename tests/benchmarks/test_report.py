"""Reports: tables, gaps, figures, the page, and W&B."""

import math
import re
from dataclasses import replace
from html import unescape
from types import SimpleNamespace

import pytest
import wandb
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.report import figures, gaps
from fp8_suite.benchmarks.report.judge import judge_pairs, judge_runs
from fp8_suite.benchmarks.report.main import main, read_all, upload, write
from fp8_suite.benchmarks.report.tables import report_tables
from fp8_suite.training.tracking.settings import LogConfig

from tests.benchmarks.folders import COVERAGE, ENVIRONMENT, SUMMARY, append, rated, trained, write_run

OTHER_DATA = {"data": {"train": {"fingerprint": "2e"}}}
NASTY = '<script src="http://evil/x.js"></script> & "$\\frac{" \' </style>'
SECTIONS = ["losses", "gap", "runs", "statistics", "coverage", "fp8", "hours", "settings"]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 10_000


def test_several_runs_need_an_output_folder_for_figures(tmp_path, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, losses=[3.0, 2.0])
    assert main([str(tmp_path / "runs")]) == 0
    assert "several runs need --output_dir" in capsys.readouterr().out
    assert main([str(tmp_path / "runs"), "--output_dir", str(tmp_path / "new" / "report")]) == 0
    assert is_png(tmp_path / "new" / "report" / "loss.png") and not (tmp_path / "runs/a/loss.png").exists()


def test_a_run_that_crashed_before_its_first_line_has_a_row(tmp_path, capsys):
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "env.json").unlink()
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\(unfinished\) +\| bf16, HF layers +\| 0 +\| tiny-llama +\|", printed)
    assert "no loss was logged" in printed
    assert "stopped before its environment was recorded" in printed


def test_bad_input_is_one_line(tmp_path, capsys):
    good, broken = (write_run(tmp_path / name, losses=[1.0]) for name in ("good", "broken"))
    (broken / "summary.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for arguments, reason in (
        ([good, tmp_path / "empty"], "not a run folder"),
        ([good, "--reference", tmp_path / "nowhere"], "nowhere: no such folder"),
        ([broken], "summary.json: damaged"),
        ([good, "--output_dir", broken / "summary.json"], "File exists: "),
        ([], "give either run folders or --study"),
        (["--study", "nope"], "--study nope: no such study"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and reason in error and error.count("\n") == 1


def test_scaling_is_relative_to_the_one_gpu_run_of_the_same_work(tmp_path):
    def scaling_of(run, *others):
        headings, rows = report_tables([run, *others])["runs"]
        return dict(zip(headings, rows[0], strict=True)).get("scaling")

    one, four = rated(tmp_path / "one", 1, 10_000.0), rated(tmp_path / "four", 4, 30_000.0)
    strangers = [
        rated(tmp_path / "current", 1, 9_000.0, recipe="current"),
        rated(tmp_path / "longer", 1, 8_000.0, max_seq_length=2048),
        rated(tmp_path / "adapters", 1, 12_000.0, lora_rank=16),
        rated(tmp_path / "accumulating", 1, 11_000.0, gradient_accumulation_steps=8),
    ]
    assert scaling_of(four, one, *strangers) == "75.0%"  # 7,500 of 10,000
    headings, rows = report_tables(strangers)["runs"]
    assert [row[headings.index("LoRA rank")] for row in rows] == ["-", "-", "16", "-"]
    assert scaling_of(one, four) == "-" and scaling_of(four, *strangers) is None
    assert scaling_of(four, one, rated(tmp_path / "again", 1, 10_100.0)) is None, "two candidates"


def test_the_reference_is_a_bf16_run_with_a_loss(tmp_path):
    fp8, empty = trained(tmp_path / "fp8", [2.0], "delayed"), trained(tmp_path / "empty", [])
    bf16 = trained(tmp_path / "bf16", [2.0])
    assert gaps.pick_reference([fp8, empty, bf16]) is bf16 and gaps.pick_reference([fp8, empty]) is fp8
    small = trained(tmp_path / "bf16+moment_dtype=fp8", [2.0], moment_dtype="fp8")
    elsewhere = trained(tmp_path / "task", [2.0], model_name="tiny-qwen2")
    assert gaps.pick_reference([small, elsewhere, fp8, bf16]) is bf16


def test_gaps_are_to_the_reference_with_the_run_s_seed(tmp_path):
    reference = trained(tmp_path / "a", [4.0, 2.0, 2.0], seed=1)
    twin = trained(tmp_path / "b", [4.4, 2.2, 1.9], seed=2)
    fp8 = trained(tmp_path / "c", [4.0, 2.1, 2.04, 1.0], "delayed", seed=1, mixed_precision="fp8")
    second = trained(tmp_path / "d", [9.0, 9.0, 9.0], "delayed", seed=2, mixed_precision="fp8")
    warmer = trained(tmp_path / "e", [9.0, 9.0, 9.0], seed=3, learning_rate=1.0)  # another setting
    diverged = trained(tmp_path / "f", [4.0, 2.0, math.nan], seed=4)
    runs = [reference, twin, fp8, second, warmer, diverged]
    verdict = judge_runs(runs, reference)
    pairs = [result.pairs for result in verdict.results]
    assert pairs == [[(fp8, reference), (second, twin)], [(warmer, reference)]] and verdict.left_out == {}
    assert list(gaps.seed_runs(runs, reference).values()) == [reference, twin]
    assert gaps.loss_gap(fp8, reference) == [(10, 0.0), (20, pytest.approx(0.05)), (30, pytest.approx(0.02))]
    assert gaps.final_gap(fp8, reference) == pytest.approx(0.02), "of step 30, which both have"
    assert gaps.other_settings(fp8, reference) == []
    assert gaps.other_settings(warmer, reference) == ["learning_rate", "seed"]


@pytest.mark.parametrize(
    ("losses", "changes", "reason"),
    [
        ([2.0], {"environment": OTHER_DATA}, "train samples 2e instead of 1f"),
        ([math.nan], {}, "no finite training loss was logged"),
        ([2.0], {"seed": 43, "environment": OTHER_DATA}, None),
        ([2.0], {"eval_samples": 3}, None),
    ],
)
def test_losses_of_another_task_are_not_compared(tmp_path, losses, changes, reason):
    environment = {"data": {"train": {"fingerprint": "1f"}}}
    reference = trained(tmp_path / "a", [2.0], environment=environment)
    run = trained(tmp_path / "b", losses, **changes)
    left_out = judge_runs([reference, run], reference).left_out
    assert list(left_out) == (["b"] if reason else []) and left_out.get("b", "").startswith(reason or "")


def test_smoothing_averages_noise_and_keeps_a_slope():
    noisy = gaps.smooth([float(i % 2) for i in range(400)])
    assert noisy[200] == pytest.approx(10 / 21)  # 190 to 210
    slope = [float(i) for i in range(400)]
    assert gaps.smooth(slope) == pytest.approx(slope)


def test_the_curve_shows_all_runs_without_non_finite_losses(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for folder, losses in zip(folders, ([4.0, math.nan, 2.0], [8.0, 6.0]), strict=True):
        write_run(folder, losses=losses)
    figure = figures.draw_losses([read_run(folder) for folder in folders])
    (axes,) = figure.axes
    first, second = [(10, 4.0), (30, 2.0)], [(10, 8.0), (20, 6.0)]
    drawn = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert drawn == [first, first, second, second, [(20, 3.0)]]
    texts = [text.get_text().replace("\n", "") for text in figure.legends[0].get_texts()]
    assert texts == list(map(str, folders))


def test_the_overview_shows_speed_and_the_mean_gap_over_seeds(tmp_path):
    """The gap is the mean over both seeds: +1 % and +3 %."""
    fp8, fp8_2 = (trained(tmp_path / f"fp8-{i}", [x], "delayed", seed=i) for i, x in ((1, 2.02), (2, 3.09)))
    bf16, bf16_2 = (trained(tmp_path / f"bf16-{i}", [x], seed=i) for i, x in ((1, 2.0), (2, 3.0)))
    faster = fp8.summary | {"tokens_per_second": 1.25 * SUMMARY["tokens_per_second"]}
    runs = [replace(fp8, summary=faster), bf16, bf16_2, fp8_2]
    panels = figures.draw_overview(judge_runs(runs, bf16).results).axes
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["bf16-1", "fp8-1"]
    texts = [[text.get_text() for text in axes.texts] for axes in panels]
    assert texts == [["14,376", "17,970 (1.25x)"], ["baseline", "+2.00 %"]]


def test_several_seeds_have_verdicts_and_gaps_over_time(tmp_path, capsys):
    folders = []
    for seed in (1, 2):
        for recipe, factor in (("bf16", 1.0), ("delayed", 1.002)):
            run = trained(tmp_path / f"{recipe}-{seed}", [2.0 * factor] * 20, recipe, seed=seed)
            folders.append(run.folder)
    out = tmp_path / "report"
    assert main([*map(str, folders), "--output_dir", str(out)]) == 0
    printed, page = capsys.readouterr().out, (out / "report.html").read_text()
    assert page.index("PASS for delayed-1: ") < page.index("<h1>"), "the report opens with the answer"
    assert page.count("+0.20 % (+0.20 to +0.20)") == 10
    assert "| delayed-1 | bf16-1   | training   | PASS" in printed and printed.count("+0.20 % (+0.20") == 10


def test_each_gap_is_drawn_against_its_own_baseline(tmp_path):
    te, hf = trained(tmp_path / "bf16", [2.0]), trained(tmp_path / "bf16_hf", [4.0])
    runs = [te, hf, trained(tmp_path / "tensorwise", [4.4], "tensorwise")]
    results = [judge_pairs([pair], 0.5, "run", "baseline") for pair in ((hf, te), (runs[2], hf))]
    (axes,) = figures.draw_gap(runs, results).axes
    drawn = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert drawn["bf16_hf"] == pytest.approx(1.0) and drawn["tensorwise"] == pytest.approx(0.1)
    assert axes.get_ylabel() == "loss relative to the baseline"


def test_parallel_axes_are_columns_if_a_run_has_them(tmp_path):
    sizes = {"context_parallel_size": 2, "pipeline_parallel_size": 4}
    runs = [rated(tmp_path / "data", 8, 2.0), rated(tmp_path / "all", 8, 1.0, **sizes)]
    table = report_tables(runs)["runs"]
    columns = dict(zip(table.headings, zip(*table.rows, strict=True), strict=True))
    assert columns["CP"] == ("-", "2") and columns["PP"] == ("-", "4") and "TP" not in columns


def whole_run(folder, *, losses=(3.0, 2.5, 2.0), **settings):
    """A finished run with coverage and FP8 statistics of its last step."""
    summary = SUMMARY | {
        **{"runtime_seconds": 5400.0, "nodes": 1, "node_hours": 1.5, "gpu_hours": 3.0},
        **{"tokens_per_wall_second": 13000.5, "wall_seconds_by_kind": {"steps": 5028.5, "saving": 371.5}},
    }
    environment = ENVIRONMENT | {"coverage": COVERAGE}
    write_run(folder, losses=losses, summary=summary, environment=environment, **settings)
    casts = {f"fp8/layers.{i}.proj/weight/{name}": 0.5 for i in range(2) for name in ("underflow", "amax")}
    append(folder, step=30, **casts)
    return folder


def reported(tmp_path, *folders, reference=None):
    """The page of some runs, which loads nothing and runs nothing, and its rows by section and heading."""
    out = tmp_path / "report"
    out.mkdir(exist_ok=True)
    runs, reference = read_all(list(folders), reference)
    write(runs, judge_runs(runs, reference), out)
    source, rows = (out / "report.html").read_text(encoding="utf-8"), {}
    for name, body in re.findall(r'<section id="(\w+)">(.*?)</section>', source, re.DOTALL):
        for line in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL):
            cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
            rows[name, cells[0]] = cells[1:]
    tags, ids = re.findall(r"<(\w+)", source), re.findall(r' id="(\w+)"', source)
    assert not {"script", "link", "iframe", "object"} & set(tags) and not re.search(r"<[^>]* on\w+=", source)
    for address in re.findall(r' (?:src|href|srcset)="([^"]*)', source):
        assert address.startswith(("data:image/svg+xml;base64,", "#"))
    assert ids == [name for name in SECTIONS if name in ids]
    return SimpleNamespace(tags=tags, ids=ids, text=unescape(re.sub("<[^>]*>", " ", source))), rows


def test_the_page_of_two_runs_has_every_figure_and_number(tmp_path, capsys):
    one = whole_run(tmp_path / "one")
    two = whole_run(tmp_path / "two", losses=(3.0, 2.5, 2.5), learning_rate=1e-4)
    page, rows = reported(tmp_path, one, two)
    assert page.ids == SECTIONS
    assert page.tags.count("img") == 1 + 1 + 1 + 2  # overview, losses, gap, FP8 statistics of each run
    assert page.tags.index("img") < page.tags.index("section"), "the page opens with the overview"
    assert {path.name for path in (tmp_path / "report").glob("*.png")} == {
        *("overview.png", "loss.png", "gap.png"),
        *("fp8_stats_1_one.png", "fp8_stats_2_two.png"),
    }
    assert rows["hours", "one"] == ["1.500", "1", "2", "1.500", "3.000", "93.1%", "13,000", "6.9%"]
    assert rows["coverage", "one"] == ["75.0%", "25.0%"]
    assert rows["gap", "two"][:4] == ["one", "evaluation", "INCONCLUSIVE", "+0.00 %"]
    assert rows["settings", "learning_rate"] == ["1e-05", "<mark>0.0001</mark>"]
    assert rows["settings", "max_seq_length"] == ["1024"]
    for number in ("3.0000", "2.5000", "2.0000", "0.4082", "0.2357", "gap +25.00 % with one seed"):
        assert number in page.text  # sqrt(1/6), sqrt(1/18)
    _, rows = reported(tmp_path, one, reference=two)
    assert rows["gap", "one"][0] == "two" and rows["settings", "learning_rate"][0] == "<mark>1e-05</mark>"


def test_text_of_run_folders_stays_text(tmp_path):
    folders = [tmp_path / "a <b>$x_{ & \"c' $", tmp_path / "_plain"]
    summary = SUMMARY | {"model_name": NASTY}
    coverage = {"rows": [row | {"precision": NASTY} for row in COVERAGE["rows"]]}
    environment = ENVIRONMENT | {"coverage": coverage, "versions": {"torch": NASTY}}
    for folder in folders:
        write_run(folder, losses=[3.0], summary=summary, environment=environment, dataset_name=NASTY)
        append(folder, step=40, **{f"fp8/layers.0.{NASTY}/weight/amax": 1.0})
    page, _ = reported(tmp_path, *folders)
    assert page.text.count(NASTY) >= 5 and folders[0].name in page.text


def test_a_report_on_wandb_is_a_run_with_the_page(tmp_path, wandb_offline, capsys):
    folder = whole_run(tmp_path / "run", wandb_project="my-project")
    (folder / "wandb_id.txt").write_text("of-training")
    assert main([str(folder), "--use_wandb"]) == 0
    assert is_png(folder / "loss.png") and (folder / "report.html").exists()
    wandb.teardown()  # everything is on disk after it
    (run,) = folder.glob("wandb/offline-run-*")
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    for text in ("my-project", "run-report", "report/page", "Training report: run"):
        assert text.encode() in written, text
    assert (folder / "wandb_id.txt").read_text() == "of-training", "the W&B run of the training stays another"
    assert "WARNING" not in capsys.readouterr().err


def test_a_report_outlives_a_failure_of_wandb(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no server")

    monkeypatch.setattr("fp8_suite.benchmarks.report.main.start_wandb", fail)
    upload(tmp_path, LogConfig(use_wandb=True))
    assert "no server" in capsys.readouterr().err

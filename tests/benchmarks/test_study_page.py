"""The tables of docs/studies, from runs trained here and from recorded ones; the commands of the pages."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import sweep
from benchmarks.compare import main as compare
from benchmarks.pages.performance_page import END
from benchmarks.pages.study_page import BEGIN, PAGES, RESULTS, STUDIES, main
from benchmarks.records.runs import tail_mean
from benchmarks.records.variants import given_settings, parse_variants
from training.config import parse_config

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "benchmarks/sweeps/batch_one.yaml --dataset_name demo --axis model=tiny-llama --axis learning_rate=1e-4 "
    "--axis gradient_accumulation_steps=1,2 --max_steps 52 --max_seq_length 128 --num_of_samples 200 "
    "--num_workers 0 --num_proc 1"
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """The folder of two parts of batch_one on a tiny model, that ran at once over data neither had read."""
    folder = tmp_path_factory.mktemp("swept")
    flags = [*shlex.split(SMALL), "--output_dir", str(folder / "out"), "--data_cache_dir", str(folder)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.sweep", *flags]
    parts = [
        subprocess.Popen(
            [*command, "--axis", f"precision={recipe}"],
            **{"cwd": ROOT, "env": env, "text": True},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        )
        for recipe in ("bf16", "delayed")
    ]
    printed = [part.communicate(timeout=300)[0] for part in parts]
    assert [part.returncode for part in parts] == [0, 0], "".join(printed)
    return folder / "out"


def pages(folder: Path) -> Path:
    """A copy of the committed pages with nothing between their markers."""
    (folder / "pages").mkdir(exist_ok=True)
    for name in STUDIES:
        before, after = re.split(f"{BEGIN}.*{END}", (PAGES / f"{name}.md").read_text(), flags=re.DOTALL)
        (folder / "pages" / f"{name}.md").write_text(f"{before}{BEGIN}\n{END}{after}")
    return folder / "pages"


def write(folder: Path, *flags: str) -> int:
    return main(["--results", str(folder / "results"), "--pages", str(pages(folder)), *flags])


def made(folder: Path, study: str) -> str:
    return (folder / "pages" / f"{study}.md").read_text().split(BEGIN)[1].split(END)[0]


def rows(text: str) -> dict[str, dict[str, str]]:
    """By its first cell, each row of a text's first table."""
    first = text[text.index("\n|") :].strip().split("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in first.splitlines()]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def use(folder: Path, study: str, group: str, *names: str) -> Path:
    """The folder that the recorded runs were copied to as those of a study."""
    for name in names:
        shutil.copytree(RESULTS / group / name, folder / "results" / study / name)
    return folder / "results" / study


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_parts_of_a_sweep_at_once_are_the_whole_one(swept, capsys):
    records = json.loads((swept / "sweep.json").read_text())
    assert len(records) == 4 and {record["status"] for record in records} == {"done"}
    capsys.readouterr()
    flags = [*shlex.split(SMALL), "--output_dir", str(swept), "--axis", "precision=bf16,delayed"]
    assert sweep.main(["--dry_run", *flags]) == 0
    found = capsys.readouterr().out.splitlines()
    assert len(found) == 4 and all(line.endswith(": done") for line in found)


def test_cells_of_batch_one_are_means_of_fifty_losses_and_their_gaps(swept, tmp_path):
    assert write(tmp_path, "--record", "batch_one", str(swept)) == 0
    text = made(tmp_path, "batch_one")
    assert "### tiny-llama, 128 tokens, 52 steps, learning rate 0.0001, demo, CPU" in text
    mean = {}
    for recipe in ("bf16", "delayed"):
        for batch in (1, 2):
            lines = logged(swept / f"runs/tiny-llama-gpus1-accumulation{batch}-learning_rate1e-4-{recipe}")
            assert [line["step"] for line in lines] == list(range(1, 53))
            mean[recipe, batch] = fmean(line["train/loss"] for line in lines[2:])
    found = rows(text)
    for batch, heading in ((1, "batch 1"), (2, "batch 2 (2 micro-batches)")):
        bf16, delayed = mean["bf16", batch], mean["delayed", batch]
        assert found["BF16, TE layers (emulated)"][heading] == f"{bf16:.4f}"
        gap = f"{100 * (delayed / bf16 - 1):+.2f} %"
        assert found["FP8 delayed, TE layers (emulated)"][heading] == f"{delayed:.4f} ({gap})"
    assert {row["weights"] for row in found.values()} == {"FP32 masters, FP32 moments"}


def test_weights_and_learning_rates_are_told_apart_and_a_stopped_run_is_said_to_be_one(swept, tmp_path):
    assert write(tmp_path, "--record", "batch_one", str(swept)) == 0
    bf16, delayed = (tmp_path / "results" / "batch_one" / f"{r}" for r in ("bf16", "delayed"))
    for copy in (bf16, delayed):
        stem = f"tiny-llama-gpus1-accumulation1-learning_rate1e-4-{copy.name}"
        shutil.copytree(copy.parent / stem, copy)
        change(copy / "config.json", master_weights="none", moment_dtype="bf16")
    (delayed / "summary.json").unlink()
    other = tmp_path / "results" / "batch_one" / "other"
    shutil.copytree(bf16, other)
    change(other / "config.json", learning_rate=1e-5)
    assert write(tmp_path) == 0
    slow, fast = made(tmp_path, "batch_one").split("### ")[1:]
    assert "learning rate 1e-05" in slow and list(rows(slow)) == ["BF16, TE layers (emulated)"]
    lines = [line.strip("| ").split(" | ") for line in fast.splitlines() if line.startswith("| FP8")]
    assert [line[1] for line in lines] == ["FP32 masters, FP32 moments", "no masters, BF16 moments"]
    assert lines[1][2:] == ["stopped at step 52", "-"]
    assert "Not finished: delayed (step 52)." in fast


def test_recorded_runs_keep_their_losses(swept, tmp_path):
    assert write(tmp_path, "--record", "batch_one", str(swept)) == 0
    (run, *_) = sorted((swept / "runs").iterdir())
    copy = tmp_path / "results" / "batch_one" / run.name
    assert sorted(path.name for path in copy.iterdir()) == [
        *("config.json", "env.json", "metrics.jsonl", "summary.json")
    ]
    for name in ("config.json", "env.json", "summary.json"):
        assert (copy / name).read_bytes() == (run / name).read_bytes()
    for whole, kept in zip(logged(run), logged(copy), strict=True):
        assert "train/loss" in kept and not any(name.startswith("perf/") for name in kept)
        assert kept == pytest.approx({name: whole[name] for name in kept}, rel=1e-6)


def test_half_a_line_is_not_recorded(swept, tmp_path):
    shutil.copytree(swept / "runs", tmp_path / "runs")
    (killed, *_) = sorted((tmp_path / "runs").iterdir())
    (killed / "summary.json").unlink()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 53, "train/lo')
    assert write(tmp_path, "--record", "batch_one", str(tmp_path)) == 0
    assert len(logged(tmp_path / "results" / "batch_one" / killed.name)) == 52


def test_another_run_of_the_same_name_does_not_replace_what_is_recorded(tmp_path, capsys):
    folder = use(tmp_path, "thousand_steps", "h200", "1b-packed-bf16")
    shutil.copytree(folder, tmp_path / "new")
    assert write(tmp_path, "--record", "thousand_steps", str(tmp_path / "new")) == 0
    change(tmp_path / "new" / "1b-packed-bf16" / "config.json", learning_rate=0.5)
    assert write(tmp_path, "--record", "thousand_steps", str(tmp_path / "new")) == 2
    assert "with other settings (learning_rate); remove it" in capsys.readouterr().err


RECIPES = ("1b-packed-delayed", "1b-packed-current", "1b-packed-block")


def test_recipes_beside_the_noise_of_bf16_s_seeds(tmp_path):
    """The figures are those of docs/results.md, and (2.7986 / 2.8265 - 1) for the other seed."""
    use(tmp_path, "thousand_steps", "h200", "1b-packed-bf16", "1b-packed-bf16-seed43", *RECIPES)
    assert write(tmp_path) == 0
    text = made(tmp_path, "thousand_steps")
    found = rows(text)
    assert list(found) == [
        "BF16, TE layers",
        *(f"FP8 {recipe}, TE layers" for recipe in ("delayed", "current", "block")),
    ]
    assert list(found["BF16, TE layers"].values())[1:] == [
        *("REFERENCE", "2.8265", "-", "-0.99 % to +0.00 %", "2.7572", "-", "33.2")
    ]
    assert list(found["FP8 delayed, TE layers"].values())[1:] == [
        *("PASS", "2.8320", "+0.20 %", "-0.99 % to +0.00 %", "2.7624", "+0.19 %", "33.5")
    ]
    assert "179 steps, learning rate 0.0001, openmath_gsm8k, NVIDIA H200, 12 sequences a step, 1.0 ti" in text
    drift = text[text.index("| precision | 1 to 36 | 37 to 72 | 73 to 107 | 108 to 143 | 144 to 179 |") :]
    (delayed,) = (line for line in drift.splitlines() if line.startswith("| FP8 delayed"))
    ours, theirs = (
        fmean(line["train/loss"] for line in logged(RESULTS / "h200" / name) if 72 < line["step"] <= 107)
        for name in ("1b-packed-delayed", "1b-packed-bf16")
    )
    assert delayed.strip("| ").split(" | ")[3] == f"{100 * (ours / theirs - 1):+.2f} %"
    assert "Seeds of BF16, TE layers: 42, 43." in text and "Without a BF16 run" not in text
    assert "2026-11-21, torch 2.11.0" in text and "commit 6f8c0162484f." in text


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("summary.json", {"label_tokens": 1}),
        ("summary.json", {"steps": 178}),
        ("config.json", {"seed": 7}),
        ("config.json", {"batch_size": 6}),
        ("config.json", {"master_weights": "none"}),
        ("config.json", {"use_te": False}),
        ("summary.json", {"gpus": 2, "world_size": 2}),
        ("summary.json", {"sharding_mode": "fsdp_full"}),
    ],
)
def test_unlike_runs_are_not_held_against_each_other(tmp_path, file, values):
    folder = use(tmp_path, "thousand_steps", "h200", "1b-packed-bf16", "1b-packed-delayed")
    change(folder / "1b-packed-delayed" / file, **values)
    assert write(tmp_path) == 0
    text = made(tmp_path, "thousand_steps")
    row = next(line for line in text.splitlines() if line.startswith("| FP8 delayed"))
    cells = row.strip("| ").split(" | ")
    assert cells[1:5] == ["-", "2.8320", "-", "-"] and cells[6] == "-"
    assert "same layers, weights, batch, data, steps and seed: 1b-packed-delayed." in text


def test_a_recipe_with_settings_of_its_own_is_held_against_plain_bf16_where_there_is_no_other(tmp_path):
    own = {"moment_dtype": "bf16", "batch_size": 6, "gradient_accumulation_steps": 2}
    own |= {"grad_reduce_dtype": "bf16", "fp8_fast_accumulation": True}
    folder = use(tmp_path, "thousand_steps", "h200", "1b-packed-bf16", "1b-packed-delayed")
    change(folder / "1b-packed-delayed" / "config.json", **own)
    assert write(tmp_path) == 0
    name = (
        "FP8 delayed, TE layers, fast accumulation, BF16 moments, 2 micro-batches, gradients summed in BF16"
    )
    row = rows(made(tmp_path, "thousand_steps"))[name]
    assert (row["verdict"], row["gap"], row["peak GB"]) == ("PASS", "+0.20 %", "33.5")
    shutil.copytree(folder / "1b-packed-bf16", folder / "alike")
    change(folder / "alike" / "config.json", **own | {"fp8_fast_accumulation": False})
    change(folder / "alike" / "summary.json", train_loss_tail_mean=2.0)
    assert write(tmp_path) == 0
    assert "FP8 delayed, TE layers, fast accumulation" in rows(made(tmp_path, "thousand_steps"))


def test_a_recipe_at_another_seed_is_held_against_bf16_of_that_seed(tmp_path):
    names = ("1b-packed-bf16", "1b-packed-bf16-seed43", "1b-packed-delayed", "1b-packed-current")
    folder = use(tmp_path, "thousand_steps", "h200", *names)
    shutil.copytree(folder / "1b-packed-delayed", folder / "again")
    bf16 = json.loads((folder / names[1] / "summary.json").read_text())
    change(folder / "again" / "config.json", seed=43)
    change(folder / "again" / "summary.json", eval_loss=bf16["eval_loss"], label_tokens=bf16["label_tokens"])
    assert write(tmp_path) == 0
    text = made(tmp_path, "thousand_steps")
    table = text[text.index("Gaps by seed") :].splitlines()
    assert table[2] == "| precision | seed 42 | seed 43 | mean |"
    first, second, mean = table[4].removeprefix("| FP8 delayed, TE layers | ").strip(" |").split(" | ")
    assert first == "+0.20 % / +0.19 %"  # as in docs/results.md
    lines = [logged(folder / name) for name in ("again", *names[:3])]
    tails = [tail_mean([line["train/loss"] for line in run if "train/loss" in line]) for run in lines]
    gaps = [100 * (tails[0] / tails[2] - 1), 100 * (tails[3] / tails[1] - 1)]
    assert second == f"{gaps[0]:+.2f} % / +0.00 %"
    assert mean == f"{fmean(gaps):+.2f} % / +0.09 %"
    assert not table[5].startswith("|"), "current has one seed"
    assert text.count("| FP8 delayed, TE layers |") == 3  # one row each: losses, drift, seeds


def test_rows_of_fine_tuning(tmp_path):
    """Tokens/s and memory as in docs/results.md, 48,980 / 38,459 = 1.27; the evaluation is made up."""
    names = ("8b-4gpu-fsdp_full-bf16", "8b-4gpu-fsdp_full-current")
    folder = use(tmp_path, "fsdp_finetuning", "h200-multi", *names)
    for name, loss, perplexity in zip(names, (2.0, 2.02), (7.389, 7.538), strict=True):
        values = {"eval_loss": loss, "eval_perplexity": perplexity, "eval_token_accuracy": 0.5}
        change(folder / name / "summary.json", **values)
    assert write(tmp_path) == 0
    text = made(tmp_path, "fsdp_finetuning")
    assert "### meta-llama/Llama-3.1-8B, 8,192 tokens, 16 steps, learning rate 1e-05" in text
    by_place, every_run = text.split("Every run:")
    assert {name: row["4 GPUs, 1 x 1"] for name, row in rows(by_place).items()} == {
        "BF16, TE layers": "9,615",
        "FP8 current, TE layers": "1.27x, " + rows(every_run)["FP8 current, TE layers"]["gap"],
    }
    bf16, current = rows(every_run).values()
    assert (bf16["precision"], current["precision"]) == ("BF16, TE layers", "FP8 current, TE layers")
    assert (bf16["gap"], bf16["speed"]) == ("-", "-")
    assert (current["GPUs"], current["mode"], current["batch"]) == ("4", "`fsdp_full`", "1 x 1")
    losses = [
        logged(RESULTS / "h200-multi" / name)[-1]["train/loss"] for name in names
    ]  # five were logged, of which 10 % is one
    assert current["final train loss"] == current["train loss, mean of last 10 %"] == f"{losses[1]:.4f}"
    assert current["gap"] == f"{100 * (losses[1] / losses[0] - 1):+.2f} %"
    assert (current["eval loss"], current["eval gap"]) == ("2.0200", "+1.00 %")
    assert (current["perplexity"], current["token accuracy"]) == ("7.54", "50.00%")
    assert (current["tokens/s per GPU"], current["speed"], current["peak GB"]) == ("12,245", "1.27x", "63.9")
    assert (current["MFU of BF16 peak"], current["MFU of FP8 peak"]) == ("63.7%", "31.8%")
    summary = json.loads((RESULTS / "h200-multi" / names[1] / "summary.json").read_text())
    hours = tuple(f"{summary[name]:.3f}" for name in ("gpu_hours", "node_hours"))
    assert (current["GPU-hours"], current["node-hours"]) == hours


def test_a_study_without_runs_names_its_command(tmp_path):
    assert write(tmp_path) == 0
    for name, study in STUDIES.items():
        assert made(tmp_path, name).strip() == f"Not run yet: `{study.command}`"


def test_the_committed_pages_are_those_of_the_recorded_runs(tmp_path):
    assert main(["--pages", str(pages(tmp_path))]) == 0
    for name in STUDIES:
        committed = (PAGES / f"{name}.md").read_text()
        assert (tmp_path / "pages" / f"{name}.md").read_text() == committed, (
            f"{name}.md: python -m benchmarks.study_page"
        )


def test_what_is_wrong_is_one_line(tmp_path, capsys):
    assert write(tmp_path, "--record", "batch_two", str(tmp_path)) == 2
    assert "--record batch_two: no such study; there are batch_one" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert write(tmp_path, "--record", "batch_one", str(tmp_path / "empty")) == 2
    assert "empty: no run folder below it" in capsys.readouterr().err
    (pages(tmp_path) / "batch_one.md").write_text("no markers\n")
    assert main(["--results", str(tmp_path), "--pages", str(tmp_path / "pages")]) == 2
    assert "must hold these two lines once" in capsys.readouterr().err
    assert (tmp_path / "pages" / "batch_one.md").read_text() == "no markers\n"


def commands(page: str, folder: Path) -> list[list[list[str]]]:
    """For each block of a page the commands that bash makes of it: [GPU it may see, arguments of python]."""
    found = []
    text = (PAGES / f"{page}.md").read_text()
    for number, block in enumerate(re.findall(r"^```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)):
        calls = folder / f"{page}-{number}"
        calls.mkdir()
        record = f'python() {{ printf "%s\\0" "$CUDA_VISIBLE_DEVICES" "$@" > "$(mktemp -p {calls})"; }}\n'
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(["bash", "-euc", record + block], check=True, cwd=folder, env=env)
        found.append([path.read_text().split("\0")[:-1] for path in calls.iterdir()])
    return found


def points(command: list[str], capsys) -> list[str]:
    """Of a documented sweep, as --dry_run lists it."""
    assert command[1:3] == ["-m", "benchmarks.sweep"]
    assert sweep.main([*command[3:], "--dry_run"]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_commands_of_batch_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    whole, parts, by_gpus, sizes, record = commands("batch_one", tmp_path)
    (grid,) = (points(command, capsys) for command in whole)
    assert len(grid) == 72 == 3 * 2 * 12
    (again,) = (command for command in parts if not command[0])
    assert points(again, capsys) == grid
    alone = {command[0]: points(command, capsys) for command in parts if command[0]}
    assert sorted(alone) == ["0", "1", "2", "3"] and {len(part) for part in alone.values()} == {18}
    assert sorted(line for part in alone.values() for line in part) == sorted(grid)
    (lines,) = (points(command, capsys) for command in by_gpus)
    assert len(lines) == 8 == 2 * 4 and not set(lines) & set(grid)
    (larger,) = (points(command, capsys) for command in sizes)
    assert len(larger) == 8 == 2 * 4 and not set(larger) & set(grid)
    assert record[0][1:] == shlex.split("-m benchmarks.study_page --record batch_one runs/batch_one")


def test_batch_one_begins_with_batch_one():
    plan = sweep.read_sweep(ROOT / "benchmarks/sweeps/batch_one.yaml")
    given = plan["base"] | {"dataset_name": "demo"}
    configs = [p.cfg for p in sweep.build_points(sweep.read_axes(plan["grid"], []), given, Path("out"))]
    assert [cfg.optim.gradient_accumulation_steps for cfg in configs] == [1] * 24 + [4] * 24 + [2] * 24
    kept = {(cfg.precision.master_weights, cfg.precision.moment_dtype) for cfg in configs}
    assert kept == {("fp32", "fp32"), ("none", "bf16")}
    for cfg in configs:
        assert (cfg.optim.batch_size, cfg.optim.max_steps, cfg.log.log_interval) == (1, 250, 1)
        assert (cfg.optim.lr_scheduler, cfg.optim.warmup_ratio) == ("constant", 0.0)
        assert cfg.optim.learning_rate in (1e-5, 1e-4) and cfg.data.max_seq_length == 2048


def test_the_commands_of_fine_tuning(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (whole,), (quick,), (scaling,), _ = commands("fsdp_finetuning", tmp_path)
    grid = points(whole, capsys)
    assert len(grid) == 128 == 4 * 2 * 2 * 8
    for command, count in ((quick, 8), (scaling, 4 * 2)):
        part = points(command, capsys)
        assert len(part) == count and set(part) < set(grid)


def test_runs_started_by_hand_are_those_of_the_comparisons(tmp_path):
    """Equal settings, whatever they are called, are what a comparison accepts a finished run by."""
    comparisons, _, by_hand, _ = commands("thousand_steps", tmp_path)
    wanted = {}
    for _, *command in comparisons:
        args, training = compare.parse(command[2:])
        variants = parse_variants(args.variants)
        jobs = compare.build_jobs(variants, given_settings(training, "p"), args.output_dir, args.noise_seeds)
        wanted |= {job.cfg.checkpoint.output_dir: job.cfg for job in jobs}
    assert len(wanted) == 18
    gpus = {}
    for gpu, script, *flags in by_hand:
        cfg = parse_config(flags, prog=script, description="")
        assert script == "train_fp8.py" and cfg == wanted.pop(cfg.checkpoint.output_dir)
        gpus[gpu] = gpus.get(gpu, 0) + 1
    assert not wanted and gpus == {"0": 5, "1": 4, "2": 5, "3": 4}


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_has_the_command_that_its_empty_table_names(name, tmp_path):
    command = shlex.split(STUDIES[name].command)[1:]
    of_page = [flags for block in commands(name, tmp_path) for _, *flags in block]
    options = [sorted(flags) for flags in of_page]
    assert sorted(command) in options

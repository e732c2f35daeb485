"""benchmarks.sweep: the grid, what it runs and skips, and its errors."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from fp8_suite.benchmarks.launch import grid
from fp8_suite.benchmarks.launch.grid import GridRun
from fp8_suite.benchmarks.plan.predict import make_plan
from fp8_suite.benchmarks.sweep import build_grid, main, read_axes, read_sweep
from fp8_suite.core.gpus import PLANNED
from fp8_suite.core.packages import ROOT
from fp8_suite.training.estimate.sizes import global_batch, with_data_ranks

from tests.benchmarks.folders import launch_here

# batch_one: 3 batches x 2 rates x 12 precisions; fsdp_finetuning: 4 x 2 x 2 x 8; modes: 2 x 3 x 8.
SHIPPED = {"b200_study": 54, "recipes": 22, "batch_one": 72, "fsdp_finetuning": 128, "modes": 48}
SHIPPED |= {"four_gpus": 12, "eight_gpus": 14, "gradient_exchange": 3, "five_thousand_steps": 27}


def write(path: Path, value) -> Path:
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False))
    return path


def test_a_sweep_runs_and_reports_what_it_can(tmp_path, capsys, monkeypatch):
    """One run that trains, one that needs missing GPUs, one whose data lacks the split."""
    base = {"num_of_samples": 60, "max_steps": 2, "learning_rate": 1e-3, "eval_samples": 6, "num_workers": 0}
    base |= {"num_proc": 1, "batch_size": 2, "eval_interval": 0, "log_interval": 1, "export": False}
    base |= {"max_seq_length": 128}
    axes = {"precision": ["delayed"], "split_name": ["train_1M", "absent"], "gpus": [1, 64]}
    file = write(tmp_path / "grid.yaml", {"grid": axes, "base": base, "needs": ["dataset_name"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(grid, "launch", launch_here)
    out = tmp_path / "out"
    flags = [str(file), *f"--dataset_name demo --output_dir {out} --no_save_checkpoints".split()]
    assert main(flags) == 1  # one failed
    printed = capsys.readouterr().out
    name = "delayed-split_nametrain_1M-gpus1"
    assert "1 finished, 2 skipped, 1 failed" in printed
    assert f"- {name.replace('gpus1', 'gpus64')}: skipped, needs 64 GPUs, this machine has " in printed
    assert re.search(rf"- {name.replace('train_1M', 'absent')}: failed, .*--split_name absent", printed)
    assert (out / "loss.png").exists() and (out / "report.html").exists()
    assert json.loads((out / "runs" / name / "summary.json").read_text())["steps"] == 2
    monkeypatch.setattr(grid, "launch", None)
    assert main([*flags, "--axis", "split_name=train_1M", "--axis", "gpus=1"]) == 0
    assert f"[1/1] {name}: finished before" in capsys.readouterr().out
    assert main([*flags, "--dry_run"]) == 0
    assert [line.split(": ")[1].split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        *("finished", "skipped", "to run", "skipped")
    ]


def test_runs_of_a_grid(tmp_path):
    axes = read_axes({"model": ["org/A", "tiny-llama"], "precision": ["bf16", "delayed"], "gpus": [1, 2]}, [])
    runs = build_grid(axes, {"batch_size": 3}, tmp_path)
    last = runs[-1]
    assert (len(runs), runs[0].name, last.name) == (8, "A-bf16-gpus1", "tiny-llama-delayed-gpus2")
    assert last.gpus == 2 and last.cfg.model.use_te and last.cfg.precision.fp8_scenario == "delayed"
    assert last.cfg.optim.batch_size == 3 and last.folder == tmp_path / "runs" / last.name
    fewer = build_grid(read_axes(axes, ["gpus=2", "precision=bf16_hf,tensorwise"]), {}, tmp_path)
    names = [f"{m}-{p}-gpus2" for m in ("A", "tiny-llama") for p in ("bf16_hf", "tensorwise")]
    assert [run.name for run in fewer] == names and not any(run.cfg.model.use_te for run in fewer)


@pytest.mark.parametrize("size", [4, "auto"])
def test_a_grid_may_share_sequences_among_ranks(size, tmp_path):
    """Four ranks can share one sequence; data parallelism alone would need four."""
    axes = {"precision": ["delayed"], "gpus": [4], "context_parallel_size": [size]}
    total = 1 if size == 4 else 4
    (run,) = build_grid(axes, {"batch_size": 1, "global_batch_size": total}, tmp_path)
    assert global_batch(*with_data_ranks(run.cfg, run.gpus)) == total


def test_a_part_of_a_grid_has_the_runs_of_the_whole(tmp_path):
    """`bf16` by itself would have Hugging Face layers; a part of a file that has TE recipes keeps TE's."""
    axes = {"precision": ["bf16", "delayed"], "batch_size": [1, 2]}
    full, part = build_grid(axes, {}, tmp_path), read_axes(axes, ["precision=bf16"])
    assert build_grid(part, {}, tmp_path, precisions=axes["precision"]) == full[:2]
    assert full[0].cfg.model.use_te and not build_grid(part, {}, tmp_path)[0].cfg.model.use_te


def test_a_value_of_an_axis_may_have_further_settings_as_a_variant_may(tmp_path):
    axes = read_axes({"sharding_mode": ["ddp"], "gpus": [4]}, ["sharding_mode=ddp,hsdp+hsdp_shard_size=2"])
    ddp, hsdp = build_grid(axes, {}, tmp_path)
    assert (ddp.cfg.sharding.hsdp_shard_size, hsdp.cfg.sharding.hsdp_shard_size) == (None, 2)
    assert hsdp.name == "hsdp+hsdp_shard_size=2-gpus4"


def shipped(name: str, folder: Path) -> list[GridRun]:
    file = read_sweep(ROOT / f"benchmarks/sweeps/{name}.yaml")
    return build_grid(file["grid"], file["base"], folder)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sweeps_are_whole(name, tmp_path):
    runs = shipped(name, tmp_path)
    assert len(runs) == SHIPPED[name] and all(run.cfg.model.init == "random" for run in runs)
    assert {path.stem for path in (ROOT / "benchmarks/sweeps").glob("*.yaml")} == SHIPPED.keys()


@pytest.mark.parametrize(
    ("name", "gpu"), [("four_gpus", "H100"), ("four_gpus", "H200"), ("eight_gpus", "H200")]
)
def test_shipped_sweeps_of_large_models_fit_with_4_gb_to_spare(name, gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    smaller = PLANNED[gpu]._replace(memory_gb=PLANNED[gpu].memory_gb - 4)
    assert not [
        run.name for run in shipped(name, tmp_path) if not make_plan(run.cfg, smaller, gpus=run.gpus).fits
    ]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("grid: {batch_size: [1]}\nbse: {}", "", "may only have `grid:`"),
        ("grid: {modle: [tiny-llama]}", "", "unknown setting 'modle'; did you mean 'model'?"),
        ("grid: {gpus: [3]}", "--global_batch_size 16", "gpus3: --global_batch_size 16 "),
        ("grid: {model: [a/export, b/export]}", "", "have the folder name export"),
        ("grid: {batch_size: [1]}\nneeds: [dataset_name]", "", "needs --dataset_name"),
        ("grid: {batch_size: [1]}", "--batch_size 2", "--batch_size 2: is an axis of the grid"),
        ("grid: {batch_size: [1]}", "--axis gpus=2", "--axis gpus=2: not an axis of the grid"),
        ("grid: {batch_size: [1]}", "--use_te", "sets this for every run"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, text, flags, message):
    file = write(tmp_path / "grid.yaml", text)
    assert main([str(file), "--output_dir", str(tmp_path / "out"), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def documented() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    found = re.findall(r"^python -m benchmarks\.sweep (benchmarks/sweeps/.*)$", text, re.MULTILINE)
    return [line for line in found if "$" not in line]


def test_documented_commands_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.chdir(ROOT)
    assert len(documented()) >= 2
    for line in documented():
        assert main([*line.split(), "--dry_run", "--output_dir", str(tmp_path)]) == 0, capsys.readouterr().err


def test_runs_of_a_sweep_are_a_group_on_wandb_unless_the_user_names_one(tmp_path, monkeypatch):
    for users, group in ((None, "study"), ("mine", "mine")):
        monkeypatch.setenv("WANDB_RUN_GROUP", users or "")
        if users is None:
            monkeypatch.delenv("WANDB_RUN_GROUP")
        assert grid.train_all([], tmp_path / "study", lambda run, failures: None) == {}
        assert os.environ["WANDB_RUN_GROUP"] == group

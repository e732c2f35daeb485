"""benchmarks.sweep: the grid, what is skipped and why, and a small sweep run twice."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import sweep as module
from benchmarks.plan.time import GPUS
from benchmarks.records.launch import Outcome
from benchmarks.sweep import (
    Point,
    Result,
    build_points,
    main,
    read_axes,
    read_sweep,
    run_points,
    why_skip,
)
from training.config import config_from_dict

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "benchmarks" / "sweeps").glob("*.yaml"))


def write(path: Path, value) -> Path:
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False))
    return path


def test_a_sweep_runs_what_it_can_says_what_not_and_is_gone_on_with(tmp_path, capsys, monkeypatch):
    """One run that trains, one that needs GPUs that are not there, one whose settings the model refuses."""
    base = {"num_of_samples": 60, "max_steps": 2, "learning_rate": 1e-3, "eval_samples": 6, "num_workers": 0}
    base |= {"num_proc": 1, "batch_size": 2, "eval_interval": 0, "log_interval": 1, "export": False}
    grid = {
        "model": ["tiny-llama"],
        "precision": ["delayed"],
        "sequence_length": [128, 4096],
        "gpus": [1, 64],
    }
    file = write(tmp_path / "grid.yaml", {"grid": grid, "base": base, "needs": ["dataset_name"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = [
        str(file),
        "--dataset_name",
        "demo",
        "--output_dir",
        str(tmp_path / "out"),
        "--no_save_checkpoints",
    ]
    assert main(flags) == 1  # one failed
    printed = capsys.readouterr().out
    results = {r["name"]: r for r in json.loads((tmp_path / "out" / "sweep.json").read_text())}
    assert [r["status"] for r in results.values()] == ["done", "skipped", "failed", "skipped"]
    name = "tiny-llama-delayed-seq128-gpus1"
    assert (
        results[name.replace("gpus1", "gpus64")]["reason"]
        == f"needs 64 GPUs, this machine has {torch.cuda.device_count()}"
    )
    assert "--max_seq_length 4096" in results[name.replace("128", "4096")]["reason"]
    assert "1 done, 2 skipped, 1 failed" in printed
    assert (tmp_path / "out" / "loss.png").exists()
    assert json.loads((tmp_path / "out" / "runs" / name / "summary.json").read_text())["steps"] == 2
    assert main([*flags, "--axis", "sequence_length=128", "--axis", "gpus=1"]) == 0
    printed = capsys.readouterr().out
    assert f"[1/1] {name}: done" in printed and "step 1/2" not in printed


def test_points_of_a_grid(tmp_path):
    axes = read_axes({"model": ["org/A", "tiny-llama"], "precision": ["bf16", "delayed"], "gpus": [1, 2]}, [])
    points = build_points(axes, {"batch_size": 3}, tmp_path)
    assert (
        len(points) == 8
        and points[0].name == "A-bf16-gpus1"
        and points[-1].name == "tiny-llama-delayed-gpus2"
    )
    last = points[-1]
    assert last.gpus == 2 and last.cfg.model.use_te and last.cfg.precision.fp8_scenario == "delayed"
    assert last.cfg.optim.batch_size == 3 and last.folder == tmp_path / "runs" / last.name
    fewer = build_points(read_axes(axes, ["gpus=2", "precision=bf16_hf,tensorwise"]), {}, tmp_path)
    assert [p.name for p in fewer] == [
        f"{m}-{p}-gpus2" for m in ("A", "tiny-llama") for p in ("bf16_hf", "tensorwise")
    ]
    assert not any(p.cfg.model.use_te for p in fewer)
    mapped = read_axes(axes, ["precision=bf16_hf,tensorwise+precision_map=layers.0=bf16,layers.1=bf16"])
    maps = {p.cfg.precision.precision_map for p in build_points(mapped, {}, tmp_path)}
    assert maps == {None, "layers.0=bf16,layers.1=bf16"}


def test_a_key_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("grid:\n  precision: [bf16]\n  precision: [delayed]\n")
    with pytest.raises(ValueError, match=r"not valid YAML: duplicate key 'precision'"):
        read_sweep(path)
    path.write_text("grid: {precision: [bf16]}\nbase: {<<: {max_steps: 3, seed: 1}, max_steps: 4}\n")
    assert read_sweep(path)["base"] == {"max_steps": 4, "seed": 1}, "YAML's merges are no repetition"


def points(*sizes: tuple[int, int, int]) -> list[Point]:
    """(sequence length, batch, GPUs)."""
    return [
        Point(
            f"{length}-{batch}-{gpus}",
            gpus,
            config_from_dict({"max_seq_length": length, "batch_size": batch}),
        )
        for length, batch, gpus in sizes
    ]


def test_what_is_larger_than_what_ran_out_of_memory_is_skipped():
    small, longer, wider, shorter, more_gpus, traded = grid = points(
        (2048, 2, 1), (4096, 2, 1), (2048, 4, 1), (1024, 2, 1), (4096, 2, 2), (4096, 1, 1)
    )
    results = {small.name: Result(small.name, "out_of_memory")}
    for point in (longer, wider):
        assert "2048-2-1 ran out of memory" in why_skip(point, results, grid, 2)
    assert [why_skip(p, results, grid, 2) for p in (shorter, more_gpus, traded, small)] == [None] * 4
    assert why_skip(longer, {small.name: Result(small.name, "failed")}, grid, 2) is None
    assert why_skip(more_gpus, {}, grid, 1) == "needs 2 GPUs, this machine has 1"


def test_names_on_wandb_do_not_hide_what_is_larger(tmp_path):
    small, longer = build_points({"sequence_length": [512, 1024]}, {"use_wandb": True}, tmp_path)
    results = {small.name: Result(small.name, "out_of_memory")}
    assert f"{small.name} ran out of memory" in why_skip(longer, results, [small, longer], 1)


def test_what_does_not_fit_by_the_plan_is_skipped():
    def point(model: str, **settings) -> Point:
        flags = {"model_name": model, "max_seq_length": 8192, "batch_size": 1, "use_te": True, **settings}
        return Point(model, 1, config_from_dict(flags))

    large, small = point("meta-llama/Llama-3.1-8B"), point("meta-llama/Llama-3.2-1B")
    recorded = 137.4  # GB, of the 8B in BF16 on an H200
    reason = why_skip(large, {}, [large, small], 1, GPUS["H100"])
    needed = float(re.fullmatch(r"needs (\d+) GB a GPU by benchmarks\.plan, of 85", reason)[1])
    assert needed == pytest.approx(recorded, rel=0.03)
    assert why_skip(small, {}, [large, small], 1, GPUS["H100"]) is None
    assert why_skip(large, {}, [large, small], 1, GPUS["H200"]) is None
    assert why_skip(large, {}, [large, small], 1) is None, "without --gpu runs tell"
    emulated = point("meta-llama/Llama-3.1-8B", te_backend="emulated")
    assert why_skip(emulated, {}, [emulated], 1, GPUS["H100"]) is None


def test_an_unknown_gpu_is_named(capsys, tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("grid: {model: [tiny-llama]}")
    assert main([str(path), "--gpu", "H20O"]) == 2
    assert "--gpu H20O: not one of" in capsys.readouterr().err


def test_out_of_memory_is_recorded_and_the_grid_goes_on(tmp_path, monkeypatch):
    """No CPU run can run out of GPU memory, so the process is a stand-in here."""
    grid = build_points({"sequence_length": [512, 1024], "precision": ["bf16", "delayed"]}, {}, tmp_path)
    started = []

    def launch(cfg, *, gpus, log):
        folder = Path(cfg.checkpoint.output_dir)
        started.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(cfg.to_dict()))
        if "bf16" in folder.name:
            return Outcome(1, folder, "rank 0 (host): CUDA out of memory. Tried to allocate", False)
        for name in ("summary.json", "metrics.jsonl"):
            (folder / name).write_text("{}")
        return Outcome(0, folder, "", False)

    monkeypatch.setattr(module, "launch", launch)
    results, stopped = run_points(grid, tmp_path, retry=False)
    assert not stopped and [r.status for r in results.values()] == [
        "out_of_memory",
        "done",
        "skipped",
        "done",
    ]
    assert started == ["seq512-bf16", "seq512-delayed", "seq1024-delayed"]
    started.clear()
    again, _ = run_points(grid, tmp_path, retry=False)
    assert again == results and not started
    run_points(grid, tmp_path, retry=True)
    assert started == ["seq512-bf16"]
    started.clear()
    axes = {"sequence_length": [512, 1024], "precision": ["bf16", "delayed"]}
    cured = build_points(axes, {"gradient_checkpointing": True}, tmp_path)
    run_points([point for point in cured if "bf16" in point.name], tmp_path, retry=False)
    assert started == ["seq512-bf16"], "what other settings did says nothing of these"


def test_what_failed_is_tried_again(tmp_path, monkeypatch):
    codes = [1, 75]

    def launch(cfg, *, gpus, log):
        code = codes.pop(0)
        return Outcome(code, ROOT / "benchmarks", "a crash", stopped=code == 75)

    monkeypatch.setattr(module, "launch", launch)
    grid = build_points({"batch_size": [1]}, {}, tmp_path)
    results, stopped = run_points(grid, tmp_path, retry=False)
    assert not stopped and [r.status for r in results.values()] == ["skipped"]
    assert run_points(grid, tmp_path, retry=False) == ({}, True) and not codes


def test_a_part_of_a_grid_is_the_same_runs(tmp_path, capsys):
    """`bf16` alone would have Hugging Face layers; a part of a file that has TE recipes keeps TE's."""
    file = write(tmp_path / "grid.yaml", {"grid": {"precision": ["bf16", "delayed"], "batch_size": [1, 2]}})
    plan = read_sweep(file)
    whole = build_points(read_axes(plan["grid"], []), {}, tmp_path)
    axes = read_axes(plan["grid"], ["precision=bf16"])
    part = build_points(axes, {}, tmp_path, beside=plan["grid"]["precision"])
    assert part == whole[:2] and all(point.cfg.model.use_te for point in part)
    assert not any(point.cfg.model.use_te for point in build_points(axes, {}, tmp_path))


def test_sweeps_into_one_folder_keep_each_other_s_records(tmp_path, monkeypatch):
    """Stand-ins for runs; each of the two sweeps knows its own points alone."""

    def launch(cfg, *, gpus, log):
        return Outcome(1, ROOT / "benchmarks", "CUDA out of memory", stopped=False)

    monkeypatch.setattr(module, "launch", launch)
    first, second = ([point] for point in build_points({"batch_size": [1, 2]}, {}, tmp_path))
    run_points(first, tmp_path, retry=False)
    run_points(second, tmp_path, retry=False)
    entries = json.loads((tmp_path / "sweep.json").read_text())
    assert [(entry["name"], entry["status"]) for entry in entries] == [
        ("batch1", "out_of_memory"),
        ("batch2", "out_of_memory"),
    ]
    monkeypatch.setattr(module, "launch", None)
    results, _ = run_points([*first, *second], tmp_path, retry=False)
    assert [result.status for result in results.values()] == ["out_of_memory"] * 2


def test_a_run_that_another_process_writes_to_ends_the_sweep(tmp_path, monkeypatch):
    error = "--output_dir out: another run is writing to it; wait for it to end"
    started = []

    def launch(cfg, **_):
        started.append(cfg)
        return Outcome(2, Path(cfg.checkpoint.output_dir), error, stopped=False)

    monkeypatch.setattr(module, "launch", launch)
    points = build_points({"batch_size": [1, 2]}, {}, tmp_path)
    with pytest.raises(ValueError, match=r"batch1: .*another run is writing to it.*the same command goes on"):
        run_points(points, tmp_path, retry=False)
    assert len(started) == 1


def test_typed_values_of_an_axis_are_those_of_the_file(tmp_path):
    grid = {"packing": [True, False], "learning_rate": [0.10, "1e-4"], "max_seq_length": [128, "1e3"]}
    typed = ["packing=false,TRUE", "learning_rate=0.10,1.0e-4,2.0e-4", "max_seq_length=128,1000"]
    axes = read_axes(grid, typed)
    assert axes["packing"] == [False, True] and axes["max_seq_length"] == [128, "1e3"]
    assert axes["learning_rate"] == [0.1, "1e-4", "2.0e-4"]
    names = {point.name for point in build_points(grid, {}, tmp_path)}
    assert names < {point.name for point in build_points(axes, {}, tmp_path)}


def test_a_dry_run_tells_what_would_be_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    file = write(tmp_path / "grid.yaml", {"grid": {"model": ["meta-llama/Llama-3.1-8B"], "gpus": [1, 4]}})
    command = [str(file), "--gpu", "H100", "--dry_run", "--output_dir", str(tmp_path / "out")]
    assert main(command) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Llama-3.1-8B-gpus1: skipped, needs ") and first.endswith(
        " by benchmarks.plan, of 85"
    )
    assert second == "Llama-3.1-8B-gpus4: skipped, needs 4 GPUs, this machine has 1"
    assert main([*command, "--gpu", "B200"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Llama-3.1-8B-gpus1: to run"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_are_whole(path, tmp_path):
    plan = read_sweep(path)
    found = build_points(read_axes(plan["grid"], []), plan["base"] | {"dataset_name": "demo"}, tmp_path)
    # batch_one: 3 batches x 2 rates x 12 precisions; fsdp_finetuning: 4 x 2 x 2 x 8; modes: 2 x 3 x 8.
    counts = {"b200_study": 54, "recipes": 18, "batch_one": 72, "fsdp_finetuning": 128, "modes": 48}
    assert len(found) == counts[path.stem]
    assert all(point.cfg.model.init == "random" for point in found)


def test_the_b200_grid(tmp_path):
    plan = read_sweep(ROOT / "benchmarks/sweeps/b200_study.yaml")
    found = build_points(read_axes(plan["grid"], []), plan["base"], tmp_path)
    seen = {(p.cfg.model.model_name[-2:], p.cfg.data.max_seq_length, p.gpus) for p in found}
    assert seen == {(m, s, g) for m in ("1B", "3B", "8B") for s in (2048, 4096, 8192) for g in (1, 2, 4)}
    assert {p.cfg.precision.mixed_precision for p in found} == {"bf16", "fp8"}
    for p in found:
        assert (p.cfg.optim.batch_size, p.cfg.optim.learning_rate, p.cfg.optim.seed) == (1, 1e-5, 42)
        assert not p.cfg.checkpoint.save_checkpoints and not p.cfg.checkpoint.export


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("grid: {model: [tiny-llama]}\nbse: {}", "", "unknown key 'bse'; did you mean 'base'?"),
        ("base: {}", "", "must hold a `grid:`"),
        ("grid: [1]", "", "`grid:` must be a mapping"),
        ("grid: {modle: [tiny-llama]}", "", "grid.yaml: axis 'modle' is unknown; did you mean 'model'?"),
        ("grid: {model: tiny-llama}", "", "axis model: must be a list"),
        ("grid: {model: []}", "", "axis model: must be a list"),
        ("grid: {precision: [fp7]}", "", "axis precision fp7: unknown variant"),
        ("grid: {gpus: [0]}", "", "axis gpus: 0 is no number of GPUs"),
        ("grid: {batch_size: [0]}", "", "batch0: --batch_size 0: must be at least 1"),
        (
            "grid: {model: [a/export, b/export]}",
            "",
            "a/export and b/export would share the run folders' export",
        ),
        ("grid: {model: [..]}", "", "axis model: '..' gives a run folder no name"),
        ('grid: {gpus: ["²"]}', "", "axis gpus: '²' is no number of GPUs"),
        ("grid: {batch_size: [1, 1]}", "", "axis batch_size has batch1 twice"),
        (
            "grid: {batch_size: [1]}\nbase: {sed: 1}",
            "",
            "'sed' is no setting of all runs; did you mean 'seed'?",
        ),
        ("grid: {batch_size: [1]}\nneeds: [dataset_name]", "", "needs --dataset_name"),
        ("grid: {batch_size: [1]}", "--batch_size 2", "--batch_size: it is an axis of the grid"),
        ("grid: {batch_size: [1]}", "--axis gpus=2", "--axis gpus=2: the grid has batch_size"),
        ("grid: {batch_size: [1]}", "--axis batch_size=", "--axis batch_size=: must have at least one value"),
        ("grid: {batch_size: [1]}", "--use_te", "decides it for each run"),
        (
            "grid: {batch_size: [1]",
            "",
            "not valid YAML: expected ',' or '}', but got '<stream end>' (line 1)",
        ),
        ("grid: {batch_size: [1], 3: [1]}", "", "`grid:` holds 3, which is no name of a setting"),
        ("grid: {batch_size: [1]}\nneeds: [[1]]", "", "`needs:` holds [1], which is no name"),
        ("grid: {}", "", "`grid:` must have an axis"),
        ("grid: {model: [a], model_name: [b]}", "", "axes model and model_name are the same"),
        ("grid: {batch_size: [1]}\nbase: {output_dir: x}", "", "the sweep sets it itself"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, text, flags, message):
    file = write(tmp_path / "grid.yaml", text)
    assert main([str(file), "--output_dir", str(tmp_path / "out"), *flags.split()]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("study", ["batch_one", "fsdp_finetuning"])
def test_folders_are_named_as_those_of_recorded_runs(tmp_path, study):
    """Else a sweep that goes on would do what is done again."""
    plan = read_sweep(ROOT / f"benchmarks/sweeps/{study}.yaml")
    points = build_points(plan["grid"], plan["base"] | {"dataset_name": "demo"}, tmp_path)
    recorded = {path.name for path in (ROOT / "benchmarks/results" / study).iterdir()}
    assert len(recorded & {point.name for point in points}) > 60

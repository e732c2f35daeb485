"""benchmarks.sweep: the grid, skipped runs and their reasons, and a small sweep run twice."""

import json
import re
from pathlib import Path

import pytest
import yaml
from fp8_suite.benchmarks import sweep as module
from fp8_suite.benchmarks.records.launch import Outcome
from fp8_suite.benchmarks.sweep import (
    Point,
    Result,
    build_points,
    main,
    read_axes,
    read_sweep,
    run_points,
    why_skip,
)
from fp8_suite.core.errors import EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY, UserError
from fp8_suite.core.gpus import GPUS
from fp8_suite.training.config import config_from_dict

from tests.benchmarks.folders import launch_here

ROOT = Path(__file__).resolve().parents[2]
# batch_one: 3 batches x 2 rates x 12 precisions; fsdp_finetuning: 4 x 2 x 2 x 8; modes: 2 x 3 x 8.
SHIPPED = {"b200_study": 54, "recipes": 18, "batch_one": 72, "fsdp_finetuning": 128, "modes": 42}


def write(path: Path, value) -> Path:
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False))
    return path


def test_a_sweep_runs_and_reports_what_it_can(tmp_path, capsys, monkeypatch):
    """One run that trains, one that needs missing GPUs, one whose data lacks the split."""
    base = {"num_of_samples": 60, "max_steps": 2, "learning_rate": 1e-3, "eval_samples": 6, "num_workers": 0}
    base |= {"num_proc": 1, "batch_size": 2, "eval_interval": 0, "log_interval": 1, "export": False}
    base |= {"max_seq_length": 128}
    grid = {"precision": ["delayed"], "split_name": ["train_1M", "absent"], "gpus": [1, 64]}
    file = write(tmp_path / "grid.yaml", {"grid": grid, "base": base, "needs": ["dataset_name"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(module, "launch", launch_here)
    out = tmp_path / "out"
    flags = [str(file), *f"--dataset_name demo --output_dir {out} --no_save_checkpoints".split()]
    assert main(flags) == 1  # one failed
    assert "1 done, 2 skipped, 1 failed" in capsys.readouterr().out
    results = {r["name"]: r for r in json.loads((out / "sweep.json").read_text())}
    assert [r["status"] for r in results.values()] == ["done", "skipped", "failed", "skipped"]
    name = "delayed-split_nametrain_1M-gpus1"
    assert results[name.replace("gpus1", "gpus64")]["reason"].startswith("needs 64 GPUs, this machine has ")
    assert "--split_name absent" in results[name.replace("train_1M", "absent")]["reason"]
    assert (out / "loss.png").exists() and (out / "report.html").exists()
    assert json.loads((out / "runs" / name / "summary.json").read_text())["steps"] == 2
    monkeypatch.setattr(module, "launch", None)
    assert main([*flags, "--axis", "split_name=train_1M", "--axis", "gpus=1"]) == 0
    assert f"[1/1] {name}: done" in capsys.readouterr().out


# The grid


def test_points_of_a_grid(tmp_path):
    axes = read_axes({"model": ["org/A", "tiny-llama"], "precision": ["bf16", "delayed"], "gpus": [1, 2]}, [])
    points = build_points(axes, {"batch_size": 3}, tmp_path)
    last = points[-1]
    assert (len(points), points[0].name, last.name) == (8, "A-bf16-gpus1", "tiny-llama-delayed-gpus2")
    assert last.gpus == 2 and last.cfg.model.use_te and last.cfg.precision.fp8_scenario == "delayed"
    assert last.cfg.optim.batch_size == 3 and last.folder == tmp_path / "runs" / last.name
    fewer = build_points(read_axes(axes, ["gpus=2", "precision=bf16_hf,tensorwise"]), {}, tmp_path)
    names = [f"{m}-{p}-gpus2" for m in ("A", "tiny-llama") for p in ("bf16_hf", "tensorwise")]
    assert [p.name for p in fewer] == names and not any(p.cfg.model.use_te for p in fewer)


def test_a_part_of_a_grid_has_the_runs_of_the_whole(tmp_path):
    """`bf16` by itself would have Hugging Face layers; a part of a file that has TE recipes keeps TE's."""
    grid = {"precision": ["bf16", "delayed"], "batch_size": [1, 2]}
    whole, axes = build_points(grid, {}, tmp_path), read_axes(grid, ["precision=bf16"])
    assert build_points(axes, {}, tmp_path, precisions=grid["precision"]) == whole[:2]
    assert whole[0].cfg.model.use_te and not build_points(axes, {}, tmp_path)[0].cfg.model.use_te


def test_typed_values_of_an_axis_name_the_folders_of_the_file(tmp_path):
    grid = {"packing": [True, False], "learning_rate": [0.10, "1e-4"], "max_seq_length": [128, "1e3"]}
    typed = ["packing=false,TRUE", "learning_rate=0.10,1.0e-4,2.0e-4", "max_seq_length=128,1000"]
    axes = read_axes(grid, typed)
    assert axes["packing"] == [False, True] and axes["max_seq_length"] == [128, "1e3"]
    assert axes["learning_rate"] == [0.1, "1e-4", "2.0e-4"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sweeps_are_whole(name, tmp_path):
    file = read_sweep(ROOT / f"benchmarks/sweeps/{name}.yaml")
    points = build_points(file["grid"], file["base"] | {"dataset_name": "demo"}, tmp_path)
    assert len(points) == SHIPPED[name] and all(point.cfg.model.init == "random" for point in points)
    assert {path.stem for path in (ROOT / "benchmarks/sweeps").glob("*.yaml")} == SHIPPED.keys()


# Runs that are skipped, fail or are resumed


def points(*sizes: tuple[int, int, int]) -> list[Point]:
    """Points of (sequence length, batch size, GPUs)."""
    return [
        Point(f"{s}-{b}-{g}", g, config_from_dict({"max_seq_length": s, "batch_size": b}))
        for s, b, g in sizes
    ]


def test_runs_larger_than_one_that_ran_out_of_memory_are_skipped(tmp_path):
    small, longer, wider, shorter, more_gpus, traded = grid = points(
        (2048, 2, 1), (4096, 2, 1), (2048, 4, 1), (1024, 2, 1), (4096, 2, 2), (4096, 1, 1)
    )
    results = {small.name: Result(small.name, "out_of_memory")}
    for point in (longer, wider):
        assert "needs more memory than 2048-2-1" in why_skip(point, results, grid, 2)
    assert [why_skip(p, results, grid, 2) for p in (shorter, more_gpus, traded, small)] == [None] * 4
    assert why_skip(longer, {small.name: Result(small.name, "failed")}, grid, 2) is None
    assert why_skip(more_gpus, {}, grid, 1) == "needs 2 GPUs, this machine has 1"
    first, second = build_points({"sequence_length": [512, 1024]}, {"use_wandb": True}, tmp_path)
    results = {first.name: Result(first.name, "out_of_memory")}
    assert why_skip(second, results, [first, second], 1), "names on W&B do not matter"


def test_a_larger_memory_limit_retries_what_ran_out_of_memory(tmp_path):
    axes = {"memory_limit_gb": [40, 80], "sequence_length": [4096, 8192]}
    grid = build_points(axes, {"model_name": "tiny-llama"}, tmp_path)
    results = {grid[0].name: Result(grid[0].name, "out_of_memory")}
    assert [why_skip(point, results, grid, 1) is None for point in grid[1:]] == [False, True, True]
    assert grid[0].digest() != grid[2].digest()


def test_runs_that_do_not_fit_by_the_plan_are_skipped():
    def point(model: str, **settings) -> Point:
        flags = {"model_name": model, "max_seq_length": 8192, "batch_size": 1, "use_te": True, **settings}
        return Point(model, 1, config_from_dict(flags))

    large, small = point("meta-llama/Llama-3.1-8B"), point("meta-llama/Llama-3.2-1B")
    reason = why_skip(large, {}, [large, small], 1, GPUS["H100"])
    needed = float(re.fullmatch(r"needs (\d+) GB per GPU, as predicted; the GPU has 85 GB", reason)[1])
    assert needed == pytest.approx(137.4, rel=0.03), "recorded: the 8B in BF16 on an H200"
    assert why_skip(small, {}, [large, small], 1, GPUS["H100"]) is None
    assert why_skip(large, {}, [large, small], 1, GPUS["H200"]) is None
    assert why_skip(large, {}, [large, small], 1) is None, "without --gpu"
    emulated = point("meta-llama/Llama-3.1-8B", te_backend="emulated")
    assert why_skip(emulated, {}, [emulated], 1, GPUS["H100"]) is None


@pytest.fixture
def started(monkeypatch):
    """Names of the runs that a stand-in for processes was asked to run; `codes` are their exit codes."""
    names, codes = [], {}

    def launch(cfg, *, gpus, log):
        folder = Path(cfg.checkpoint.output_dir)
        names.append(folder.name)
        code = next((code for part, code in codes.items() if part in folder.name), 0)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(cfg.to_dict()))
        for name in () if code else ("summary.json", "metrics.jsonl"):
            (folder / name).write_text("{}")
        return Outcome(code, folder, "its error" if code else None)

    monkeypatch.setattr(module, "launch", launch)
    return type("Started", (), {"names": names, "codes": codes})


def run(grid, folder, *, retry=False):
    return [result.status for result in run_points(grid, folder, retry=retry).values()]


def test_runs_out_of_memory_are_recorded_and_the_grid_continues(tmp_path, started):
    axes = {"sequence_length": [512, 1024], "precision": ["bf16", "delayed"]}
    grid = build_points(axes, {}, tmp_path)
    started.codes["bf16"] = EXIT_OUT_OF_MEMORY
    expected = ["out_of_memory", "done", "skipped", "done"]
    assert run(grid, tmp_path) == expected
    assert started.names == ["seq512-bf16", "seq512-delayed", "seq1024-delayed"]
    started.names.clear()
    assert run(grid, tmp_path) == expected and not started.names
    run(grid, tmp_path, retry=True)
    assert started.names == ["seq512-bf16"]
    started.names.clear()
    smaller = build_points(axes, {"gradient_checkpointing": True}, tmp_path)
    run([point for point in smaller if "bf16" in point.name], tmp_path)
    assert started.names == ["seq512-bf16"], "other settings may fit"


def test_failed_runs_are_repeated_and_a_stopped_one_ends_the_sweep(tmp_path, started):
    grid = build_points({"batch_size": [1, 2]}, {}, tmp_path)
    started.codes["batch1"] = 1
    assert run(grid, tmp_path) == ["failed", "done"]
    started.codes["batch1"] = EXIT_INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        run(grid, tmp_path)
    assert started.names == ["batch1", "batch2", "batch1"]


def test_sweeps_into_one_folder_keep_each_other_s_results(tmp_path, started):
    started.codes["batch"] = EXIT_OUT_OF_MEMORY
    first, second = ([point] for point in build_points({"batch_size": [2, 1]}, {}, tmp_path))
    run(first, tmp_path)
    run(second, tmp_path)
    recorded = json.loads((tmp_path / "sweep.json").read_text())
    assert [entry["name"] for entry in recorded] == ["batch2", "batch1"]
    assert run([*first, *second], tmp_path) == ["out_of_memory"] * 2 and len(started.names) == 2


def test_a_dry_run_lists_runs_and_starts_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    file = write(tmp_path / "grid.yaml", {"grid": {"model": ["meta-llama/Llama-3.1-8B"], "gpus": [1, 4]}})
    command = [str(file), "--gpu", "H100", "--dry_run", "--output_dir", str(tmp_path / "out")]
    assert main(command) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.search(r"Llama-3.1-8B-gpus1: skipped, needs .* as predicted; the GPU has 85 GB", first)
    assert second.endswith("Llama-3.1-8B-gpus4: skipped, needs 4 GPUs, this machine has 1")
    assert main([*command, "--gpu", "B200"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("Llama-3.1-8B-gpus1: to run")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("grid: {batch_size: [1]}\nbse: {}", "", "may only have `grid:`"),
        ("base: {}", "", "needs a `grid:`"),
        ("grid: {modle: [tiny-llama]}", "", "unknown setting 'modle'; did you mean 'model'?"),
        ("grid: {model: tiny-llama}", "", "with lists, such as precision"),
        ("grid: {precision: [fp7]}", "", "axis precision fp7: unknown variant"),
        ("grid: {gpus: [0]}", "", "--gpus 0: must be at least 1"),
        ("grid: {gpus: [3]}", "--global_batch_size 16", "gpus3: --global_batch_size 16: cannot be shared"),
        ("grid: {batch_size: [0]}", "", "batch0: --batch_size 0: must be at least 1"),
        ("grid: {model: [a/export, b/export]}", "", "have the folder name export"),
        ("grid: {batch_size: [1]}\nneeds: [dataset_name]", "", "needs --dataset_name"),
        ("grid: {batch_size: [1]}", "--batch_size 2", "--batch_size 2: is an axis of the grid"),
        (
            "grid: {batch_size: [1]}",
            "--axis gpus=2",
            "--axis gpus=2: not an axis of the grid, which has batch_size",
        ),
        ("grid: {batch_size: [1]}", "--axis batch_size=", "--axis batch_size=: needs at least one value"),
        ("grid: {batch_size: [1]}", "--use_te", "sets this for every run"),
        ("grid: {batch_size: [1]}", "--gpu H20O", "--gpu H20O: unknown GPU; did you mean 'H200'?"),
        ("grid: {batch_size: [1]", "", "not valid YAML: expected ',' or '}'"),
        ("grid: {batch_size: [1]}\nbase: {output_dir: x}", "", "unknown setting 'output_dir'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, text, flags, message):
    file = write(tmp_path / "grid.yaml", text)
    assert main([str(file), "--output_dir", str(tmp_path / "out"), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_files_of_something_else_are_kept(tmp_path, capsys):
    file = write(tmp_path / "grid.yaml", {"grid": {"model": ["tiny-llama"]}})
    (tmp_path / "report.html").write_text("mine")
    assert main([str(file), "--output_dir", str(tmp_path)]) == 2
    assert "holds report.html of something else" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", ["{", "[{}]", '{"my": "file"}', '[{"name": "a"}]'])
def test_a_damaged_record_is_named_before_anything_runs(tmp_path, capsys, started, content):
    file = write(tmp_path / "grid.yaml", {"grid": {"model": ["tiny-llama"]}})
    (tmp_path / "sweep.json").write_text(content)
    assert main([str(file), "--output_dir", str(tmp_path), "--retry"]) == 2
    assert f"error: {tmp_path / 'sweep.json'}: damaged, or not of a sweep (" in capsys.readouterr().err
    assert not started.names


def documented() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    found = re.findall(r"^python -m benchmarks\.sweep (benchmarks/sweeps/.*)$", text, re.MULTILINE)
    return [line for line in found if "$" not in line]


def test_documented_commands_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "count_gpus", lambda: 8)
    monkeypatch.chdir(ROOT)
    assert len(documented()) >= 2
    for line in documented():
        assert main([*line.split(), "--dry_run", "--output_dir", str(tmp_path)]) == 0, capsys.readouterr().err


def test_a_missing_sweep_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: No such file or directory$"):
        read_sweep(tmp_path / "none.yaml")

"""Whole runs through the command's entry point: records, exports, resumes, signals, faults."""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from fp8_suite.benchmarks.report import main as report
from fp8_suite.core.errors import (
    EXIT_BAD_SETTING,
    EXIT_FAILED,
    EXIT_IN_USE,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    UserError,
)
from fp8_suite.data.chat import Encoder
from fp8_suite.te_models import build
from fp8_suite.training import outcome, trainer
from fp8_suite.training.checkpoint.resume import count_steps
from fp8_suite.training.checkpoint.run_folder import check_space
from fp8_suite.training.config import config_from_dict, parse_config
from fp8_suite.training.optim import loss_scale
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.run import main
from fp8_suite.training.tracking.metrics import WALL_TIME_KINDS
from safetensors.torch import load_file

from tests.children import forked, preload, running
from tests.training.parallel.jobs import SMALL, curve, exported, record, rest, same_bits

preload(__name__)

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
runs = count(1)


def train(folder: Path, flags: str = "", *, code: int = 0) -> Path:
    """Run in this process and return the run folder."""
    # A run collects garbage, and would search the objects of all libraries. Every eighth one may.
    if next(runs) % 8:
        gc.freeze()
    argv = [*shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)]
    assert main(argv, description="test", start=lambda cfg: CPU) == code
    return folder


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = (folder / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


EIGHT_STEPS = "--max_steps 8 --save_interval 4"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Eight uninterrupted steps over more than one epoch, saved every four. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return train(folder, f"{EIGHT_STEPS} --eval_at_start --generate_samples 1")


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "copied")


def test_settings_of_a_moved_run_do_not_start_it_anew_in_its_old_folder(copied):
    flags = ["--config", str(copied / "settings.json")]
    with pytest.raises(UserError, match=f"add --output_dir {copied} to continue"):
        parse_config(flags, prog="p", description="d")
    assert parse_config([*flags, "--output_dir", str(copied)], prog="p", description="d").optim.max_steps == 8


# Records and exports


def test_a_run_folder_holds_settings_environment_metrics_summary_and_samples(finished):
    losses = curve(finished)
    assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1]
    config = parse_config(["--config", str(finished / "settings.json")], prog="p", description="d")
    assert config.optim.max_steps == 8
    environment = record(finished, "env.json")
    assert (environment["requested_recipe"], environment["recipe"]) == ("fp32", "fp32")
    assert environment["coverage"]["fp8_modules"] == 0
    # Phases of less than 0.1 s are omitted.
    short = environment["seconds_to_first_step"] - sum(environment["seconds_by_phase"].values())
    assert -0.2 < short < 2.5
    data = environment["data"]
    assert data["train"]["rows"] == 60 == data["train"]["used"] + data["train"]["overlong_dropped"]
    assert data["eval"]["rows"] == 6 and "system prompt" in data["train"]["columns"]
    summary = record(finished, "summary.json")
    assert summary["steps"] == 8 and summary["gpus"] == summary["gpu_hours"] == 0
    assert (
        summary["predicted_memory_gb"] is None and environment["fit"] == "fit: --batch_size 2 x 1 micro-batch"
    )
    assert summary["train_loss"] == summary["train_loss_tail_mean"] == losses[8]
    assert summary["node_hours"] == pytest.approx(summary["runtime_seconds"] / 3600)
    by_kind, seconds = summary["wall_seconds_by_kind"], summary["runtime_seconds"]
    assert sum(by_kind.values()) == pytest.approx(seconds) and by_kind["lost"] == 0
    assert all(by_kind[kind] > 0 for kind in WALL_TIME_KINDS if kind != "lost")
    assert summary["goodput"] == pytest.approx(by_kind["steps"] / seconds)
    assert summary["tokens_per_wall_second"] == pytest.approx(summary["tokens"] / seconds)
    for name in ("perf/goodput", "perf/tokens_per_wall_second"):
        assert list(curve(finished, name)) == list(losses)
    assert min(curve(finished, "eval/loss")) == 0, "--eval_at_start"
    assert record(finished, "checkpoints/index.json")["latest"] == "step_000008"
    samples = (finished / "samples.txt").read_text()
    assert all(part in samples for part in ("PROMPT", "ANSWER", "REFERENCE"))


def test_a_default_folder_is_printed_and_its_config_resumes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags in (f"{SMALL} --max_steps 1 --no_export", "--max_steps 2"):
        config = [f"--config={path}/settings.json" for path in Path("runs").glob("*")]
        assert main([*config, *flags.split()], description="test", start=lambda cfg: CPU) == 0
    (folder,) = Path("runs").iterdir()
    assert f"--output_dir {folder}" in capsys.readouterr().out and sorted(curve(folder)) == [1, 2]


def test_tokens_never_reach_output_or_run_folder(tmp_path, capsys, monkeypatch):
    secret = "hf_" + "a" * 34
    monkeypatch.setenv("HF_TOKEN", secret)
    train(tmp_path / "refused", f"--model_name /nowhere/{secret}", code=EXIT_BAD_SETTING)
    # A setting that defines the run is kept in its settings.json and checkpoints, and nowhere else.
    flags = f"--max_steps 1 --no_export --no_save_checkpoints --system_prompt {secret}"
    folder = train(tmp_path / "run", flags)
    assert report.main([str(folder)]) == 0
    printed = capsys.readouterr()
    assert secret not in printed.out + printed.err
    files = {p.name for p in folder.rglob("*") if p.is_file() and secret in p.read_text(errors="ignore")}
    assert files == {"settings.json"}


# Resumes


def test_synthetic_text_fills_one_epoch_of_full_sequences_and_resumes(small, tmp_path):
    flags = f"{small()} --dataset_name synthetic --num_of_samples 24 --gradient_accumulation_steps 2"
    flags += " --save_interval 3 --max_steps 6"
    whole = train(tmp_path / "whole", flags)
    data = record(whole, "env.json")["data"]
    assert (data["train"]["rows"], data["train"]["tokens"]) == (24, 24 * 128)
    assert data["train"]["sequences"] == 24 and data["eval"]["rows"] == 2
    assert curve(whole, "train/epoch")[6] == 1
    flags += f" --resume {whole}/checkpoints/step_000003"
    assert curve(train(tmp_path / "resumed", flags)) == rest(whole, 3)
    assert max(curve(train(tmp_path / "longer", f"{flags} --max_steps 8"))) == 8


def test_a_run_whose_batch_grows_resumes_bit_by_bit_at_any_step(small, tmp_path, monkeypatch):
    """Micro-batches per step: 1 in four steps, 2 in two, then 4; delayed scaling follows them."""
    flags = f"--batch_ramp '256:0 512:1Ki 1Ki:2Ki' --use_te --mixed_precision fp8 --no_export {small()}"
    flags += " --lr_scheduler wsd"
    whole = train(tmp_path / "whole", f"{flags} --save_interval 3")
    assert list(curve(whole, "train/tokens_per_step").values()) == [256] * 4 + [512] * 2 + [1024] * 3
    summary, last = record(whole, "summary.json"), len(curve(whole))
    assert summary["train_tokens_seen"] == 5 * 1024 and summary["steps"] == last == 9, "one epoch"
    environment, scales = record(whole, "env.json"), [key for key in saved(whole, last) if "scaling_" in key]
    assert (environment["te_backend"], environment["emulated"]) == ("emulated", True)
    assert environment["coverage"]["fp8_modules"] == 9  # qkv, proj and MLP of three layers
    assert len(scales) == 3 * 4 * 2 * 2  # layers, modules, directions, and scale and history
    monkeypatch.setattr(build, "load_te", pytest.fail)  # weights are not loaded before they are restored
    for step in (3, 6):  # before and at a change of the batch
        resumed = train(tmp_path / f"from-{step}", f"{flags} --resume {whole}/checkpoints/step_{step:06d}")
        assert curve(resumed) == rest(whole, step)
        assert same_bits(saved(resumed, last), saved(whole, last))


def test_a_run_in_fp16_follows_fp32_and_resumes_bit_by_bit_with_its_loss_scale(small, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**10)
    model = small()
    exact = curve(train(tmp_path / "fp32", f"{model} --max_steps 8 --no_export"))
    te = f"{model} --mixed_precision fp16 --use_te --no_export"
    whole = train(tmp_path / "whole", f"{te} {EIGHT_STEPS}")
    losses, scales = curve(whole), curve(whole, "train/loss_scale")
    assert losses == pytest.approx(exact, rel=2e-3) and losses != exact
    assert list(scales.values()) == [2**10] * 3 + [2**11] * 3 + [2**12] * 2
    resumed = train(tmp_path / "resumed", f"{te} {EIGHT_STEPS} --resume {whole}/checkpoints/step_000004")
    for name in ("train/loss", "train/loss_scale"):
        assert curve(resumed, name) == rest(whole, 4, name)
    assert same_bits(saved(resumed, 8), saved(whole, 8))
    states = [record(folder / "checkpoints/step_000008", "meta.json") for folder in (whole, resumed)]
    assert states[0]["progress"]["loss_scale"] == {"scale": 2**12, "good_steps": 2}
    assert states[1]["progress"]["loss_scale"] == states[0]["progress"]["loss_scale"]


@pytest.fixture
def stop_after_a_step(monkeypatch) -> None:
    """Have the next run in this process get SIGTERM when it has finished a step."""
    step, stops = trainer.Trainer._before_step, iter([signal.SIGTERM])

    def stop_or_step(self, *arguments):
        if self.progress.step and (number := next(stops, None)):
            os.kill(os.getpid(), number)
        return step(self, *arguments)

    monkeypatch.setattr(trainer.Trainer, "_before_step", stop_or_step)


@pytest.mark.usefixtures("stop_after_a_step")
def test_a_stopped_run_saves_and_the_same_command_resumes_it(finished, tmp_path, capsys):
    folder = train(tmp_path / "run", f"{EIGHT_STEPS} --learning_rate 1e-3", code=EXIT_INTERRUPTED)
    *_, goodput, advice, last = capsys.readouterr().out.strip().splitlines()
    assert last == f"run folder: {folder}" and f"--output_dir {folder}" in advice
    assert goodput.startswith("goodput ") and "start " in goodput
    assert 1 <= max(curve(folder)) < 8
    assert not (folder / "export").exists() and not (folder / "summary.json").exists()
    train(folder, f"{EIGHT_STEPS} --gradient_checkpointing")
    assert record(folder, "summary.json")["wall_seconds_by_kind"]["lost"] == 0
    assert curve(folder) == pytest.approx(curve(finished), rel=1e-6), "recomputation does not change losses"


@pytest.mark.usefixtures("stop_after_a_step")
def test_a_stopped_run_that_may_not_save_fails(tmp_path, capsys):
    train(tmp_path / "run", "--max_steps 400 --no_save_checkpoints --no_export", code=EXIT_FAILED)
    printed = capsys.readouterr().out
    assert "--no_save_checkpoints" in printed and "--output_dir" not in printed
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_longer_run_reports_its_longer_schedule_and_needs_no_intact_records(copied, capsys):
    (copied / "wall_time.json").write_text('{"wall_sec')
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "tra')
    train(copied, "--max_steps 10 --save_interval 4")
    assert "schedule now spans 10 steps (was 8)" in capsys.readouterr().out
    assert sorted(curve(copied)) == list(range(1, 11))


def test_exports_that_a_longer_run_does_not_replace_are_named(copied, capsys):
    for flags, named in (("--max_steps 9 --export_dtype fp8", True), ("--max_steps 10", False)):
        train(copied, f"{flags} --save_interval 4")
        assert (f"WARNING: {copied}/export has" in capsys.readouterr().out) == named
    train(copied, "--max_steps 11 --save_interval 4 --no_export")
    named = re.findall(rf"WARNING: {copied}/(\w+) has", capsys.readouterr().out)
    assert named == ["export", "export_fp8"]


def test_a_finished_run_is_not_changed_by_its_command(copied, capsys):
    files = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for flags in (EIGHT_STEPS, "--max_steps 5 --save_interval 4", "--max_steps 0"):
        train(copied, flags)
        printed = capsys.readouterr().out
        assert "this run is finished" in printed and "parameters" not in printed, "no model is built"
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{EIGHT_STEPS} --seed 7", ("--seed 42", "7")),
        (f"{EIGHT_STEPS} --resume none", ("--resume none",)),
        ("--max_steps 9 --batch_size 4", ("--batch_size 2", "4")),
        ("--max_steps 4 --resume {run}/checkpoints/step_000004", ("step 4", "another --output_dir")),
        ("--max_steps 0 --resume {run}/checkpoints/step_000004", ("step 4", "another --output_dir")),
    ],
)
def test_a_command_of_another_run_is_refused_and_changes_nothing(finished, capsys, flags, words):
    files = {path: path.stat().st_mtime_ns for path in finished.rglob("[!.]*") if path.is_file()}  # no .lock
    train(finished, flags.format(run=finished), code=EXIT_BAD_SETTING)
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_checkpoint_of_another_run_starts_a_new_folder_only(finished, tmp_path, capsys):
    resume = f"--resume {finished}/checkpoints/step_000004 --save_interval 1 --no_export"
    folder = train(tmp_path / "child", f"{resume} --max_steps 5 --learning_rate 1e-4")
    assert "--learning_rate 0.001 there, 0.0001 here" in capsys.readouterr().out
    train(folder, f"{resume} --max_steps 6 --learning_rate 1e-4")
    assert "child/checkpoints/step_000005" in capsys.readouterr().out and sorted(curve(folder)) == [5, 6]
    assert all(rate <= 1e-4 for rate in curve(folder, "train/learning_rate").values())
    train(folder, f"{resume} --max_steps 6 --learning_rate 1e-3", code=EXIT_BAD_SETTING)
    config = (folder / "settings.json").read_text()
    for steps in (0, 12):  # a folder has one origin
        flags = f"--learning_rate 1e-4 --resume {finished}/checkpoints/step_000008 --no_export"
        train(folder, f"{flags} --max_steps {steps}", code=EXIT_BAD_SETTING)
        assert "another --output_dir" in capsys.readouterr().err
    assert (folder / "settings.json").read_text() == config


def test_a_shorter_command_exports_nothing_and_a_later_one_what_it_asks_for(tmp_path, capsys):
    folder = train(tmp_path / "run", "--max_steps 4 --no_export")
    before = curve(folder)
    train(folder, "--max_steps 2", code=EXIT_BAD_SETTING)
    assert "--max_steps 2" in capsys.readouterr().err and not (folder / "export").exists()
    train(folder, "--max_steps 2 --no_export")
    assert record(folder, "settings.json")["max_steps"] == 4
    train(folder, "--max_steps 4 --generate_samples 1")
    weights = exported(folder)
    assert (folder / "samples.txt").exists() and curve(folder) == before
    assert list(curve(folder, "eval/loss")) == [3, 4], "logged once"
    shutil.rmtree(folder / "checkpoints")
    train(folder, "--max_steps 4", code=EXIT_BAD_SETTING)
    assert "checkpoints are gone" in capsys.readouterr().err and same_bits(exported(folder), weights)


def test_a_summary_of_another_checkpoint_is_not_the_end_of_this_run(finished, tmp_path, capsys):
    flags = f"--no_export --no_save_checkpoints --resume {finished}/checkpoints/step_"
    for step, steps, known in (("000004", 4, False), ("000004", 4, True), ("000008", 8, False)):
        folder = train(tmp_path / "run", f"{flags}{step} --max_steps {steps}")
        assert ("this run is finished" in capsys.readouterr().out) == known
        assert record(folder, "summary.json")["steps"] == steps


@pytest.mark.parametrize(("flags", "same_work"), [("", True), ("--gradient_checkpointing", False)])
def test_a_launch_that_only_ends_a_run_keeps_the_rates_of_the_same_work(finished, copied, flags, same_work):
    (copied / "summary.json").unlink()  # as if stopped in the last evaluation
    train(copied, f"{EIGHT_STEPS} {flags}")
    names = {"env.json": ("coverage", "attention_backend", "flash_attention", "seconds_to_first_step")}
    names |= {"summary.json": ("tokens_per_second", "model_tflops_per_gpu")} if same_work else {}
    for name, keys in names.items():
        before, after = (record(folder, name) for folder in (finished, copied))
        assert {key: after[key] for key in keys} == {key: before[key] for key in keys}
    assert same_work or record(copied, "summary.json").get("tokens_per_second") is None


def test_an_evaluation_that_fails_costs_no_step_and_is_repeated(tmp_path, monkeypatch):
    def evaluate(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    flags = "--max_steps 2 --save_interval 1 --eval_interval 1 --no_export"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", evaluate)
        train(tmp_path, flags, code=EXIT_OUT_OF_MEMORY)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000001"]
    train(tmp_path, flags)
    evaluations, index = curve(tmp_path, "eval/loss"), record(tmp_path, "checkpoints/index.json")
    assert list(evaluations) == [1, 2]
    assert {int(step): loss for step, loss in index["eval_losses"].items()} == evaluations
    best = record(tmp_path, "summary.json")["best_eval_loss"]
    assert best == index["best_eval_loss"] == min(evaluations.values())


@pytest.mark.parametrize("name", ["settings.json", "samples.txt"])
def test_files_of_something_else_are_not_replaced(name, tmp_path, capsys):
    (tmp_path / name).write_text('{"editor.fontSize": 3}')
    train(tmp_path, "--max_steps 1 --generate_samples 1", code=EXIT_BAD_SETTING)
    assert f"its {name} is not a run's" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == '{"editor.fontSize": 3}'


@pytest.mark.parametrize(
    ("free", "code", "message"),
    [(1e5, EXIT_BAD_SETTING, "the disk has 0.0 GB free"), (4e7, 0, "2 checkpoints of 0.0 GB do not fit")],
)
def test_a_small_disk_is_noted_before_the_first_step(tmp_path, capfd, monkeypatch, free, code, message):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    train(tmp_path / "run", "--max_steps 2 --save_interval 1 --no_export", code=code)
    printed = "".join(capfd.readouterr())
    assert message in printed and ("step 1/2" in printed.partition(message)[2]) == (code == 0)
    assert (tmp_path / "run").exists() == (code == 0)


@pytest.mark.parametrize(
    ("flags", "number"),
    [("", 6), ("--save_interval 10m --max_steps 4", 6), ("--save_interval 3 --max_steps 7", 3)],
)
def test_the_room_is_that_of_the_saves_of_the_run(flags, number, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=25e9))
    cfg = parse_config(shlex.split(flags), prog="test", description="test")
    check_space(tmp_path, 25e9 / (number - 0.5), cfg)
    assert f"{number} checkpoints of" in capsys.readouterr().out
    check_space(tmp_path, 25e9 / (number + 0.5), cfg)
    check_space(tmp_path, 20e9, replace(cfg, checkpoint=replace(cfg.checkpoint, save_interval="0")))
    assert not capsys.readouterr().out


def test_the_room_of_a_killed_first_save_counts_as_free(tmp_path, monkeypatch):
    flags, folder = "--max_steps 1 --no_export", tmp_path / "run"
    train(folder, f"{flags} --no_save_checkpoints")
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).unlink()
    leftover = folder / "checkpoints" / ".step_000001.partial"
    leftover.mkdir(parents=True)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=10 if leftover.exists() else 1e9)
    )
    train(folder, flags)
    assert [path.name for path in leftover.parent.glob("*step*")] == ["step_000001"]


def test_a_checkpoint_or_model_that_is_refused_leaves_no_folder(copied, tmp_path, capsys):
    folder = tmp_path / "new"
    train(folder, f"--max_steps 1 --resume {copied}", code=EXIT_BAD_SETTING)
    assert not folder.exists() and "--max_steps 0" in capsys.readouterr().err
    for path in copied.glob("checkpoints/*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    train(folder, f"--max_steps 9 --resume {copied}", code=EXIT_BAD_SETTING)
    assert not folder.exists()
    export = copied / "export"
    (export / "config.json").write_text(
        (export / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    )
    train(folder, f"--max_steps 1 --model_name {export}", code=EXIT_BAD_SETTING)
    assert not folder.exists() and "the weights lack" in capsys.readouterr().err


def test_an_output_folder_may_hold_a_launcher_s_log_and_survives_a_refusal(tmp_path):
    (tmp_path / "slurm-17.out").touch()
    train(tmp_path, "--split_name validation", code=EXIT_BAD_SETTING)
    assert (tmp_path / "slurm-17.out").exists()
    train(tmp_path, "--max_steps 1 --no_export --no_save_checkpoints")
    assert (tmp_path / "settings.json").exists()


def test_a_run_without_readable_settings_resumes_from_its_checkpoints(copied):
    (copied / "settings.json").write_text("[]")
    train(copied, "--max_steps 9 --no_export")
    assert max(curve(copied)) == 9 and record(copied, "settings.json")["max_steps"] == 9


# Signals and processes


@contextmanager
def started(folder: Path, flags: str) -> Iterator[subprocess.Popen]:
    """Start a run as a process of its own; it is killed at exit."""
    command = [sys.executable, "train_fp8.py", *shlex.split(SMALL), "--output_dir", str(folder)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "latin-1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "latin-1"}
    with running([*command, *shlex.split(flags)], cwd=ROOT, env=environment, **pipes) as process:
        yield process


def wait_for_a_step(process: subprocess.Popen, folder: Path) -> None:
    while process.poll() is None and not ((folder / "metrics.jsonl").exists() and curve(folder)):
        time.sleep(0.02)


def test_a_signal_to_all_processes_stops_a_run_whose_output_nobody_reads(tmp_path):
    """As schedulers and closed terminals do: the loader's workers get the signal too, even twice."""
    folder = tmp_path / "\u017c\u00f3\u0142w"  # in letters that stdout lacks
    with started(folder, "--max_steps 4000 --num_workers 2 --no_export") as process:
        wait_for_a_step(process, folder)
        train(folder, "--max_steps 4000 --no_export", code=EXIT_IN_USE)
        process.stdout.close()
        for _ in range(2):
            os.killpg(process.pid, signal.SIGHUP)
        assert process.wait() == EXIT_INTERRUPTED
    assert (folder / "checkpoints" / f"step_{max(curve(folder)):06d}").is_dir()


@pytest.mark.parametrize("state", ["closed", "broken pipe"])
def test_a_run_needs_no_stdout(tmp_path, monkeypatch, state):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w") if state == "broken pipe" else None)
    train(tmp_path / "run", "--max_steps 1 --no_export --no_save_checkpoints")
    assert (tmp_path / "run" / "summary.json").exists()


def tokenize_without_end(argv: list[str], output: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = output.parent / "cache"

    def encode(*_):
        print("tokenizing", flush=True)
        time.sleep(6000)

    Encoder.encode = encode
    sys.stdout = sys.stderr = output.open("w")
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    outcome.exit_process(main(argv, description="test", start=lambda cfg: CPU))


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, True, 130),  # Ctrl-C
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_tokenization_processes_end_with_the_run(tmp_path, number, to_all, code):
    os.mkfifo(tmp_path / "output")
    argv = f"{SMALL} --output_dir {tmp_path}/run --num_proc 2".split()
    with (
        forked(tokenize_without_end, argv, tmp_path / "output") as process,
        (tmp_path / "output").open() as printed,
    ):
        begun = 0
        while begun < 2:  # processes; a signal during their fork would be reported by torch
            line = printed.readline()
            assert line, "it has ended"
            begun += line.count("tokenizing")
        (os.killpg if to_all else os.kill)(process.pid, number)
        output = printed.read()  # ends once no process holds the other end
        process.join()
    assert process.exitcode == code, output
    if number == signal.SIGINT:
        assert "Traceback" not in output and output.splitlines()[-1] == f"error: {outcome.INTERRUPTED}"
        assert not list((tmp_path / "cache").rglob("tmp*"))


# Errors


def two_rows(folder: Path) -> Path:
    row = json.dumps({"problem": "What is 1 + 1?", "generated_solution": "2"})
    (folder / "two.jsonl").write_text(f"{row}\n{row}\n")
    return folder / "two.jsonl"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--use_te --te_backend native --mixed_precision bf16", EXIT_FAILED, "--te_backend native"),
        ("--split_name validation", EXIT_BAD_SETTING, "--split_name validation"),
        ("--dataset_text_field nope", EXIT_BAD_SETTING, "--dataset_text_field nope"),
        ("--dataset_text_field problem --generate_samples 1", EXIT_BAD_SETTING, "--generate_samples 1"),
        ("--resume /nowhere", EXIT_BAD_SETTING, "--resume /nowhere"),
        ("--recompute layer:9", EXIT_BAD_SETTING, "--recompute layer:9: for 9 layers, but the model has 3"),
        ("--output_dir /proc/run", EXIT_BAD_SETTING, "--output_dir /proc/run"),
        ("--dataset_name {two} --max_steps 1 --generate_samples 1", EXIT_BAD_SETTING, "--generate_samples 1"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(tmp_path, capsys, monkeypatch, flags, code, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(tmp_path / "run", flags.format(two=two_rows(tmp_path)), code=code)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "run").exists()


def test_steps_follow_from_epochs_unless_they_are_given():
    settings = {"num_epochs": 3, "gradient_accumulation_steps": 4}
    for changes, total in (({}, 3 * 3), ({"max_steps": 0}, 0)):
        cfg = config_from_dict(settings | changes)
        assert count_steps(cfg.optim, BatchSchedule.of(cfg, 1), 10) == total

"""Launches in a folder that holds a run: which checkpoint they resume, and what may change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, EXIT_OUT_OF_MEMORY, UserError
from fp8_suite.data import loader
from fp8_suite.data.build import Loaders
from fp8_suite.training import finish
from fp8_suite.training import trainer as trainer_module
from fp8_suite.training.checkpoint.progress import Progress
from fp8_suite.training.checkpoint.resume import ResumePoint, check_folder, check_resume, gradient_ratio
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.optim import optimizer
from fp8_suite.training.outcome import report_failure

from tests.training.test_run import record, saved, train


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run", "--max_steps 4 --save_interval 2 --eval_interval 2")


@pytest.fixture
def folder(four_steps, tmp_path) -> Path:
    shutil.copytree(four_steps, tmp_path / "run")
    return tmp_path / "run"


def test_evaluating_an_earlier_step_neither_rolls_back_nor_loads_moments(folder, monkeypatch):
    allocated = []
    monkeypatch.setattr(optimizer, "state_of", lambda *arguments: allocated.append(arguments))
    (folder / "summary.json").unlink()
    train(folder, f"--max_steps 0 --resume {folder}/checkpoints/step_000002")
    assert record(folder, "checkpoints/index.json")["latest"] == "step_000004" and not allocated


def test_a_resume_in_another_effective_recipe_is_refused():
    cfg, named = config_from_dict({}), config_from_dict({"fp8_scenario": "tensorwise"})
    assert "--fp8_scenario default there, tensorwise here" in resumed(cfg, 1, named, 1)
    with pytest.raises(UserError, match="fp32 there, bf16 here"):  # by --fp8_fallback on another GPU
        resumed(cfg, 1, cfg, 1, recipe="bf16")


def test_another_learning_rate_is_refused_and_the_error_names_the_way():
    saved, now = config_from_dict({}), config_from_dict({"learning_rate": 5e-5})
    with pytest.raises(UserError, match=r"1e-05 there, 5e-05 here.*or add --resume run --output_dir NEW$"):
        resumed(saved, 1, now, 1)
    meta = {"config": saved.to_dict(), "world_size": 1, "recipe": "fp32"}
    other_run = ResumePoint(Path("run"), meta, same_run=False, rollback=False)
    assert "settings changed: --learning_rate 1e-05 there" in check_resume(other_run, now, "fp32", 1)


def resumed(saved: Config, saved_ranks: int, now: Config, ranks: int, *, recipe: str = "fp32") -> str:
    """Return the notice about a resume with other settings, or on other ranks."""
    meta = {"config": saved.to_dict(), "world_size": saved_ranks, "recipe": "fp32", "progress": {"step": 1}}
    return check_resume(ResumePoint(Path("run"), meta, same_run=True, rollback=False), now, recipe, ranks)


def test_a_batch_may_be_split_differently_and_grow_with_the_ranks(tmp_path):
    """--batch_size auto may choose another micro-batch, on as many ranks or on others."""

    def settings(batch: int, accumulation: int) -> Config:
        return config_from_dict({"batch_size": batch, "gradient_accumulation_steps": accumulation})

    def resume(ranks: int, batch: int, accumulation: int) -> str:
        return resumed(settings(4, 2), 4, settings(batch, accumulation), ranks)

    assert "--batch_size 4 there, 8 here" in resume(4, 8, 1)
    grown = resume(8, 8, 1)
    assert "--batch_size 4 there, 8 here" in grown and "global batch of 32 sequences; it is 64 on 8" in grown
    with pytest.raises(UserError, match="--global_batch_size 32"):
        resume(4, 4, 1)
    with pytest.raises(UserError, match=r"\(--batch_size 4 there, 8 here\); use the same settings"):
        resume(8, 8, 2)  # a micro-batch of every rank is more than a step had

    (tmp_path / "settings.json").write_text(json.dumps(settings(4, 2).to_dict()))
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # logged before its first checkpoint
    check_folder(settings(8, 1), tmp_path, 4)
    with pytest.raises(UserError, match="holds another run"):
        check_folder(settings(8, 2), tmp_path, 4)
    of_64 = {"global_batch_size": 64, "batch_size": 8, "gradient_accumulation_steps": 2}
    (tmp_path / "settings.json").write_text(json.dumps(config_from_dict(of_64).to_dict()))
    (tmp_path / "env.json").write_text('{"world_size": 4}')
    check_folder(config_from_dict(of_64 | {"batch_size": 4}), tmp_path, 8)


def test_gradients_within_a_rank_grow_with_the_ranks_that_share_a_batch():
    whole = {"batch_size": 8, "gradient_accumulation_steps": 1}
    split = {"batch_size": 4, "gradient_accumulation_steps": 2}
    assert gradient_ratio(whole, split) == 1
    assert gradient_ratio(whole, whole | {"batch_size": 1}) == 8
    assert gradient_ratio(split | {"context_parallel_size": 2}, whole) == 0.5


def test_moments_are_converted_to_another_format_with_a_notice():
    old, new = (config_from_dict({"moment_dtype": name}) for name in ("fp8,fp16", "fp32,fp16"))
    assert "Adam's moments are converted to fp32,fp16" in resumed(old, 1, new, 1)


def test_on_one_rank_an_exchange_in_fp8_resumes_as_bf16():
    def resume(saved: str, saved_ranks: int, now: str, ranks: int) -> str:
        settings = {name: config_from_dict({"grad_reduce_dtype": name}) for name in (saved, now)}
        return resumed(settings[saved], saved_ranks, settings[now], ranks)

    assert "--grad_reduce_dtype fp8 there, bf16 here" in resume("fp8", 2, "bf16", 1)
    assert "--grad_reduce_dtype bf16 there, fp8 here" in resume("bf16", 1, "fp8", 2)
    for refused in (("fp8", 2, "bf16", 2), ("fp8", 2, "fp32", 1), ("fp32", 1, "bf16", 1)):
        with pytest.raises(UserError, match="saved with other settings"):
            resume(*refused)


@pytest.mark.parametrize("lora", ["", "--lora_rank 2"])
def test_folders_of_model_and_data_may_move_but_not_change(lora, tmp_path, capsys):
    rows = [{"text": f"{i} and {i} is {2 * i}. " * 4} for i in range(40)]
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(old, "--max_steps 1 --no_save_checkpoints")  # makes the model
    flags = f"--split_name train --save_interval 2 --no_export {lora}"

    def run(parent: Path, folder: str, steps: int, *, code: int = 0) -> Path:
        files = f"--model_name {parent}/export --dataset_name {parent}/data.jsonl"
        return train(tmp_path / folder, f"{files} {flags} --max_steps {steps}", code=code)

    uninterrupted = run(old, "uninterrupted", 4)
    run(old, "run", 2)
    old.rename(new)
    run(new, "run", 4)
    assert f"--model_name {old}/export there, {new}/export here" in capsys.readouterr().out
    for name, tensor in saved(uninterrupted, 4).items():
        assert torch.equal(saved(tmp_path / "run", 4)[name], tensor), name
    config = new / "export" / "config.json"
    right = config.read_text()
    config.write_text(json.dumps(json.loads(right) | {"rms_norm_eps": 0.01}))
    other = new.rename(tmp_path / "other_config")
    run(other, "run", 6, code=EXIT_BAD_SETTING)
    other.rename(new)
    config.write_text(right)
    files = f"--model_name {new}/export --dataset_name {new / 'export'} {flags} --max_steps 0"
    train(tmp_path / "run", files, code=EXIT_BAD_SETTING)
    assert "--dataset_name" in capsys.readouterr().err
    other = train(tmp_path / "other", "--max_steps 1 --no_save_checkpoints --seed 1")
    shutil.copy(new / "data.jsonl", other)
    run(other, "run", 6, code=EXIT_BAD_SETTING)
    assert f"--model_name {new}/export there, {other}/export here" in capsys.readouterr().err
    (new / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    run(new, "run", 6, code=EXIT_BAD_SETTING)
    assert "the checkpoint's data position is not valid for this run" in capsys.readouterr().err


def test_changed_evaluation_data_discards_earlier_losses_with_a_warning(folder, capsys):
    meta_path = folder / "checkpoints" / "step_000004" / "meta.json"
    assert json.loads(meta_path.read_text())["evaluation"]
    best = record(folder, "checkpoints/index.json")["best_eval_loss"]
    train(folder, "--max_steps 6 --eval_samples 5 --save_interval 2", code=EXIT_BAD_SETTING)  # a setting
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loaders, "eval_fingerprint", "others")
        train(folder, "--max_steps 6 --save_interval 2 --eval_interval 2")
    assert "WARNING: the evaluation data has changed" in capsys.readouterr().out
    assert record(folder, "checkpoints/index.json")["eval_losses"].keys() == {"4", "6"} and best is not None


def test_a_run_that_logged_nothing_may_restart_with_other_settings(tmp_path, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "train_step", out_of_memory)
        train(tmp_path / "run", "--max_steps 2 --batch_size 4", code=EXIT_OUT_OF_MEMORY)
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    train(tmp_path / "run", "--max_steps 2 --batch_size 2")


def test_settings_of_a_newer_version_are_refused_and_its_counters_dropped():
    cfg = config_from_dict({})
    meta = {"config": cfg.to_dict() | {"label_smoothing": 0.1}, "total_steps": 9}
    with pytest.raises(UserError, match="label_smoothing"):
        check_resume(ResumePoint(Path("run"), meta, same_run=True, rollback=False), cfg, "fp32", 1)
    assert Progress.from_meta({"progress": {"step": 3, "spikes": 1}}) == Progress(step=3)


def test_failing_sample_answers_do_not_fail_a_finished_run(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(finish, "generate_answers", fail)
    folder = train(tmp_path / "run", "--max_steps 1 --generate_samples 1")
    assert "WARNING: --generate_samples: no answers (RuntimeError: CUDA error" in capsys.readouterr().out
    assert (folder / "summary.json").exists() and not (folder / "samples.txt").exists()


def test_a_killed_loader_worker_is_reported_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(loader, "WORKERS", [SimpleNamespace(exitcode=code) for code in (None, -9)])
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert report_failure(error, watchdog=None) == EXIT_FAILED
    shown = capsys.readouterr().err
    assert shown.startswith("error: DataLoader worker (pid 7) is killed") and "--num_workers" in shown

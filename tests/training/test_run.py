"""Whole runs through the command line's own entry point: resume, export, faults, folders."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.report import main as report
from core.errors import (
    EXIT_BAD_SETTING,
    EXIT_FAILED,
    EXIT_IN_USE,
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    UserError,
)
from te_models.build import plan_model
from training import outcome
from training import trainer as trainer_module
from training.checkpoint import run_folder
from training.checkpoint.resume import ResumePoint, check_resume, count_steps
from training.checkpoint.run_folder import train_losses
from training.config import config_from_dict, parse_config
from training.optim.optimizer import plan_optimizer
from training.parallel.choose import check_memory
from training.parallel.strategies import Strategy
from training.run import main
from training.trainer import Trainer

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num_of_samples 60 --max_seq_length 128 --batch_size 2 --eval_samples 6 --num_workers 0 --num_proc 1 "
    "--learning_rate 1e-3 --log_interval 1 --eval_interval 3 --deterministic --mixed_precision fp32"
)


def train(folder: Path, flags: str = "", *, code: int = 0) -> Path:
    """Run in this process; returns the run folder."""
    argv = [*shlex.split(SMALL), "--output_dir", str(folder), *shlex.split(flags)]
    assert main(argv, description="test", start=lambda cfg: torch.device("cpu")) == code
    return folder


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Eight uninterrupted steps over more than one epoch, saved every four."""
    return train(tmp_path_factory.mktemp("runs") / "whole", "--max_steps 8 --save_interval 4")


def test_the_run_folder_holds_what_it_promises(finished, capsys):
    assert (
        parse_config(["--config", str(finished / "config.json")], prog="p", description="d").optim.max_steps
        == 8
    )
    environment = json.loads((finished / "env.json").read_text())
    assert (environment["requested_recipe"], environment["recipe"]) == ("fp32", "fp32")
    assert environment["coverage"]["fp8_modules"] == 0 and environment["seconds_to_first_step"] > 0
    data = environment["data"]
    assert data["train"]["rows"] == 60 == data["train"]["used"] + data["train"]["overlong_dropped"]
    assert data["eval"]["rows"] == 6
    assert data["train"]["columns"].startswith("problem -> generated_solution, system prompt")
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 8 and summary["gpus"] == 0 and summary["gpu_hours"] == 0
    assert summary["train_loss"] == summary["train_loss_tail_mean"] == losses(finished)[8]
    assert summary["node_hours"] == pytest.approx(summary["runtime_seconds"] / 3600)
    assert sorted(losses(finished)) == list(range(1, 9))
    index = json.loads((finished / "checkpoints" / "index.json").read_text())
    assert index["latest"] == "step_000008"
    assert losses(finished)[8] < losses(finished)[1]


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(finished, tmp_path):
    again = train(
        tmp_path / "again", f"--max_steps 8 --save_interval 4 --resume {finished}/checkpoints/step_000004"
    )
    whole = losses(finished)
    assert losses(again) == {step: whole[step] for step in range(5, 9)}
    expected = exported(finished)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported(again).items())
    states = [f / "checkpoints" / "step_000008" for f in (finished, again)]
    meta, remeta = (json.loads((s / "meta.json").read_text()) for s in states)
    for name in ("loader", "optimizer_steps"):
        assert meta[name] == remeta[name]
    tensors = [
        {k: t for f in sorted(s.glob("*.safetensors")) for k, t in load_file(f).items()} for s in states
    ]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(t, tensors[1][k]) for k, t in tensors[0].items())


def start(folder: Path, flags: str, *, program: tuple[str, ...] = ("train_fp8.py",)) -> subprocess.Popen:
    """Run as a process of its own, in a process group of its own."""
    command = [sys.executable, *program, *shlex.split(SMALL), "--output_dir", str(folder)]
    return subprocess.Popen(
        [*command, *shlex.split(flags)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Tests under nohup would hand on that SIGHUP is ignored, which a run respects.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def wait_for_a_step(process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and losses(folder):
            return
        time.sleep(0.02)


def test_sigterm_saves_and_the_same_command_goes_on(finished, tmp_path):
    folder = tmp_path / "stopped"
    process = start(folder, "--max_steps 8 --save_interval 4")
    wait_for_a_step(process, folder)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED == 75, output
    *_, way_on, last = output.strip().splitlines()
    assert last == f"run folder: {folder}" and f"--output_dir {folder}" in way_on
    stopped_at = max(losses(folder))
    assert 1 <= stopped_at < 8
    assert not (folder / "export").exists() and not (folder / "summary.json").exists()
    train(folder, "--max_steps 8 --save_interval 4")
    assert losses(folder) == losses(finished)
    assert all(torch.equal(t, exported(finished)[n]) for n, t in exported(folder).items())


SLOW_TOKENISING = """
import sys, time, torch
from data.chat import Encoder
from training.run import main

def encode(*_):
    print("tokenising", flush=True)
    time.sleep(600)

Encoder.encode = encode
sys.exit(main(sys.argv[1:], description="test", start=lambda cfg: torch.device("cpu")))
"""


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, True, 130),  # Ctrl-C
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["Ctrl-C", "SIGINT", "SIGTERM", "SIGKILL"],
)
def test_tokenising_processes_end_with_the_run(tmp_path, number, to_all, code):
    flags = f"--data_cache_dir {tmp_path}/cache --num_proc 2"
    process = start(tmp_path / "run", flags, program=("-c", SLOW_TOKENISING))
    try:
        while "tokenising" not in process.stdout.readline():
            assert process.poll() is None
        (os.killpg if to_all else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=120)  # until nobody holds the other end
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, output
    if number == signal.SIGINT:
        assert "Traceback" not in output
        assert output.endswith(
            "error: interrupted outside the training loop; what was saved before is intact\n"
        )
        assert not list((tmp_path / "cache").rglob("tmp*"))


def test_a_longer_run_reports_that_its_schedule_changes(finished, tmp_path, capsys):
    folder = tmp_path / "longer"
    shutil.copytree(finished, folder)
    train(folder, "--max_steps 10 --save_interval 4")
    assert "the learning rate schedule now spans 10 steps (was 8)" in capsys.readouterr().out
    assert max(losses(folder)) == 10


def test_a_stopped_run_that_may_not_save_does_not_promise_to_go_on(tmp_path):
    process = start(tmp_path / "run", "--max_steps 400 --no_save_checkpoints --no_export")
    wait_for_a_step(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_FAILED and "nothing was saved (--no_save_checkpoints)" in output
    assert "to go on" not in output


def test_sigterm_to_the_whole_process_group_saves_too(tmp_path):
    """As schedulers and `timeout` send it: the loader's worker processes get it as well, even twice."""
    folder = tmp_path / "stopped"
    process = start(folder, "--max_steps 400 --num_workers 2 --no_deterministic --no_export")
    wait_for_a_step(process, folder)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, output
    assert (folder / "checkpoints" / "index.json").exists()


def test_two_runs_do_not_share_a_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    process = start(folder, "--max_steps 4000 --no_export")
    wait_for_a_step(process, folder)
    train(folder, "--max_steps 4000 --no_export", code=EXIT_IN_USE)
    process.kill()
    process.communicate(timeout=60)
    assert "another run is writing to it" in capsys.readouterr().err


def test_a_folder_that_only_saw_a_refused_command_is_free(tmp_path):
    train(tmp_path / "run", "--dataset_name nowhere.jsonl", code=EXIT_BAD_SETTING)
    train(tmp_path / "run", "--max_steps 1 --no_export")


def test_an_evaluation_that_fails_costs_no_step_and_is_made_up_for(tmp_path, monkeypatch):
    def evaluate(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    flags = "--max_steps 4 --save_interval 2 --eval_interval 2 --no_eval_at_start"
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "evaluate", evaluate)
        train(tmp_path, flags, code=EXIT_OUT_OF_MEMORY)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000002"]
    train(tmp_path, flags)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert list(evaluations) == [2, 4]
    index = json.loads((tmp_path / "checkpoints" / "index.json").read_text())
    assert {int(step): loss for step, loss in index["eval_losses"].items()} == evaluations
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best_eval_loss"] == index["best_eval_loss"] == min(evaluations.values())


def test_another_runs_checkpoint_is_a_start_only(finished, tmp_path, capsys):
    flags = f"--resume {finished}/checkpoints/step_000004 --save_interval 1 --no_export"
    folder = train(tmp_path / "child", f"{flags} --max_steps 5")
    train(folder, f"{flags} --max_steps 6")
    assert "child/checkpoints/step_000005 at step 5" in capsys.readouterr().out
    assert sorted(losses(folder)) == [5, 6]


def test_the_time_of_a_start_that_was_killed_counts_once(tmp_path, monkeypatch):
    folder, flags = tmp_path / "run", "--max_steps 4 --save_interval 2 --no_export"
    take_step = Trainer._step

    def fails_at_the_last(trainer, *rest):
        if trainer.progress.step == 3:
            raise KeyError("no such column")
        return take_step(trainer, *rest)

    def runtime() -> float:
        return json.loads((folder / "summary.json").read_text())["runtime_seconds"]

    monkeypatch.setattr(run_folder, "WALL_TIME_SECONDS", 0.0)
    monkeypatch.setattr(Trainer, "_step", fails_at_the_last)
    with pytest.raises(KeyError):
        train(folder, flags)
    monkeypatch.undo()
    kept = json.loads((folder / "wall_time.json").read_text())
    saved = json.loads((folder / "checkpoints" / "step_000002" / "meta.json").read_text())["progress"]
    assert kept["wall_seconds"] == kept["node_seconds"] > saved["wall_seconds"]  # step 3 is in it
    (folder / "wall_time.json").write_text(json.dumps(kept | {"wall_seconds": 1000.0}))
    began = time.perf_counter()
    train(folder, flags)
    assert 1000 < runtime() < 1000 + time.perf_counter() - began
    (folder / "wall_time.json").unlink()  # as in folders of older versions
    train(folder, f"{flags} --max_steps 5")
    assert runtime() > 1000
    shutil.rmtree(folder / "checkpoints")
    train(folder, flags)  # another run in the place of a finished one
    assert runtime() < 1000


def test_the_time_of_a_start_that_was_killed_in_its_first_step_counts(tmp_path, monkeypatch):
    def fails(trainer, *rest):
        raise KeyError("no such column")

    monkeypatch.setattr(Trainer, "_step", fails)
    with pytest.raises(KeyError):
        train(tmp_path / "run", "--max_steps 1")
    assert json.loads((tmp_path / "run" / "wall_time.json").read_text())["wall_seconds"] > 0


def test_a_broken_config_is_one_line(tmp_path, capsys):
    folder = train(tmp_path / "run", "--max_steps 1 --no_export")
    for broken in ("", "[]"):
        (folder / "config.json").write_text(broken)
        train(folder, "--max_steps 2 --no_export", code=EXIT_BAD_SETTING)
        assert "its config.json is broken" in capsys.readouterr().err
    (folder / "config.json").unlink()
    train(folder, "--max_steps 2 --no_export", code=EXIT_BAD_SETTING)
    assert "its config.json is missing; choose another folder" in capsys.readouterr().err


def test_a_finished_run_started_again_changes_no_weight(finished, capsys):
    before, summary = exported(finished), (finished / "summary.json").read_text()
    train(finished, "--max_steps 8 --save_interval 4")
    said = capsys.readouterr().out
    assert "this run is finished" in said and "parameters" not in said, "nothing is built to say so"
    assert (finished / "summary.json").read_text() == summary
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(finished).items())
    assert sorted(losses(finished)) == list(range(1, 9))
    config = (finished / "config.json").read_text()
    train(finished, "--max_steps 5 --save_interval 4")
    assert (finished / "config.json").read_text() == config, "it is still the run of 8 steps"
    capsys.readouterr()
    train(finished, "--max_steps 0")
    way = f"to evaluate it: --resume {finished} --max_steps 0 and another --output_dir"
    assert way in capsys.readouterr().out


def test_a_finished_run_exports_what_was_asked_for_later(tmp_path):
    folder = train(tmp_path / "run", "--max_steps 2 --no_export")
    before = losses(folder)
    train(folder, "--max_steps 2 --generate_samples 1")
    assert exported(folder) and (folder / "samples.txt").exists() and losses(folder) == before
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/loss" in line] == [2], "logged once"


def test_another_checkpoint_than_the_folder_started_from_is_refused(finished, tmp_path, capsys):
    other = f"--resume {finished}/checkpoints/step_000008 --no_export"
    for name, start in (("fresh", ""), ("child", f"--resume {finished}/checkpoints/step_000004")):
        folder = train(tmp_path / name, f"{start} --max_steps 6 --no_export")
        config = (folder / "config.json").read_text()
        for steps in (0, 12):
            train(folder, f"{other} --max_steps {steps}", code=EXIT_BAD_SETTING)
            error = capsys.readouterr().err
            assert "holds a run of another start, with step_000006; choose another --output_dir" in error
        assert (folder / "config.json").read_text() == config


def test_an_earlier_step_of_a_finished_run_is_not_its_end(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    earlier = f"--resume {folder}/checkpoints/step_000004 --save_interval 4"
    for steps in (0, 4):
        train(folder, f"{earlier} --max_steps {steps}", code=EXIT_BAD_SETTING)
        way = "with 8 steps; to export or evaluate its step 4, use another --output_dir"
        assert way in capsys.readouterr().err
    train(tmp_path / "other", f"{earlier} --max_steps 4")
    assert exported(tmp_path / "other") and json.loads((folder / "summary.json").read_text())["steps"] == 8


def test_a_summary_of_another_checkpoint_is_not_this_ones_end(finished, tmp_path, capsys):
    folder, step = tmp_path / "run", f"--resume {finished}/checkpoints/step_"
    flags = "--no_export --no_save_checkpoints"

    def summed_up() -> int:
        return json.loads((folder / "summary.json").read_text())["steps"]

    train(folder, f"{step}000004 --max_steps 4 {flags}")
    train(folder, f"{step}000004 --max_steps 4 {flags}")
    assert "this run is finished" in capsys.readouterr().out and summed_up() == 4
    train(folder, f"{step}000008 --max_steps 8 {flags}")
    assert "this run is finished" not in capsys.readouterr().out and summed_up() == 8
    train(folder, f"{step}000004 --max_steps 0")
    assert "this run is finished" not in capsys.readouterr().out and summed_up() == 4


def test_a_shorter_command_exports_nothing_of_a_longer_run(tmp_path, capsys):
    folder = train(tmp_path / "run", "--max_steps 4 --no_export")
    train(folder, "--max_steps 2", code=EXIT_BAD_SETTING)
    assert "has 4 steps already" in capsys.readouterr().err and not (folder / "export").exists()
    train(folder, "--max_steps 2 --no_export")
    assert json.loads((folder / "config.json").read_text())["max_steps"] == 4


def test_a_finished_run_without_its_checkpoints_is_not_trained_over(tmp_path, capsys):
    folder = train(tmp_path / "run", "--max_steps 2")
    before = exported(folder)
    shutil.rmtree(folder / "checkpoints")
    train(folder, "--max_steps 2", code=EXIT_BAD_SETTING)
    assert "its checkpoints are gone" in capsys.readouterr().err
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(folder).items())
    (folder / "export").rename(folder / "kept")
    train(folder, "--max_steps 2")
    assert exported(folder)


def test_a_newer_checkpoint_of_another_run_is_evaluated_in_the_same_folder(tmp_path):
    trained, evaluated = tmp_path / "run", tmp_path / "evaluation"
    found = []
    for steps in (2, 6):
        train(trained, f"--max_steps {steps} --no_export --lr_scheduler constant")
        train(evaluated, f"--resume {trained} --max_steps 0 --lr_scheduler constant")
        found.append(json.loads((evaluated / "summary.json").read_text())["eval_loss"])
    assert found[0] > found[1] == json.loads((trained / "summary.json").read_text())["eval_loss"]


def test_a_default_folder_is_told_and_its_settings_go_on_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = [*shlex.split(SMALL), "--max_steps", "2", "--no_export"]
    assert main(argv, description="test", start=lambda cfg: CPU) == 0
    (folder,) = Path("runs").iterdir()
    assert f"to resume, repeat the command with --output_dir {folder}" in capsys.readouterr().out
    argv = ["--config", str(folder / "config.json"), "--max_steps", "3"]
    assert main(argv, description="test", start=lambda cfg: CPU) == 0
    assert list(Path("runs").iterdir()) == [folder] and sorted(losses(folder)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content"), [("wall_time.json", '{"wall_seconds": null}'), ("metrics.jsonl", "12\n")]
)
def test_a_record_that_can_be_done_without_stops_no_resume(tmp_path, name, content):
    folder = train(tmp_path / "run", "--max_steps 1 --no_export")
    with (folder / name).open("a" if name == "metrics.jsonl" else "w") as file:
        file.write(content)
    train(folder, "--max_steps 2 --no_export")
    assert sorted(losses(folder)) == [1, 2]


@pytest.mark.parametrize("way", ["hangup", "pipe"])
def test_a_run_outlives_its_terminal(tmp_path, way):
    """SIGHUP stops it as SIGTERM does; output that nobody reads any more is no reason to end."""
    folder = tmp_path / "run"
    process = start(folder, "--max_steps 40 --no_export")
    wait_for_a_step(process, folder)
    if way == "hangup":
        process.send_signal(signal.SIGHUP)
    process.stdout.close()
    assert process.wait(timeout=120) == (EXIT_INTERRUPTED if way == "hangup" else 0)
    assert (folder / "checkpoints" / f"step_{max(losses(folder)):06d}").is_dir()
    assert (max(losses(folder)) < 40) == (way == "hangup")


@pytest.mark.parametrize("stdout", ["closed", "latin-1"])
def test_a_run_needs_no_stdout_and_no_letters_that_it_lacks(tmp_path, stdout):
    folder = tmp_path / "\u017c\u00f3\u0142w"
    flags = f"{SMALL} --max_steps 1 --no_export --no_save_checkpoints --output_dir {folder}"
    command = f"{sys.executable} train_fp8.py {flags}" + (" >&-" if stdout == "closed" else "")
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert (folder / "summary.json").exists()
    assert stdout == "closed" or ran.stdout.splitlines()[-1].endswith(b"\\u017c\xf3\\u0142w")


def test_a_run_goes_on_with_recomputation_where_memory_was_short(tmp_path):
    folder = train(tmp_path / "run", "--max_steps 1 --no_export")
    train(folder, "--max_steps 2 --no_export --gradient_checkpointing")
    assert sorted(losses(folder)) == [1, 2]


def test_an_interrupt_while_libraries_load_has_its_exit_code():
    process = subprocess.Popen([sys.executable, "train_fp8.py"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "error: interrupted before the start\n")


def test_the_export_loads_and_scores_as_the_run_did(finished, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(finished / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 + 4?"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]
    scored = train(tmp_path / "scored", f"--model_name {finished}/export --max_steps 0")
    ran, again = (json.loads((f / "summary.json").read_text()) for f in (finished, scored))
    assert again["eval_loss"] == pytest.approx(ran["eval_loss"], rel=2e-3)
    assert again["eval_label_tokens"] == ran["eval_label_tokens"]


def test_bf16_on_a_cpu_and_no_packing_train_too(tmp_path):
    folder = train(tmp_path / "bf16", "--mixed_precision bf16 --no_packing --max_steps 3 --no_export")
    assert all(loss > 0 for loss in losses(folder).values()) and not (folder / "export").exists()


def test_recomputation_gives_the_same_losses(tmp_path):
    plain = train(tmp_path / "plain", "--max_steps 2 --no_export")
    recomputed = train(tmp_path / "recomputed", "--max_steps 2 --no_export --gradient_checkpointing")
    assert losses(recomputed) == pytest.approx(losses(plain), rel=1e-6)


def test_a_model_whose_flops_are_unknown_trains_without_them(tmp_path, capsys):
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("gpt_neox", vocab_size=2048, max_position_embeddings=256, **sizes)
    config.save_pretrained(tmp_path / "model")
    flags = f"--model_name {tmp_path}/model --init random --tokenizer_name demo --max_steps 2 --no_packing"
    folder = train(tmp_path / "run", flags)
    assert "FLOPs of model type gpt_neox are not known" in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert "model_tflops_per_gpu" not in summary and summary["tokens_per_second"] > 0


def test_samples_are_answered_by_the_export(tmp_path):
    folder = train(tmp_path / "samples", "--max_steps 1 --generate_samples 1")
    text = (folder / "samples.txt").read_text()
    assert all(part in text for part in ("PROMPT", "ANSWER", "REFERENCE"))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            "--use_te --te_backend native --mixed_precision bf16",
            EXIT_FAILED,
            "--te_backend native cannot run here: Transformer Engine needs a CUDA GPU",
        ),
        ("--mixed_precision fp8 --fp8_scenario block", EXIT_BAD_SETTING, "--fp8_scenario block: "),
        ("--model_name /nowhere", EXIT_BAD_SETTING, "--model_name /nowhere"),
        ("--init pretrained", EXIT_BAD_SETTING, "--init pretrained: the preset tiny-llama has no weights"),
        ("--dataset_name /nowhere", EXIT_BAD_SETTING, "--dataset_name /nowhere"),
        ("--split_name validation", EXIT_BAD_SETTING, "--split_name validation"),
        ("--dataset_text_field nope", EXIT_BAD_SETTING, "--dataset_text_field nope"),
        ("--max_seq_length 4096", EXIT_BAD_SETTING, "--max_seq_length 4096"),
        ("--resume /nowhere", EXIT_BAD_SETTING, "--resume /nowhere"),
        ("--moment_dtype bf16", EXIT_BAD_SETTING, "--moment_dtype bf16"),
        ("--output_dir /proc/run", EXIT_BAD_SETTING, "--output_dir /proc/run"),
        ("--log_dir /proc/run", EXIT_BAD_SETTING, "--log_dir /proc/run"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, flags, code, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(tmp_path / "run", flags, code=code)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_a_refused_resume_leaves_config_json_alone(finished, capsys):
    before = (finished / "config.json").read_text()
    train(finished, "--max_steps 9 --batch_size 4", code=EXIT_BAD_SETTING)
    assert "saved with other settings (--batch_size 2 there, 4 here)" in capsys.readouterr().err
    assert (finished / "config.json").read_text() == before


def point(meta: dict) -> ResumePoint:
    return ResumePoint(Path("run"), meta, own=True, rollback=False)


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line():
    cfg = config_from_dict({})
    with pytest.raises(ValueError, match="too old to resume"):
        check_resume(point({"config": cfg.to_dict(), "recipe": "bf16"}), cfg, "bf16", 1)


def test_a_run_folder_is_not_shared_by_different_runs(finished, tmp_path, capsys):
    train(finished, "--max_steps 8 --seed 7", code=EXIT_BAD_SETTING)
    assert "holds another run (--seed 42 there, 7 here)" in capsys.readouterr().err
    train(finished, "--max_steps 8 --resume none", code=EXIT_BAD_SETTING)
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch_size 4", "--batch_size 2 there, 4 here"),
        ("--mixed_precision bf16", "--mixed_precision fp32 there, bf16 here"),
        ("--num_of_samples 50", "--num_of_samples 60 there, 50 here"),
    ],
)
def test_a_resume_with_other_settings_is_refused(finished, tmp_path, capsys, flags, message):
    train(tmp_path / "other", f"--resume {finished} {flags}", code=EXIT_BAD_SETTING)
    assert message in capsys.readouterr().err


def test_a_start_from_another_runs_checkpoint_may_choose_another_learning_rate(finished, tmp_path, capsys):
    resume = f"--max_steps 5 --resume {finished}/checkpoints/step_000004"
    lower = train(tmp_path / "lower", f"{resume} --learning_rate 1e-4 --max_grad_norm 0.5")
    shown = capsys.readouterr().out
    assert "settings changed: --learning_rate 0.001 there, 0.0001 here, --max_grad_norm 1.0" in shown
    logged = [json.loads(line) for line in (lower / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/learning_rate"] <= 1e-4 for line in logged if "train/learning_rate" in line)
    train(tmp_path / "lower", f"{resume} --learning_rate 1e-3", code=EXIT_BAD_SETTING)
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--max_steps 0", "--max_steps 1 --generate_samples 1"])
def test_evaluating_without_rows_for_it_is_refused(tmp_path, capsys, flags):
    train(
        tmp_path / "run",
        f"--num_of_samples 60 --dataset_name {two_rows(tmp_path)} {flags}",
        code=EXIT_BAD_SETTING,
    )
    assert "leaves no rows to evaluate on" in capsys.readouterr().err


def test_a_run_without_rows_for_evaluation_resumes_with_any_flags(tmp_path, capsys):
    few = f"--max_steps 1 --dataset_name {two_rows(tmp_path)}"
    train(tmp_path / "run", few)
    train(tmp_path / "run", f"{few} --generate_samples 1")
    assert "this run is finished" in capsys.readouterr().out


def two_rows(folder: Path) -> Path:
    row = json.dumps({"problem": "What is 1 + 1?", "generated_solution": "2"})
    (folder / "two.jsonl").write_text(f"{row}\n{row}\n")
    return folder / "two.jsonl"


def test_a_resume_with_another_effective_recipe_is_refused():
    """The same settings run another recipe on another GPU, where --fp8_fallback decides."""
    cfg = config_from_dict({})
    meta = {"config": cfg.to_dict(), "world_size": 1, "total_steps": 9, "progress": {"step": 4}}
    check_resume(point(meta | {"recipe": "delayed"}), cfg, "delayed", 1)
    with pytest.raises(ValueError, match="--fp8_scenario mxfp8 there, delayed here"):
        check_resume(point(meta | {"recipe": "mxfp8"}), cfg, "delayed", 1)


def test_steps_follow_from_epochs_unless_they_are_given():
    settings = {"num_epochs": 3, "gradient_accumulation_steps": 4}
    assert count_steps(config_from_dict(settings).optim, 10) == 3 * 3
    assert count_steps(config_from_dict(settings | {"max_steps": 0}).optim, 10) == 0


def test_out_of_memory_is_one_line_and_a_library_s_error_keeps_its_traceback(capsys):
    def out_of_memory(cfg):
        raise torch.OutOfMemoryError("out of memory\nand more")

    assert main([], description="test", start=out_of_memory) == EXIT_OUT_OF_MEMORY
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: out of memory ") and "--batch_size" in error and "\n" not in error
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in error
    with pytest.raises(json.JSONDecodeError):
        main([], description="test", start=lambda cfg: json.loads("x"))


def test_out_of_memory_without_a_word_is_one_line_too(capsys):
    assert outcome.end(torch.OutOfMemoryError(), None) == EXIT_OUT_OF_MEMORY
    assert capsys.readouterr().err.startswith("error: OutOfMemoryError Try a smaller --batch_size")


def test_losses_that_are_not_finite_are_left_out_of_the_mean(tmp_path):
    lines = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": None}, {"step": 2, "eval/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert train_losses(tmp_path) == [2.0] and train_losses(tmp_path / "none") == []


def test_a_damaged_checkpoint_is_named_and_the_previous_one_offered(tmp_path, capsys):
    folder = train(tmp_path / "run", "--max_steps 4 --save_interval 2 --no_export")
    victim = next((folder / "checkpoints" / "step_000004").glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    train(folder, "--max_steps 6 --save_interval 2 --no_export", code=EXIT_BAD_SETTING)
    error = capsys.readouterr().err
    assert victim.name in error and "step_000002" in error and "--resume" in error


def test_tokens_never_reach_output_or_run_folder(tmp_path, capsys, monkeypatch):
    secret = "hf_" + "a" * 34
    monkeypatch.setenv("HF_TOKEN", secret)
    train(tmp_path / "run", f"--model_name /nowhere/{secret}", code=EXIT_BAD_SETTING)
    folder = train(tmp_path / "kept", "--max_steps 1 --no_export")
    assert secret not in capsys.readouterr().err
    assert not any(secret in p.read_text(errors="ignore") for p in folder.rglob("*") if p.is_file())
    # In a setting that defines the run it is kept there, and in checkpoints, alone.
    folder = train(
        tmp_path / "told", f"--max_steps 1 --no_export --no_save_checkpoints --system_prompt {secret}"
    )
    assert report.main([str(folder)]) == 0
    found = {p.name for p in folder.rglob("*") if p.is_file() and secret in p.read_text(errors="ignore")}
    assert found == {"config.json"}


def test_a_run_that_has_only_its_end_to_do_keeps_what_its_steps_told(finished, tmp_path):
    """Stopped in the last evaluation, say, after the last step was saved."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    train(folder, "--max_steps 8 --save_interval 4")
    for name, own in (
        ("env.json", ("coverage", "attention_backend", "flash_attention", "seconds_to_first_step")),
        ("summary.json", ("tokens_per_second", "model_tflops_per_gpu", "seconds_to_first_step")),
    ):
        before, after = (json.loads((run / name).read_text()) for run in (finished, folder))
        assert before["seconds_to_first_step"] > 0
        assert {key: after[key] for key in own} == {key: before[key] for key in own}


def test_rates_of_other_settings_are_not_taken_for_this_starts(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    train(folder, "--max_steps 8 --save_interval 4 --gradient_checkpointing")
    assert json.loads((folder / "summary.json").read_text()).get("tokens_per_second") is None
    other = tmp_path / "other"
    train(other, f"--max_steps 0 --resume {finished}")
    assert json.loads((other / "summary.json").read_text()).get("tokens_per_second") is None


def commands() -> list[str]:
    """Every training command in a code block of the README or of docs, and the ones users already run."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [b for page in pages for b in re.findall(r"^```.*?\n(.*?)^```", page.read_text(), re.M | re.S)]
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    found = [line for line in lines if re.search(r"\b(python3?|torchrun) .*train_\w+\.py", line)]
    found = [line for line in found if "$" not in line]  # test_study_page.py runs those in a shell
    llama = (
        "python train_fp8.py --model_name {} --dataset_name nvidia/OpenMathInstruct-2 --batch_size 12 "
        "--mixed_precision fp8 --max_seq_length 1024 --split_name train_1M --use_te --use_wandb "
        "--wandb_project llm-fp8 --wandb_run_name run"
    )
    three = llama.format("meta-llama/Llama-3.2-3B")
    return [
        *found,
        llama.format("meta-llama/Llama-3.2-1B"),
        three,
        three + " --fp8_scenario mxfp8",
        three.replace("--mixed_precision fp8", "--mixed_precision bf16").replace(" --use_te", ""),
        llama.format("meta-llama/Meta-Llama-3.1-8B").replace("size 12", "size 8"),
        llama.format("Qwen/Qwen2.5-14B").replace(" --use_te", "").replace("size 12", "size 4"),
        three.replace("train_1M", "validation"),
        "python train_fp8.py --model_name meta-llama/Llama-3.2-1B --dataset_name nvidia/OpenMathInstruct-2 "
        "--batch_size 8 --mixed_precision fp8 --max_seq_length 512 --split_name train_1M --num_epochs 1 "
        "--use_te",
    ]


@pytest.mark.parametrize("command", commands())
def test_documented_commands_parse(command):
    words = shlex.split(command, comments=True)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    assert (ROOT / words[script]).exists()
    flags = words[script + 1 :]
    if "--config" in flags and not (ROOT / flags[flags.index("--config") + 1]).exists():
        pytest.skip("names a file of the user's own")
    if "--help" not in flags:
        parse_config(flags, prog=words[script], description="")


@pytest.mark.parametrize("max_steps", [None, 0])
def test_what_a_gpu_cannot_hold_is_refused_unless_it_only_evaluates(max_steps):
    cfg, model = (
        config_from_dict({"max_steps": max_steps}),
        plan_model("tiny-llama", init="auto", use_te=False),
    )
    kept = Strategy(CPU), plan_optimizer(cfg.precision, on_gpu=True)
    if max_steps == 0:
        return check_memory(cfg, model, *kept, 10**6)
    with pytest.raises(UserError, match=r"--model_name tiny-llama, on one GPU: .* which has 0\.0 GB"):
        check_memory(cfg, model, *kept, 10**6)

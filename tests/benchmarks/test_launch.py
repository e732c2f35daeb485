"""Variants, and training scripts as processes: settings in, exit code out, signals forwarded."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.records.launch import Outcome, _workers, command, is_begun, is_finished, to_flags
from benchmarks.records.variants import VARIANTS, given_settings, parse_variants, resolve
from core.errors import EXIT_IN_USE, EXIT_OUT_OF_MEMORY, UserError
from tests.benchmarks.folders import write_run
from tests.children import running
from training.config import config_from_dict, parse_config

ROOT = Path(__file__).resolve().parents[2]


def test_no_variant_runs_in_another_recipe_than_its_own():
    settings = [variant.settings for variant in parse_variants([",".join(VARIANTS)])]
    assert len(settings) == len(VARIANTS) and {own["fp8_fallback"] for own in settings} == {"error"}


@pytest.mark.parametrize(
    ("names", "te"),
    [
        ("bf16,delayed", [True, True]),
        ("bf16,tensorwise", [False, False]),
        ("bf16,delayed,tensorwise", [True, True, False]),
        ("bf16,bf16_hf,tensorwise", [True, False, False]),
    ],
)
def test_bf16_has_the_layers_of_the_variants_next_to_it(names, te):
    assert [variant.uses_te for variant in parse_variants([names])] == te


def test_a_value_may_hold_commas(tmp_path):
    name = "delayed+precision_map=layers.0=bf16,layers.1=bf16+fp8_margin=1"
    bf16, delayed, block = parse_variants([f"bf16,{name},block"])
    assert (bf16.name, delayed.name, block.name) == ("bf16", name, "block")
    cfg = resolve(delayed.settings, tmp_path / "runs" / delayed.folder_name)
    assert (cfg.precision.precision_map, cfg.precision.fp8_margin) == ("layers.0=bf16,layers.1=bf16", 1)
    assert Path(cfg.checkpoint.output_dir).parent == tmp_path / "runs"


def test_flags_win_over_the_file_and_variants_over_both(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("log_interval: 7\nbatch_size: 3\nmixed_precision: fp8\n")
    given = given_settings(f"--config {file} --batch_size 5".split(), "p")
    assert given == {"log_interval": 7, "batch_size": "5"}


def test_a_command_line_restores_the_settings():
    settings = {"model_name": "-x", "packing": False, "compile": False, "eval_at_start": True, "max_steps": 3}
    cfg = config_from_dict(settings | {"system_prompt": "two words\n'quoted'", "learning_rate": 3e-5})
    assert parse_config(to_flags(cfg), prog="p", description="d") == cfg


def test_a_finished_run_has_the_same_settings_and_length(tmp_path):
    def cfg(**changes):
        return config_from_dict({"output_dir": str(tmp_path), "max_steps": 20} | changes)

    assert not is_finished(cfg())
    write_run(tmp_path, losses=[2.0], summary={"steps": 20}, max_steps=20)
    assert is_finished(cfg())
    for name, there, here in (
        ("max_steps", 20, 30),
        ("batch_size", 8, 4),
        ("sharding_mode", "auto", "ddp"),
        ("log_interval", 10, 5),
        ("flash_attention", True, False),
    ):
        told = f"holds a run of other settings (--{name} {there} there, {here} here)"
        with pytest.raises(UserError, match=re.escape(told)):
            is_finished(cfg(**{name: here}))
    assert is_finished(cfg(save_interval=7, num_workers=0, use_wandb=True, wandb_project="p"))
    (tmp_path / "summary.json").unlink()
    assert is_begun(cfg()) and not is_finished(cfg())
    for broken in ("", "[]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(UserError, match=r"config\.json: cannot be read .*; remove the folder to run it"):
            is_finished(cfg())


def test_the_end_of_a_run_follows_from_its_exit_code(tmp_path):
    begun = write_run(tmp_path / "begun")
    assert Outcome(1, tmp_path, "no such cores").refused
    for code, folder, error in (
        (1, begun, "it broke"),
        (1, tmp_path, None),
        (2, tmp_path, "--x 1: no"),
        (-9, tmp_path, None),
    ):
        assert not Outcome(code, folder, error).refused
    assert not Outcome(1, tmp_path, "no such cores", stopped=True).refused
    assert Outcome(EXIT_OUT_OF_MEMORY, begun, "").out_of_memory and Outcome(EXIT_IN_USE, begun, "").in_use
    for killed in (-9, 137):
        assert (
            Outcome(killed, begun, None, last_line="step 3").reason
            == "killed by SIGKILL; its log ends with: step 3"
        )
    assert Outcome(1, begun, None, last_line="KeyError").reason == "KeyError (exit code 1)"


def test_torchrun_ends_with_the_code_of_the_rank_that_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(3)\n")
    line = command(config_from_dict({}), gpus=2)
    assert line[line.index("--nproc_per_node=2") + 1] == str(ROOT / "train_multi_gpu.py")
    with running([*line[: line.index("--nproc_per_node=2") + 1], str(script)], cwd=ROOT) as process:
        assert process.wait(300) == 3


def test_signals_go_to_torchrun_s_workers():
    """Stand-ins: a launcher with a worker (by its script's name) and another child; another's worker."""
    sleep = "import time; time.sleep(600)"
    worker = [sys.executable, "-c", sleep, str(ROOT / "train_multi_gpu.py")]
    program = f"import subprocess, time; print(subprocess.Popen({worker!r}).pid, flush=True); "
    program += f"subprocess.Popen([{sys.executable!r}, '-c', {sleep!r}]); time.sleep(600)"
    with running([sys.executable, "-c", program], stdout=-1) as launcher, running(worker):
        pid = int(launcher.stdout.readline())
        deadline = time.monotonic() + 300
        while not _workers(launcher.pid) and time.monotonic() < deadline:
            time.sleep(0.02)  # between fork and exec it has its parent's command line
        assert _workers(launcher.pid) == [pid]


def test_damaged_settings_are_no_begun_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert not is_begun(config_from_dict({"output_dir": str(tmp_path)})), "nothing was logged or saved"

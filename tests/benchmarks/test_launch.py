"""Variants, and training scripts as processes: settings in, exit code out, signals forwarded."""

import signal
import sys
from pathlib import Path

import pytest
from fp8_suite.benchmarks.launch import process
from fp8_suite.benchmarks.launch.grid import run_config
from fp8_suite.benchmarks.launch.variants import VARIANTS, parse_variants
from fp8_suite.core.errors import EXIT_IN_USE, EXIT_INTERRUPTED, UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.training.config import config_from_dict, parse_config

from tests.benchmarks.folders import write_run
from tests.children import running, wait_for

TE, LAYOUT = (
    {"use_te": True},
    {"pipeline_parallel_size": 2, "virtual_stages": 2, "sharding_mode": "fsdp_full"},
)
CHOSEN, GLOBAL = {"batch_size": 2, "gradient_accumulation_steps": 8}, {"global_batch_size": 32}


def test_no_variant_runs_in_another_recipe_than_its_own():
    settings = [variant.settings for variant in parse_variants([",".join(VARIANTS)])]
    assert len(settings) == len(VARIANTS) and {values["fp8_fallback"] for values in settings} == {"error"}


def test_a_value_may_hold_commas(tmp_path):
    name = "delayed+precision_map=layers.0=bf16,layers.1=bf16+fp8_amax_history_len=1"
    bf16, delayed, block = parse_variants([f"bf16,{name},block"])
    assert (bf16.name, delayed.name, block.name) == ("bf16", name, "block")
    cfg = run_config("delayed", delayed.settings, 1, tmp_path / "runs" / delayed.folder_name)
    values = cfg.precision.precision_map, cfg.precision.fp8_amax_history_len
    assert values == ("layers.0=bf16,layers.1=bf16", 1)
    assert Path(cfg.checkpoint.output_dir).parent == tmp_path / "runs"


def test_fp16_is_a_variant_except_in_a_pair_of_moments():
    names = [
        "bf16",
        "delayed+moment_dtype=fp8,fp16",
        "current+moment_dtype=fp8",
        "tensorwise",
        "fp16",
        "fp16_hf",
    ]
    variants = parse_variants([",".join(names)])
    assert [variant.name for variant in variants] == names
    assert [variant.settings["use_te"] for variant in variants] == [True, True, True, False, True, False]
    assert all(variant.settings["use_te"] for variant in parse_variants(["bf16,fp16"]))


def test_a_command_line_restores_the_settings():
    settings = {"model_name": "-x", "packing": False, "compile": False, "eval_at_start": True, "max_steps": 3}
    cfg = config_from_dict(settings | {"system_prompt": "two words\n'quoted'", "learning_rate": 3e-5})
    assert parse_config(process.to_flags(cfg), prog="p", description="d") == cfg


@pytest.mark.parametrize(
    ("recorded", "requested", "accepted"),
    [
        ({}, {}, True),
        ({}, {"save_interval": 7, "num_workers": 0, "use_wandb": True, "wandb_project": "p"}, True),
        *(({}, {name: value}, False) for name, value in (("max_steps", 30), ("sharding_mode", "ddp"))),
        *(({}, {name: value}, False) for name, value in (("log_interval", 5), ("flash_attention", False))),
        # The run chose its batch.
        (CHOSEN | GLOBAL, {"batch_size": "auto"} | GLOBAL, True),
        (CHOSEN | GLOBAL, {"batch_size": 2} | GLOBAL, True),
        (CHOSEN | GLOBAL, {"batch_size": 4} | GLOBAL, False),
        (CHOSEN | GLOBAL, {"batch_size": "auto", "global_batch_size": 64}, False),
        (CHOSEN, {"batch_size": "auto", "gradient_accumulation_steps": 2}, True),
        (CHOSEN, {"batch_size": "auto", "gradient_accumulation_steps": 4}, False),
        # The run chose its layout.
        (TE | LAYOUT, TE | {"pipeline_parallel_size": "auto"}, True),
        (TE | LAYOUT, TE | {"context_parallel_size": "auto"}, False),
    ],
)
def test_a_finished_run_has_the_same_settings_and_length(recorded, requested, accepted, tmp_path):
    cfg = config_from_dict({"output_dir": str(tmp_path), "max_steps": 20} | requested)
    assert not process.is_finished(cfg)
    write_run(tmp_path, losses=[2.0], summary={"steps": 20}, max_steps=20, **recorded)
    if not accepted:
        with pytest.raises(UserError, match=r"holds a run with other settings \(--"):
            process.is_finished(cfg)
        return
    assert process.is_finished(cfg)
    (tmp_path / "summary.json").unlink()
    assert not process.is_finished(cfg)
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(UserError, match=r"settings\.json: damaged"):
        process.is_finished(cfg)


def test_the_end_of_a_run_follows_from_its_exit_code(tmp_path):
    begun = write_run(tmp_path / "begun")
    assert process.Outcome(1, tmp_path, "no such cores").refused
    for outcome in ((1, begun, "it broke"), (1, tmp_path, None), (2, tmp_path, "--x 1: no"), (-9, tmp_path)):
        assert not process.Outcome(*outcome).refused
    assert {process.Outcome(code, begun).reason.split(";")[0] for code in (-9, 137)} == {"killed by SIGKILL"}


def test_torchrun_ends_with_the_code_of_the_rank_that_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(3)\n")
    line = process.command(config_from_dict({}), gpus=2)
    assert line[line.index("--nproc_per_node=2") + 1] == str(ROOT / "train_multi_gpu.py")
    with running([*line[: line.index("--nproc_per_node=2") + 1], str(script)], cwd=ROOT) as torchrun:
        assert torchrun.wait(300) == 3


def test_signals_go_to_torchrun_s_workers():
    """Stand-ins: a launcher with a worker (by its script's name) and another child; another's worker."""
    sleep = "import time; time.sleep(600)"
    worker = [sys.executable, "-c", sleep, str(ROOT / "train_multi_gpu.py")]
    program = f"import subprocess, time; print(subprocess.Popen({worker!r}).pid, flush=True); "
    program += f"subprocess.Popen([{sys.executable!r}, '-c', {sleep!r}]); time.sleep(600)"
    with running([sys.executable, "-c", program], stdout=-1) as launcher, running(worker):
        pid = int(launcher.stdout.readline())
        wait_for(lambda: process._workers(launcher.pid))  # between fork and exec it has its parent's command
        assert process._workers(launcher.pid) == [pid]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that launches a program in place of a training script, with its flags."""

    def start(program: str) -> process.Outcome:
        monkeypatch.setattr(process, "command", lambda cfg, gpus: [sys.executable, "-uc", program])
        return process.launch(config_from_dict({"output_dir": str(tmp_path)}), log=tmp_path / "logs/run.log")

    return start


def test_output_of_a_run_is_shown_and_kept(script, tmp_path, capsys):
    program = "import sys; print('step 1'); print('error: it broke'); print('bye', end=''); sys.exit(1)"
    outcome = script(program)
    assert (outcome.code, outcome.error, outcome.last_line) == (1, "it broke", "bye")
    assert capsys.readouterr().out == "step 1\nerror: it broke\nbye"
    assert (tmp_path / "logs/run.log").read_text().endswith("step 1\nerror: it broke\nbye")
    with pytest.raises(UserError, match="another run writes; then run the same command to resume"):
        script(f"import sys; print('error: another run writes'); sys.exit({EXIT_IN_USE})")
    with pytest.raises(KeyboardInterrupt):
        script(f"import sys; sys.exit({EXIT_INTERRUPTED})")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded_once_and_the_run_may_save(script, tmp_path, number):
    """The stand-in sends the signal to this process once it can receive it, and waits for a second one."""
    received = signal.SIGTERM if number == signal.SIGHUP else number
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match=r"interrupted in .*; run the same command to resume"):
            script(
                "import os, signal, time\n"
                "found = []\n"
                f"signal.signal({received:d}, lambda *_: found.append(1))\n"
                f"os.kill(os.getppid(), {number:d})\n"
                "for _ in range(30_000):\n"
                "    if found: break\n"
                "    time.sleep(0.01)\n"
                "time.sleep(0.5)\n"
                "print('saved', len(found))"
            )
    finally:
        signal.signal(number, before)
    assert (tmp_path / "logs/run.log").read_text().endswith("saved 1\n")


def test_a_run_outlives_the_benchmark_that_started_it(tmp_path):
    log = tmp_path / "run.log"
    program = "import time; print('begun'); time.sleep(1); print('ended')"
    parent = (
        "from pathlib import Path; from benchmarks.launch import process; from training import config; "
        f"process.command = lambda *_: [{sys.executable!r}, '-uc', {program!r}]; "
        f"process.launch(config.config_from_dict({{'output_dir': 'x'}}), log=Path({str(log)!r}))"
    )
    with running([sys.executable, "-c", parent], cwd=ROOT) as launcher:
        wait_for(lambda: launcher.poll() is not None or (log.exists() and "begun\n" in log.read_text()))
        assert launcher.poll() is None
        launcher.kill()
        wait_for(lambda: "ended\n" in log.read_text())

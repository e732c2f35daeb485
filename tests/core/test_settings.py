"""The command line: one setting is one flag, one YAML key and one saved setting."""

import dataclasses
import json
import subprocess
import sys

import pytest

from core.files import write_json
from training.config import Config, all_settings, changed_settings, config_from_dict, parse_config


def parse(*argv: str) -> Config:
    return parse_config(list(argv), prog="train_fp8.py", description="test")


def test_defaults_and_flags():
    cfg = parse("--use_te", "--mixed_precision", "fp8", "--learning_rate", "3e-4", "--no_packing")
    assert cfg.model.use_te and cfg.precision.mixed_precision == "fp8"
    assert cfg.optim.learning_rate == 3e-4 and not cfg.data.packing
    assert (cfg.data.split_name, cfg.log.wandb_project) == ("train_1M", "llm-fp8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.optim.learning_rate = 1.0


def test_a_home_is_one_wherever_it_is_written(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert parse("--output_dir=~/runs/a").checkpoint.output_dir == "/home/of/mine/runs/a"
    settings = {"data_cache_dir": "~/c", "log_dir": "~", "weights_cache_dir": "~/w"}
    found = config_from_dict(settings).to_dict()
    assert [found[name] for name in settings] == ["/home/of/mine/c", "/home/of/mine", "/home/of/mine/w"]


def test_compilation_has_two_names():
    assert parse("--compile_model").model.compile and parse("--compile").model.compile
    assert parse("--no_compile_model").model.compile is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--use_t"], "unknown flag --use_t; did you mean '--use_te'"),
        (["--batch_siz", "3"], "did you mean '--batch_size'"),
        (["--lr", "3"], "did you mean '--learning_rate'"),
        (["--epochs", "3"], "did you mean '--num_epochs'"),
        (["--model", "x"], "did you mean '--model_name'"),
        (["surprise"], "unexpected argument surprise"),
        (["--use_te", "false"], "--use_te false: takes no value; --use_te turns it on, --no_use_te off"),
        (["--no_packing=True"], "--packing True: takes no value; --packing turns it on, --no_packing off"),
        (["--learning_rate", "-1e-5"], "--learning_rate -1e-05: must be positive"),
        (["--batch_size"], "expected one argument"),
        (["--batch_size", "two"], "--batch_size two: must be a whole number"),
        (["--batch_size", "0"], "--batch_size 0: must be at least 1"),
        (["--learning_rate", "-1"], "--learning_rate -1.0: must be positive"),
        (["--learning_rate", "1e400"], "--learning_rate 1e400: must be a finite number"),
        (["--weight_decay", "nan"], "--weight_decay nan: must be a finite number"),
        (["--mixed_precision", "fp16"], "--mixed_precision fp16: not one of bf16, fp8, fp32"),
        (["--fp8_scenario", "mxfp"], "did you mean 'mxfp8'"),
        (["--streaming"], "--streaming: the length of a stream is unknown"),
        (["--use_te", "--mixed_precision", "fp32"], "TE layers run in bf16 or fp8"),
        (["--use_te", "--compile"], "--compile with --use_te"),
        (["--fp8_attention", "--fp8_scenario", "block"], "--fp8_attention"),
        (["--dataset_prompt_field", "q"], "--dataset_completion_field"),
        (["--no_export", "--generate_samples", "1"], "--generate_samples"),
        (["--eval_samples", "0", "--generate_samples", "1"], "--eval_samples 0"),
        (["--eval_samples", "0", "--max_steps", "0"], "--eval_samples 0"),
        (["--seed", "-1"], "--seed -1: must be between 0"),
        (["--profile_steps", "-1"], "--profile_steps -1: must be at least 0"),
        (
            ["--hsdp_shard_size", "2", "--sharding_mode", "fsdp_full"],
            "--hsdp_shard_size 2 --sharding_mode fsdp_full",
        ),
        (["--timeout_minutes", "1e9"], "--timeout_minutes 1000000000.0: must be above 0, at most a week"),
        (["--deepspeed_config", "x.json"], "--sharding_mode auto --deepspeed_config x.json"),
        (["--sharding_mode", "deepspeed"], "--sharding_mode deepspeed --deepspeed_config None"),
        (
            ["--sharding_mode", "deepspeed", "--deepspeed_config", "/nope.json"],
            "--deepspeed_config /nope.json: no such file; ds_configs/ has ds_configs/zero1.json",
        ),
        (
            ["--sharding_mode", "deepspeed", "--deepspeed_config", "README.md"],
            "--deepspeed_config README.md: cannot be read as JSON",
        ),
        (["--cpu_offload", "--sharding_mode", "ddp"], "--cpu_offload --sharding_mode ddp"),
        (["--fp8_all_gather"], "--fp8_all_gather --sharding_mode auto"),
        (["--fp8_all_gather", "--sharding_mode", "fsdp_full"], "--fp8_all_gather: weights are scaled by"),
        (["--max_steps", "0", "--generate_samples", "1"], "--max_steps 0 --generate_samples"),
    ],
)
def test_bad_input_names_flag_value_and_way_out(argv, message):
    with pytest.raises(ValueError) as error:
        parse(*argv)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_flag_that_is_like_no_other_is_not_guessed_at():
    for flag in ("--no_such_flag", "--optimizer", "--gpus"):
        with pytest.raises(ValueError, match=rf"^unknown flag {flag}$"):
            parse(flag)


def test_yaml_sets_and_flags_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-4\nbatch_size: 3\npacking: false\neval_split: test\n")
    cfg = parse("--config", str(file), "--batch_size", "5", "--packing")
    assert (cfg.optim.learning_rate, cfg.optim.batch_size, cfg.data.packing) == (1e-4, 5, True)
    assert cfg.data.eval_split == "test"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
        ("- a\n- b", "must hold `setting: value` lines"),
        ("a: [", "not valid YAML"),
        (
            "seed: 1\nmax_steps: 5\n  batch_size: 2",
            "not valid YAML: mapping values are not allowed here (line 3)",
        ),
        ("batch_size: 8\nbatch_size: 2", "not valid YAML: 'batch_size' stands twice"),
        ("batch_size: 1.5", "--batch_size 1.5: must be a whole number"),
        ("batch_size: 1.5e0", "--batch_size 1.5: must be a whole number"),
        ("batch_size: 1e999", "--batch_size inf: must be a whole number"),
        ("batch_size: .inf", "--batch_size inf: must be a whole number"),
        ("batch_size: true", "--batch_size True: must be a whole number"),
        ("use_te: maybe", "--use_te maybe: must be true or false"),
        ("max_steps: two", "run.yaml: --max_steps two: must be a whole number"),
        ("max_steps: -1", "run.yaml: --max_steps -1: must be at least 0"),
        ("learning_rate: -1", "run.yaml: --learning_rate -1.0: must be positive"),
        ("packing: true\nstreaming: true", "run.yaml: --streaming: the length of a stream is unknown"),
    ],
)
def test_bad_yaml(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        parse("--config", str(file))
    assert str(error.value).startswith(f"--config {file}: ") and message in str(error.value)


def test_a_bad_flag_beside_a_file_is_not_the_files(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 5\nseed: 1")
    with pytest.raises(ValueError, match=r"^--seed -1: must be between"):
        parse("--config", str(file), "--seed", "-1")
    file.write_text("generate_samples: 3")  # which the way out names
    with pytest.raises(ValueError, match=r"^--eval_samples 0: --generate_samples and --max_steps 0 need"):
        parse("--config", str(file), "--eval_samples", "0")


def test_numbers_of_a_file_are_what_is_written(tmp_path):
    """YAML 1.1 reads octal numbers, times of day and dates."""
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 010\nwandb_run_name: 12:30:00\nwandb_project: 0123\nlearning_rate: 1e-4\n")
    cfg = parse("--config", str(file))
    assert (cfg.optim.max_steps, cfg.optim.learning_rate) == (10, 1e-4)
    assert (cfg.log.wandb_run_name, cfg.log.wandb_project) == ("12:30:00", "0123")
    file.write_text("max_steps: 1e3")
    assert (
        parse("--config", str(file)).optim.max_steps == parse("--max_steps", "1.0E+3").optim.max_steps == 1000
    )
    for name in ("2026-01-31", "1e-4", "1e3"):
        file.write_text(f"wandb_run_name: {name}")
        assert parse("--config", str(file)).log.wandb_run_name == name


def test_missing_config_file():
    with pytest.raises(ValueError, match=r"--config /nowhere\.yaml"):
        parse("--config", "/nowhere.yaml")


def test_saved_config_comes_back_as_config(tmp_path):
    cfg = parse("--use_te", "--eval_split", "test", "--warmup_ratio", "0.1", "--no_export")
    write_json(tmp_path / "config.json", cfg.to_dict())
    assert parse("--config", str(tmp_path / "config.json")) == cfg
    assert config_from_dict(json.loads((tmp_path / "config.json").read_text())) == cfg


def test_only_settings_that_define_a_run_count_as_changed():
    old = parse("--batch_size", "4").to_dict()
    new = parse("--batch_size", "8", "--log_interval", "1", "--max_steps", "7")
    assert changed_settings(old, new) == {"batch_size": (4, 8)}
    before = {name: value for name, value in old.items() if name != "fp8_fast_accumulation"}
    assert not changed_settings(before, parse("--batch_size", "4"))
    assert changed_settings(before, parse("--batch_size", "4", "--fp8_fast_accumulation")) == {
        "fp8_fast_accumulation": (False, True)
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--wandb_project x", "--wandb_project x: not read without --use_wandb"),
        ("--wandb_tags a,b --wandb_mode offline", "--wandb_mode offline, --wandb_tags a,b: not read without"),
        ("--wandb_project x --use_wandb", None),
        ("--wandb_project llm-fp8", None),
        ("", None),
    ],
)
def test_settings_of_wandb_that_nothing_reads_are_told(flags, said):
    found = parse(*flags.split()).log.unread()
    assert found is None if said is None else found.startswith(said)


def test_every_knob_has_help():
    for name, (_, field, hint) in all_settings().items():
        assert len(field.metadata["help"]) > 10, name
        assert hint is not None


def test_help_says_how_a_run_goes_on():
    said = {name: field.metadata["help"] for name, (_, field, _) in all_settings().items()}
    assert "RUN/export" in said["model_name"] and "over all starts" in said["max_steps"]
    assert "a run's folder" in said["resume"] and "goes on" in said["output_dir"]


def test_help_is_quick_and_names_every_flag():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['train_fp8.py', '--help']; " + (
        "import runpy; runpy.run_path('train_fp8.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"--{name}" in done.stdout for name in all_settings())


@pytest.mark.parametrize("script", ["train_fp8.py", "train_multi_gpu.py"])
def test_a_wrong_flag_is_told_before_torch_is_imported(script):
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['{script}', '--max_step', '3']; " + (
        f"import runpy; runpy.run_path('{script}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: unknown flag --max_step; did you mean '--max_steps'?\n"


def test_what_defines_a_run_cannot_change_on_a_resume():
    free = {name: section for name, (section, f, _) in all_settings().items() if f.metadata["resumable"]}
    assert {name for name, section in free.items() if section not in ("checkpoint", "log")} == {
        *("weights_cache_dir", "data_cache_dir", "num_proc", "num_workers", "flash_attention"),
        "fused_residuals",
        "fp8_weight_cache",
        "gradient_checkpointing",
        *("compile", "eval_batch_size", "num_epochs", "max_steps", "max_skipped_steps"),
        *("sharding_mode", "deepspeed_config", "cpu_offload", "hsdp_shard_size"),
        *("empty_cache_freq", "timeout_minutes"),
    }
    assert {
        name for name, (section, *_) in all_settings().items() if section in ("checkpoint", "log")
    } <= free.keys()

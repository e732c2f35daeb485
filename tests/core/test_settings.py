"""One setting is one flag, one YAML key, one line of help and one value in settings.json."""

import json
import subprocess
import sys

import pytest
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.files import write_json
from fp8_suite.core.packages import ROOT
from fp8_suite.training import config
from fp8_suite.training.checkpoint.settings import parse_save_interval
from fp8_suite.training.config import Config

FP8 = "--mixed_precision fp8"
HELD = f"{FP8} --fp8_weights --offload_optimizer"
GATHER = f"{FP8} --fp8_all_gather --sharding_mode hsdp"
PLAN = "-m benchmarks.plan"


def parse(*argv: str) -> Config:
    return config.parse_config(list(argv), prog="train_fp8.py", description="test")


def test_flags_set_fields_of_sections(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    flags = "--use_te --learning_rate 3e-4 --no_packing --output_dir=~/a --max_steps 1.0E+3"
    cfg = parse(*flags.split())
    assert cfg.model.use_te and not cfg.data.packing and cfg.optim.learning_rate == 3e-4
    assert (cfg.data.split_name, cfg.log.wandb_project) == ("train_1M", "llm-fp8"), "defaults"
    assert (cfg.checkpoint.output_dir, cfg.optim.max_steps) == ("/home/me/a", 1000)
    assert parse("--no_compile").model.compile is False and cfg.model.compile is None


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        *(("--use_t", "--use_te"), ("--epochs 3", "--num_epochs")),
        *(("--model x", "--model_name"), ("--no_such_flag", ""), ("--adamw", ""), ("--gpus", "")),
        *(("surprise", ""), ("--use_te false", ""), ("--batch_size", "")),
        *(("--fp8_scenario mxfp", "mxfp8"), ("--fp8_scenario MXFP8", "mxfp8"), ("--moment_dtype FP8", "fp8")),
        *(("--sharding_mode fsdp_offload", ""), ("--sharding_mode fsdp", "fsdp_full")),
        ("--moment_dtype fp8,BF16", "bf16"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(argv, nearest):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    text = str(error.value)
    assert "\n" not in text and error.value.exit_code == EXIT_BAD_SETTING
    assert (f"did you mean '{nearest}'?" in text) if nearest else ("did you mean" not in text)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--no_packing=True", "--packing/--no_packing: ignored explicit argument 'True'"),
        ("--batch_size two", "must be a whole number or auto"),
        ("--gradient_accumulation_steps auto", "must be a whole number"),
        *((f"--{name} 1e10", "must be at most") for name in ("num_workers", "batch_size", "timeout_minutes")),
        *(("--batch_size 0", "must be at least 1"), ("--learning_rate=-1e-5", "must be above 0")),
        *(("--learning_rate 1e400", "must be a finite number"), ("--adam_beta1 1", "must be below 1")),
        ("--fp8_amax_history_len 2 --mixed_precision fp8", "applies to delayed, not to tensorwise"),
        ("--bf16_first_layers 1", "needs --mixed_precision fp8 (here bf16)"),
        ("--config /nowhere.yaml", "No such file or directory"),
        ("--output_dir=", "needs a value"),
        *((f"--save_interval {text}", "(30m)") for text in ("30x", "-1", "0m", "1.5", "nan", "m", "infh")),
    ],
)
def test_a_bad_value_is_one_line_with_flag_and_reason(argv, reason):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    flag = argv.split()[0].partition("=")[0].removeprefix("--no_").removeprefix("--")
    text = str(error.value)
    assert text.startswith(f"--{flag}") and reason in text and "\n" not in text
    assert error.value.exit_code == EXIT_BAD_SETTING


@pytest.mark.parametrize(
    ("value", "steps", "seconds"),
    [(500, 500, 0), ("0", 0, 0), ("1e3", 1000, 0), ("30m", 0, 1800), ("2h", 0, 7200), ("0.5h", 0, 1800)],
)
def test_a_save_interval_is_steps_or_time_in_flags_yaml_and_settings(value, steps, seconds, tmp_path):
    texts = {"run.yaml": f"save_interval: {value}", "a.json": f'{{"save_interval": "{value}"}}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        cfg = parse("--config", str(tmp_path / name))
        assert parse_save_interval(cfg.checkpoint.save_interval) == (steps, seconds)
        assert cfg == parse(f"--save_interval={value}")
        assert cfg == config.config_from_dict(json.loads(json.dumps(cfg.to_dict())))


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ("--streaming", "streaming"),
        ("--eval_samples 0 --generate_samples 1", "eval_samples"),
        ("--eval_samples 0 --max_steps 0", "eval_samples"),
        ("--no_export --generate_samples 1", "generate_samples export"),
        ("--max_steps 0 --generate_samples 1", "max_steps generate_samples"),
        ("--max_steps 0 --export_dtype fp8", "max_steps export_dtype"),
        ("--use_te --compile", "compile use_te"),
        ("--use_te --mixed_precision fp32", "mixed_precision use_te"),
        ("--mixed_precision fp16 --master_weights none", "mixed_precision master_weights"),
        ("--mixed_precision fp16 --grad_reduce_dtype bf16", "mixed_precision grad_reduce_dtype"),
        ("--mixed_precision fp16 --sharding_mode ds_zero2", "mixed_precision sharding_mode"),
        ("--te_backend emulated", "te_backend"),
        ("--fp8_lm_head", "fp8_lm_head"),
        ("--lora_dropout 0.1", "lora_dropout"),
        ("--lora_rank 4 --sharding_mode ds_zero2", "lora_rank sharding_mode"),
        ("--lora_rank 4 --offload_optimizer", "lora_rank offload_optimizer"),
        (f"{FP8} --precision_map proj=block", "precision_map"),
        (f"{FP8} --fp8_scenario block", "fp8_scenario"),
        (f"{FP8} --fp8_scenario rowwise --use_te", "fp8_scenario"),
        ("--recompute mlp:1+cheap", "recompute"),
        ("--use_te --sharding_mode ds_zero3 --recompute mlp:1", "recompute"),
        ("--use_te --sharding_mode ds_zero3 --recompute full --offload_activations", "offload_activations"),
        *((f"--offload_activations {x}", "offload_activations") for x in ("--recompute layer", "--use_te")),
        ("--hsdp_shard_size 2 --sharding_mode fsdp_full", "hsdp_shard_size sharding_mode"),
        ("--deepspeed_config x.json", "deepspeed_config sharding_mode"),
        ("--sharding_mode deepspeed", "sharding_mode"),
        ("--offload_optimizer --sharding_mode ds_zero2", "offload_optimizer sharding_mode"),
        ("--fp8_all_gather", "fp8_all_gather sharding_mode"),
        (f"{GATHER} --use_te", "fp8_all_gather fp8_scenario"),
        (f"{GATHER} --master_weights none", "fp8_all_gather master_weights"),
        (f"{HELD}", "fp8_weights use_te"),
        (f"{HELD} --use_te --fp8_scenario block", "fp8_weights fp8_scenario"),
        (f"{FP8} --fp8_weights --use_te", "fp8_weights"),
        (f"{HELD} --use_te --sharding_mode fsdp_full", "fp8_weights sharding_mode"),
        (f"{HELD} --use_te --master_weights none", "fp8_weights master_weights"),
        (f"{HELD} --use_te --bf16_last_layers 1", "fp8_weights bf16_last_layers"),
    ],
)
def test_settings_that_clash_are_refused_by_name(argv, flags):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    assert error.value.flags >= set(flags.split()) and error.value.exit_code == EXIT_BAD_SETTING


@pytest.mark.parametrize(
    "argv",
    [
        "--streaming --max_steps 3",
        "--eval_samples 0 --max_steps 3",
        "--offload_optimizer --sharding_mode hsdp",
        "--fp8_all_gather --sharding_mode hsdp --hsdp_shard_size 2 --mixed_precision fp8",
        "--fp8_all_gather --sharding_mode fsdp_grad --mixed_precision fp8 --fp8_scenario current --use_te",
        "--sharding_mode deepspeed --deepspeed_config ds_configs/zero1.json",
        *(f"--sharding_mode ds_zero3 --recompute {levels}" for levels in ("auto", "layer", "mlp")),
        "--fp8_weights --offload_optimizer --use_te --mixed_precision fp8 --fp8_scenario current",
    ],
)
def test_settings_that_go_together_are_accepted(argv):
    parse(*argv.split())


def test_flags_win_over_a_file_and_its_values_are_as_written(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-4\nbatch_size: 3\npacking: false\nmax_steps: 10\neval_split: test\n")
    cfg = parse("--config", str(file), "--batch_size", "5", "--packing", "--eval_split", "none")
    assert (cfg.optim.learning_rate, cfg.optim.batch_size, cfg.data.packing) == (1e-4, 5, True)
    assert cfg.optim.max_steps == 10 and cfg.data.eval_split is None
    for name in ("2026-01-31", "1e-4", "1e3"):
        file.write_text(f"wandb_run_name: {name}\nmax_steps: 1e3")
        cfg = parse("--config", str(file))
        assert (cfg.log.wandb_run_name, cfg.optim.max_steps) == (name, 1000)
    with pytest.raises(UserError, match=r"^--seed -1: must be at least 0"):  # the file is not named
        parse("--config", str(file), "--seed", "-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown setting 'learning_rat'; did you mean 'learning_rate'"),
        ("seed: 1\n  batch_size: 2", "not valid YAML: mapping values are not allowed here (line 2)"),
        ("batch_size: 8\nbatch_size: 2", "not valid YAML: duplicate key 'batch_size'"),
        *((f"batch_size: {v}", "must be a whole number") for v in ("1.5", "1e999", ".inf", "true", "[1]")),
        ("use_te: maybe", "--use_te maybe: must be true or false"),
        ("batch_size:", "--batch_size None: needs a value"),
        ("max_steps: -1", "--max_steps -1: must be at least 0"),
        ("packing: true\nstreaming: true", "--streaming: a stream's length is unknown"),
    ],
)
def test_an_error_in_a_file_names_the_file(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        parse("--config", str(file))
    assert str(error.value).startswith(f"--config {file}: ") and message in str(error.value)
    assert error.value.exit_code == EXIT_BAD_SETTING


def test_settings_json_gives_the_same_config(tmp_path):
    cfg = parse("--use_te", "--eval_split", "test", "--warmup_ratio", "0.1", "--no_export")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(cfg.to_dict(), indent="\t"))
    assert parse("--config", str(path)) == config.config_from_dict(json.loads(path.read_text())) == cfg


def test_what_a_run_chooses_at_its_start_is_open_until_then(tmp_path):
    assert parse().optim.gradient_accumulation_steps == 1
    for flags in ("--batch_size auto", "--global_batch_size 24"):
        assert parse(*flags.split()).optim.gradient_accumulation_steps is None
    cfg = parse("--batch_size", "auto", "--global_batch_size", "24")
    assert config.config_from_dict(cfg.to_dict()) == cfg and cfg.optim.batch_size == "auto"
    recorded = cfg.to_dict() | {"batch_size": 6, "gradient_accumulation_steps": 2}
    del recorded["decay_ratio"]  # as an older version wrote it
    write_json(tmp_path / "settings.json", recorded)  # of two ranks
    resumed = parse("--config", str(tmp_path / "settings.json")).optim
    assert (resumed.batch_size, resumed.gradient_accumulation_steps) == (6, None)
    (tmp_path / "run.yaml").write_text("global_batch_size: 24\ngradient_accumulation_steps: 2")
    assert parse("--config", str(tmp_path / "run.yaml")).optim.gradient_accumulation_steps == 2


def test_only_settings_that_are_not_resumable_count_as_changed():
    old = parse("--batch_size", "4").to_dict()
    new = parse("--batch_size", "8", "--log_interval", "1", "--max_steps", "7")
    assert config.changed_settings(old, new) == {"batch_size": (4, 8)}
    before = {name: value for name, value in old.items() if name != "fp8_fast_accumulation"}
    added = config.changed_settings(before, parse("--batch_size", "4", "--fp8_fast_accumulation"))
    assert added == {"fp8_fast_accumulation": (False, True)}, "an older run had the default"
    table = config.all_settings().items()
    resumable = {name for name, (_, f, _) in table if f.metadata["resumable"]}
    of_records = {name for name, (section, *_) in table if section in ("checkpoint", "log")}
    assert resumable - of_records == {
        *("num_proc", "num_workers", "flash_attention"),
        *("fp8_weights", "gradient_checkpointing", "recompute", "offload_activations"),
        *("compile", "eval_batch_size", "num_epochs", "max_steps"),
        *("sharding_mode", "deepspeed_config", "offload_optimizer", "hsdp_shard_size"),
        *("context_parallel_size", "cp_comm_type", "tensor_parallel_size"),
        *("pipeline_parallel_size", "virtual_stages"),
        *("memory_limit_gb", "empty_cache_freq", "timeout_minutes"),
    }
    assert of_records <= resumable


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        *((f"{script} --help", 0, "usage: ") for script in ("train_fp8.py", "train_multi_gpu.py", PLAN)),
        ("train_fp8.py --max_step 3", EXIT_BAD_SETTING, "--max_step; did you mean '--max_steps'?"),
        ("train_fp8.py --tokenizer_name /none", EXIT_BAD_SETTING, "--tokenizer_name"),
        (f"{PLAN} --gpu A100 --mixed_precision fp8", EXIT_BAD_SETTING, "no FP8"),
        (f"{PLAN} --global_batch_size 3 --gpus 7", EXIT_BAD_SETTING, "cannot be shared"),
        (f"{PLAN} --max_seq_length 131073", EXIT_BAD_SETTING, "--max_seq_length"),
    ],
)
def test_help_and_refusals_are_answered_before_torch_is_imported(command, code, text):
    program = f"""
import runpy, sys
*module, name = {command.split(" --")[0].split()!r}
sys.argv = [name, *{command.split()!r}[len(module) + 1:]]
try:
    (runpy.run_module if module else runpy.run_path)(name, run_name="__main__")
finally:
    assert not {{"torch", "datasets", "transformers", "pandas"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and text in done.stdout + done.stderr, done.stderr
    if command == "train_fp8.py --help":
        assert all(f"--{name}" in done.stdout for name in config.all_settings())

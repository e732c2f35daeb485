"""The training scripts parse their command line before torch is imported, once."""

import ctypes
import gc
import os
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core import gpus
from fp8_suite.core.packages import ROOT
from fp8_suite.te_models.kernels import flash_attention_cache
from fp8_suite.te_models.kernels.flash_attention_cache import Variant
from fp8_suite.training import launch
from fp8_suite.training.config import parse_config
from fp8_suite.training.launch import parse_early

from fp8_suite import train_fp8


def test_settings_are_parsed_and_under_torchrun_ranks_report_errors_together(monkeypatch, tmp_path):
    (tmp_path / "settings.yaml").write_text("max_steps: 3")
    monkeypatch.delenv("RANK", raising=False)
    for words in (["--max_steps", "3"], [f"--config={tmp_path}/settings.yaml"]):
        monkeypatch.setattr(sys, "argv", ["train_fp8.py", *words])
        assert parse_early("description").optim.max_steps == 3
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", "--max_step", "3"])
    assert parse_early("description") is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch_size 0", "--batch_size 0: must be at least 1"),
        ("--model_name ./none", "--model_name ./none: there is no such folder"),
        ("--model_name tiny-lama", "--model_name tiny-lama: there is no such preset or folder; did you mean"),
        ("--init pretrained", "--model_name tiny-llama: this preset has no weights"),
        ("--global_batch_size 7 --batch_size 2", "cannot be shared by 1 rank; use 8 sequences"),
        ("--grad_reduce_dtype fp8", "--grad_reduce_dtype fp8: one device exchanges no gradients"),
        ("--tokenizer_name /none", "--tokenizer_name /none: there is no such folder"),
        ("--dataset_name none.csv", "--dataset_name none.csv: no such file"),
        ("--dataset_name README.md", "--dataset_name README.md: not a data file"),
        ("--deepspeed_config none.json --sharding_mode deepspeed", "no such file; ds_configs/ has"),
        ("--deepspeed_config README.md --sharding_mode deepspeed", "not valid JSON"),
    ],
)
def test_wrong_inputs_are_refused_at_once(flags, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", *flags.split()])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        parse_early("description")
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_few_frames_lie_between_the_command_and_backward(monkeypatch, tmp_path):
    """A traceback, or a reader, passes them all."""
    files = []

    def backward(self):
        assert gc.isenabled(), "collection was disabled while libraries were loading"
        files.extend(frame.filename for frame in traceback.extract_stack())
        raise ArithmeticError

    flags = "--max_steps 1 --num_of_samples 20 --max_seq_length 128 --num_proc 1 --num_workers 0"
    monkeypatch.setattr(sys, "argv", ["train_fp8.py", *flags.split(), "--output_dir", str(tmp_path / "run")])
    monkeypatch.setattr("fp8_suite.training.outcome.exit_process", pytest.fail)
    monkeypatch.setattr(torch.Tensor, "backward", backward)
    with pytest.raises(ArithmeticError):
        train_fp8.main()
    in_clone = [Path(file).relative_to(ROOT).parts for file in files if Path(file).is_relative_to(ROOT)]
    frames = [parts for parts in in_clone if parts[0] not in ("tests", ".venv")]
    assert frames[0] == ("fp8_suite", "train_fp8.py") and len(frames) <= 7, frames


@pytest.mark.parametrize(
    ("flags", "unused", "environment"),
    [
        ("--mixed_precision fp8", {"sklearn"}, {}),
        ("--mixed_precision fp8 --use_te", {"sklearn", "torchao"}, {"RANK": "1"}),
        ("--mixed_precision bf16", {"sklearn", "torchao"}, {}),
    ],
)
def test_a_start_imports_no_package_that_it_does_not_use(flags, unused, environment):
    pytest.importorskip("torchao")
    installed = {name for name in ("sklearn", "torchao") if find_spec(name)}
    program = f"""
import importlib, os, sys
from fp8_suite.training import launch

def start(cfg):
    print(sorted({{"sklearn", "scipy.stats", "torchao"}} & sys.modules.keys()), flush=True)
    for name in {unused & installed}:
        importlib.import_module(name)
    os._exit(0)

sys.argv = ["train_fp8.py", *{flags.split()}]
launch.launch("", start=start, started=0.0)
"""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "env": os.environ | environment}
    done = subprocess.run([sys.executable, "-c", program], **options)
    assert done.stdout == f"{sorted(installed - unused)}\n", done.stderr
    assert done.returncode == 0, done.stderr


LLAMA = "--model_name meta-llama/Llama-3.1-8B --init random"
PACKED, PADDED = (
    [Variant(32, 8, 128, packed, False, trained) for trained in (True, False)] for packed in (True, False)
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{LLAMA} --use_te", PACKED + PADDED),  # packed runs also have unpacked batches
        (f"{LLAMA} --use_te --no_packing", PADDED),
        (f"{LLAMA} --use_te --no_flash_attention", []),
        (LLAMA, PACKED[:1]),
    ],
)
def test_flash_attention_is_compiled_once_for_the_runs_layers(flags, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    cfg = parse_config(flags.split(), prog="train_fp8.py", description="")
    assert launch.kernels_to_compile(cfg) == expected
    for count, variant in enumerate(expected, start=1):
        variant.record().touch()  # as the process that has compiled them
        assert launch.kernels_to_compile(cfg) == expected[count:]
    monkeypatch.setattr(flash_attention_cache, "version", lambda package: "9.9")
    assert launch.kernels_to_compile(cfg) == expected, "another version compiles anew"


@pytest.mark.parametrize("error", [0, 100])  # CUDA_ERROR_NO_DEVICE
def test_a_gpu_is_opened_and_flash_attention_compiled_beside_the_imports(error, monkeypatch, tmp_path):
    """What fails is left to the run. The compilers see no GPU."""
    started = []

    def attribute(value, number, device):
        value._obj.value = {gpus.MAJOR: 9, gpus.MINOR: 0}[number]
        return error

    cuda = SimpleNamespace(cuDeviceGetAttribute=attribute)
    cuda.cuInit = cuda.cuDeviceGet = cuda.cuDevicePrimaryCtxRetain = lambda *_: error
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append((command, env)))
    monkeypatch.setattr(flash_attention_cache, "_compilers", [])
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    launch._work_ahead(parse_config(f"{LLAMA} --use_te".split(), prog="train_fp8.py", description=""))
    assert len(started) == (0 if error else 4)
    for (_, _, module, _), environment in started:
        assert module == flash_attention_cache.COMPILER and environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_model_without_known_heads_is_not_compiled_ahead(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "open_gpu", lambda index: gpus.HOPPER)
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    for name in (tmp_path, "organisation/model-on-the-hub"):
        flags = f"--model_name {name} --use_te"
        launch._work_ahead(parse_config(flags.split(), prog="train_fp8.py", description=""))


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("train_fp8.py --lora_rank 4 --lora_targets nothing", "--lora_targets nothing:"),
        ("-m benchmarks.evaluate README.md --dataset_name demo", "README.md:"),
    ],
)
def test_an_error_after_the_imports_is_one_line_too(command, error):
    """With Hugging Face layers, transformers imports torchao, which logs what it cannot load."""
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.startswith(f"error: {error}") and done.stderr.count("\n") == 1

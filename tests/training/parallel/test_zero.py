"""DeepSpeed ZeRO against runs on one rank: equal steps, shared checkpoints, and DeepSpeed's settings."""

import importlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.core.packages import ROOT
from fp8_suite.training.config import Config
from fp8_suite.training.optim.settings import OptimConfig
from fp8_suite.training.parallel.settings import ShardingConfig
from fp8_suite.training.parallel.zero_settings import CONFIGS, merge_settings
from fp8_suite.training.trainer import Trainer

from tests import children
from tests.training.parallel.jobs import checkpoint, record, same_bits, saved, summary, train
from tests.training.parallel.test_multi_gpu import check_group_timeouts, same_run, spoil_two_steps

installed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not installed, reason="deepspeed is not installed")

children.preload(__name__)
if installed and sys.argv[0] == "-c":  # in the server that ranks are forked from: it takes seconds to import
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")

MODES = tuple(CONFIGS)
ZERO = "zero_optimization"
CFG = Config(optim=OptimConfig(batch_size=4, gradient_accumulation_steps=3, max_grad_norm=0.5))
TWICE = "--gradient_accumulation_steps 2 --eval_interval 3 --max_steps 5"


def small_buckets(folder: Path, stage: int, **more) -> str:
    """Return flags with several buckets for a small model, some of whose parameters stay whole."""
    zero = {"stage": stage, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000} | more
    if stage == 3:  # memory-efficient linear layers would round sums more often
        zero |= {"stage3_param_persistence_threshold": 300, "sub_group_size": 50_000}
        zero |= {"memory_efficient_linear": False}
    (folder / "zero.json").write_text(json.dumps({ZERO: zero}))
    return f"--sharding_mode deepspeed --deepspeed_config {folder / 'zero.json'}"


def spoil_and_check_buffers(folder: Path, spoiled: int, rank: int) -> None:
    """Two steps of a rank are not finite; the model's buffers stay in FP32."""
    spoil_two_steps(folder, spoiled, rank)
    if spoiled:  # of two ranks
        check_group_timeouts(rank)
    train_all = Trainer.train

    def checked(trainer):
        assert {b.dtype for b in trainer.stack.wrapped.buffers()} == {torch.float32}
        return train_all(trainer)

    Trainer.train = checked


@needs_deepspeed
@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-5), ("bf16", 3e-3)])
def test_every_stage_is_the_run_of_one_rank_also_after_skipped_steps(precision, rel, small, tmp_path):
    """They leave no gradient. With FP32 masters, BF16 weights round as BF16 autocast does."""
    flags = f"{small(num_hidden_layers=2)} {TWICE} --mixed_precision {precision}"
    patch = partial(spoil_and_check_buffers, tmp_path)
    one = train(tmp_path / "one", f"{flags} --batch_size 4", ranks=1, patch=partial(patch, 0)).folder
    stages = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}}
    if precision == "bf16":
        stages["offload"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    for name, zero in stages.items():
        job = train(tmp_path / name, f"{flags} {small_buckets(tmp_path, **zero)}", patch=partial(patch, 1))
        same_run(job.folder, one, rel=rel, norms=1e-2, skipped=(2, 4))
        assert summary(job.folder)["skipped_steps"] == 2 and "[INFO]" not in job.printed()


@needs_deepspeed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_moves_between_modes_and_ranks_bit_for_bit(precision, small, tmp_path):
    """Resume at the end of a run, without further steps."""
    flags = f"--mixed_precision {precision} --max_steps 2 --no_export --save_interval 2"
    flags += f" {small(num_hidden_layers=2)}"
    folder = train(tmp_path / "run", f"{flags} --batch_size 3 --sharding_mode fsdp_full").folder
    expected, eval_loss = saved(folder, 2), summary(folder)["eval_loss"]
    modes = [*(f"--sharding_mode {mode}" for mode in MODES), small_buckets(tmp_path, 3), ""]
    if precision == "fp32":
        modes = modes[1::2]  # stage 2, stage 3 with offload, and one rank
    for number, mode in enumerate(modes):
        ranks = 2 + number % 2 if mode else 1
        again = f"{flags} {mode} --batch_size {6 // ranks} --resume {checkpoint(folder, 2)}"
        folder = train(tmp_path / str(number), again, ranks=ranks).folder
        assert same_bits(saved(folder, 2), expected), mode
        assert summary(folder)["eval_loss"] == pytest.approx(eval_loss, rel=1e-3)
        assert record(checkpoint(folder, 2), "meta.json")["optimizer_steps"] == 2


def merge(folder: Path, **settings):
    """Merge a file with these settings; the default stage is 2."""
    path = folder / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | settings))
    return merge_settings(str(path), CFG, 2)


@needs_deepspeed
@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_of_a_mode_sets_how_to_shard_and_flags_the_rest(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = merge_settings(CONFIGS[name], CFG, 2)
    assert json.loads(Path(CONFIGS[name]).read_text()) == {ZERO: settings[ZERO]}
    assert settings["train_batch_size"] == 24 and settings["communication_data_type"] == "fp32"
    low = replace(CFG, sharding=ShardingConfig(grad_reduce_dtype="bf16"))
    assert merge_settings(CONFIGS[name], low, 2)["communication_data_type"] == "bf16"


@needs_deepspeed
def test_values_that_agree_with_the_flags_are_accepted(tmp_path):
    zero = {"stage": 3, "overlap_comm": True}
    agreeing = {"train_batch_size": "auto", "gradient_accumulation_steps": 3, "bf16": {"enabled": "auto"}}
    off = {"fp16": {"enabled": "auto", "loss_scale": 0}, "tensorboard": {"enabled": False}}
    more = {ZERO: zero | {"reduce_bucket_size": "auto"}, "wall_clock_breakdown": True}
    settings = merge(tmp_path, **agreeing, **off, **more)
    assert settings[ZERO] == zero and settings["wall_clock_breakdown"] and settings["bf16"]["enabled"]
    assert not settings.keys() & {"fp16", "tensorboard", "optimizer", "scheduler"}


@needs_deepspeed
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu"),
        ({"bf16": {"enabled": False}}, "bf16"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer"),
        ({"gradient_cliping": 1.0}, "gradient_clipping"),  # what was meant
        ({ZERO: None}, f"{ZERO}.stage"),
        ({ZERO: {"stage": "auto"}}, f"{ZERO}.stage"),
        ({ZERO: {"stage": 2, "overlap_com": True}}, f"{ZERO}.overlap_com"),
        ({ZERO: {"stage": 2, "compute_grad_norm": False}}, f"{ZERO}.compute_grad_norm"),
        ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, f"{ZERO}.offload_param"),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, f"{ZERO}.offload_optimizer"),
    ],
)
def test_a_file_with_wrong_or_contradicting_settings_is_refused(settings, key, tmp_path):
    with pytest.raises(UserError) as refused:
        merge(tmp_path, **settings)
    assert refused.value.flags == {"deepspeed_config"} and key in str(refused.value)


def test_without_deepspeed_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"--sharding_mode.*pip install deepspeed=="):
        merge_settings(CONFIGS["ds_zero2"], CFG, 2)

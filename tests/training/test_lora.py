"""Runs that train adapters: sharding, resume bit for bit, checkpoints without the base."""

import shutil
from pathlib import Path

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING
from fp8_suite.te_models.spec import find_model, weight_source
from safetensors.torch import load_file, save_file

from tests.children import preload
from tests.training.parallel.jobs import curve, record, same_bits, saved
from tests.training.parallel.jobs import train as train_on_ranks
from tests.training.test_run import train

preload(__name__)

LORA = "--lora_rank 4 --no_export --max_steps 8 --learning_rate 1e-2"
TE = "--use_te --te_backend emulated"
FP8 = "--mixed_precision fp8"


SHARDED = (
    f"{LORA} --save_interval 2 --gradient_accumulation_steps 2 --max_steps 4 --lora_targets q_proj,v_proj,mlp"
)
LAYERS = {"te": f"{TE} --mixed_precision bf16", "hf": "--recompute layer"}


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory) -> dict[str, Path]:
    """Four steps on one device with the global batch of two ranks."""
    folder = tmp_path_factory.mktemp("one")
    return {name: train(folder / name, f"{SHARDED} {flags} --batch_size 4") for name, flags in LAYERS.items()}


@pytest.mark.parametrize(
    ("layers", "mode"),
    [
        ("te", "ddp"),
        ("te", "fsdp_full"),
        ("te", "fsdp_grad"),
        ("te", "hsdp"),
        ("hf", "fsdp_full"),
    ],
)
def test_the_sharding_mode_does_not_change_the_run(layers, mode, on_one_device, tmp_path):
    sharding = f"--sharding_mode {mode} --batch_size 2"
    if mode == "hsdp":
        sharding = f"--sharding_mode {mode} --hsdp_shard_size 2 --batch_size 1"
    folder, ranks = tmp_path / "run", 4 if mode == "hsdp" else 2
    train_on_ranks(folder, f"{SHARDED} {LAYERS[layers]} {sharding}", ranks=ranks)
    one, rel = on_one_device[layers], {"te": 2e-3, "hf": 1e-5}[layers]
    for name, tolerance in {"train/loss": rel, "train/grad_norm": 5 * rel, "eval/loss": rel}.items():
        assert curve(folder, name) == pytest.approx(curve(one, name), rel=tolerance)
    if (layers, mode) == ("te", "fsdp_full"):
        point = f"--batch_size 4 --resume {folder}/checkpoints/step_000002"
        resumed = train(tmp_path / "resumed", f"{SHARDED} {LAYERS[layers]} {point}")
        assert curve(resumed) == pytest.approx({at: x for at, x in curve(one).items() if at > 2}, rel=rel)
    state = saved(folder, 4)
    assert state.keys() == saved(one, 4).keys() and all(".lora_" in name for name in state)


@pytest.mark.parametrize(
    "layers",
    [f"{TE} {FP8} --fp8_scenario delayed", f"{TE} {FP8} --fp8_scenario block --recompute mlp", FP8, ""],
)
def test_a_run_resumes_bit_for_bit(layers, tmp_path):
    statistics = "--fp8_stats_interval 3 --no_compile" if FP8 in layers else ""
    flags = f"{LORA} {layers} --lora_dropout 0.1 --save_interval 4 {statistics}"
    whole = train(tmp_path / "whole", flags)
    resumed = train(tmp_path / "resumed", f"{flags} --resume {whole}/checkpoints/step_000004")
    losses = curve(whole)
    assert curve(resumed) == {step: loss for step, loss in losses.items() if step > 4}
    assert losses[8] < losses[1] - 0.1 and same_bits(saved(whole, 8), saved(resumed, 8))
    gemms = ("layers.0.layernorm_mlp.fc2", "model.model.layers.0.mlp.down_proj")
    assert bool(statistics) == any(curve(whole, f"fp8/{gemm}/activation/amax") for gemm in gemms)
    assert record(resumed, "summary.json")["eval_loss"] == record(whole, "summary.json")["eval_loss"]


def test_a_checkpoint_is_refused_over_other_weights(tmp_path, capsys):
    spec = find_model("tiny-llama", init="random", use_te=True)
    source = weight_source(spec, seed=0, device=torch.device("cpu"))
    weights = {name: source.get(name).contiguous() for name in source.shapes()}
    model = tmp_path / "model"
    model.mkdir()
    spec.config.save_pretrained(model)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    flags = f"{LORA} --model_name {model} --tokenizer_name demo"
    folder = train(tmp_path / "run", f"{flags} --max_steps 2")
    assert not any("embed" in key for key in saved(folder, 2))
    before = curve(folder)
    train(folder, f"{flags} --max_steps 3")
    assert {step: loss for step, loss in curve(folder).items() if step < 3} == before
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(
        load_file(model / "model.safetensors") | {name: weights[name] * 2},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    capsys.readouterr()
    train(folder, f"{flags} --max_steps 4", code=EXIT_BAD_SETTING)
    assert "other weights" in capsys.readouterr().err and sorted(curve(folder)) == [1, 2, 3]
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--lora_dropout 0.1", "--lora_rank"),
        (f"{LORA} --lora_targets query", "q_proj"),
        (f"{LORA} --sharding_mode ds_zero2", "ddp"),
        (f"{LORA} --offload_optimizer", "little"),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, word, tmp_path, capsys):
    train(tmp_path / "run", flags, code=EXIT_BAD_SETTING)
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1 and not (tmp_path / "run").exists()

"""Runs that train adapters: sharding, resume bit for bit, checkpoints without the base."""

import shutil
from pathlib import Path

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING
from fp8_suite.te_models.spec import find_model, weight_source
from safetensors.torch import load_file, save_file

from tests.children import preload
from tests.training.parallel.jobs import curve, record, rest, same_bits, saved
from tests.training.parallel.jobs import train as train_on_ranks
from tests.training.test_run import train

preload(__name__)

LORA = "--lora_rank 4 --no_export --max_steps 6 --learning_rate 1e-2"
TE = "--use_te --te_backend emulated"
FP8 = "--mixed_precision fp8"


SHARDED = f"{LORA} {TE} --mixed_precision bf16 --lora_targets q_proj,v_proj,mlp"
SHARDED += " --save_interval 2 --gradient_accumulation_steps 2 --max_steps 4"


@pytest.fixture(scope="module")
def sharded(small) -> str:
    return f"{SHARDED} {small(num_hidden_layers=2)}"


@pytest.fixture(scope="module")
def on_one_device(sharded, tmp_path_factory) -> Path:
    """Four steps on one device with the global batch of two ranks."""
    return train(tmp_path_factory.mktemp("one") / "run", f"{sharded} --batch_size 4")


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        ("ddp --batch_size 2", 2),
        ("fsdp_full --batch_size 2", 2),
        ("hsdp --hsdp_shard_size 2 --batch_size 1", 4),
    ],
)
def test_the_sharding_mode_does_not_change_the_run(sharding, ranks, sharded, on_one_device, tmp_path):
    one, folder = on_one_device, tmp_path / "run"
    train_on_ranks(folder, f"{sharded} --sharding_mode {sharding}", ranks=ranks)
    for name, tolerance in {"train/loss": 2e-3, "train/grad_norm": 1e-2, "eval/loss": 2e-3}.items():
        assert curve(folder, name) == pytest.approx(curve(one, name), rel=tolerance)
    if "fsdp_full" in sharding:
        point = f"--batch_size 4 --resume {folder}/checkpoints/step_000002"
        resumed = train(tmp_path / "resumed", f"{sharded} {point}")
        assert curve(resumed) == pytest.approx(rest(one, 2), rel=2e-3)
    state = saved(folder, 4)
    assert state.keys() == saved(one, 4).keys() and all(".lora_" in name for name in state)


@pytest.mark.parametrize(
    "layers",
    [f"{TE} {FP8} --fp8_scenario delayed", f"{TE} {FP8} --fp8_scenario block --recompute mlp", FP8],
)
def test_a_run_resumes_bit_for_bit(layers, small, tmp_path):
    flags = (
        f"{LORA} {layers} {small()} --lora_dropout 0.1 --save_interval 3 --fp8_stats_interval 3 --no_compile"
    )
    whole = train(tmp_path / "whole", flags)
    resumed = train(tmp_path / "resumed", f"{flags} --resume {whole}/checkpoints/step_000003")
    losses = curve(whole)
    assert curve(resumed) == rest(whole, 3)
    assert losses[6] < losses[1] - 0.1 and same_bits(saved(whole, 6), saved(resumed, 6))
    gemms = ("layers.0.layernorm_mlp.fc2", "model.model.layers.0.mlp.down_proj")
    assert any(curve(whole, f"fp8/{gemm}/activation/amax") for gemm in gemms)
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

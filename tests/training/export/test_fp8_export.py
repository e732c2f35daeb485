"""FP8 exports of whole runs: the weights that training multiplied, and the loss that the files give."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.data.build import build_loaders
from fp8_suite.data.order import BatchShape
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.te_models.emulation.recipes import Float8BlockScaling
from fp8_suite.te_models.quantized.reader import SQUARE, dequantize
from fp8_suite.te_models.weights import layer_to_hf
from fp8_suite.training.config import parse_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.parallel.jobs import SMALL, summary
from tests.training.test_run import train

pytest.importorskip("accelerate")
torch.set_num_threads(1)

BLOCK = "--use_te --te_backend emulated --mixed_precision fp8 --fp8_scenario block"
FLAGS = "--max_steps 2 --eval_interval 0 --no_save_checkpoints --no_packing --export_dtype"


def loss_in_transformers(folder: Path, flags: str) -> float:
    """Return the loss by plain transformers, row by row."""
    cfg = parse_config(shlex.split(f"{SMALL} {flags}"), prog="test", description="test")
    tokenizer, shape = load_tokenizer("demo", family="llama"), BatchShape(batch_size=1, eval_batch_size=1)
    loaders = build_loaders(
        cfg.data, tokenizer, shape, seed=cfg.optim.seed, vocab_size=2048, max_positions=None
    )
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(keys for key, keys in info.items() if key.endswith("keys"))
    total, count = 0.0, 0
    for batch in loaders.eval:
        labels = batch.inputs["labels"][0]
        with torch.no_grad():
            logits = model(batch.inputs["input_ids"]).logits[0]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        count += batch.label_tokens
    return total / count


@pytest.mark.parametrize("layers", [BLOCK, "--mixed_precision bf16"])
def test_losses_in_the_summary_are_those_of_the_files(layers, small, tmp_path, capsys):
    run = train(tmp_path / "run", f"{small()} {FLAGS} both {layers}")
    values, printed = summary(run), capsys.readouterr().out
    for dtype, name in {"bf16": "export", "fp8": "export_fp8"}.items():
        loss = values[f"export_loss_{dtype}"]
        assert loss == pytest.approx(loss_in_transformers(run / name, FLAGS + " bf16"), rel=1e-5)
        assert loss == pytest.approx(values["eval_loss"], rel=0.01)
        assert f"{name}: eval loss {loss:.4f}" in printed
    assert values["export_loss_bf16"] != values["export_loss_fp8"]


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_the_final_weights_are_also_evaluated_in_bf16(recipe, small, tmp_path):
    fp8, rows = BLOCK.replace("block", recipe), "--eval_split test"
    values = summary(train(tmp_path / "run", f"{small()} {FLAGS} both {fp8} {rows}"))
    bf16 = f"--use_te --te_backend emulated --mixed_precision bf16 --model_name {tmp_path / 'run/export'}"
    flags = f"{FLAGS} bf16 {bf16} {rows} --init pretrained --max_steps 0"
    again = summary(train(tmp_path / "bf16", flags))["eval_loss"]
    assert values["eval_loss_bf16"] == pytest.approx(again, rel=5e-5)  # norms of the run are in FP32
    assert abs(values["eval_loss_bf16"] - again) < abs(values["eval_loss"] - again)


@pytest.mark.parametrize(
    "flags", [f"fp8 {BLOCK} --fp8_lm_head", "bf16 " + BLOCK, "fp8 --mixed_precision bf16"]
)
def test_no_bf16_loss_of_a_model_with_fixed_fp8_parts_or_none(flags, small, tmp_path):
    assert "eval_loss_bf16" not in summary(train(tmp_path / "run", f"{small()} {FLAGS} {flags}"))


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_exported_weights_are_the_operands_of_training(name, tmp_path, monkeypatch):
    operands, quantize = [], Float8BlockScaling.quantize

    def recorded(self, x, kind, *rest):
        operand = quantize(self, x, kind, *rest)
        if kind == "weight":
            operands.append(operand(1))
        return operand

    monkeypatch.setattr(Float8BlockScaling, "quantize", recorded)
    run = train(tmp_path / "run", f"{FLAGS} fp8 {BLOCK} --model_name {name}")
    stored, config = (
        load_file(run / "export_fp8/model.safetensors"),
        AutoConfig.from_pretrained(run / "export_fp8"),
    )
    gemms = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    tolerance = 2.0**-16  # another power of two changes only subnormal values
    last = iter(operands[-4 * config.num_hidden_layers :])  # of the final evaluation's last batch
    for number in range(config.num_hidden_layers):
        layer = {f"{gemm}{'_' if 'fc' in gemm else '.'}weight": next(last) for gemm in gemms}
        for form in ("bytes", "values"):
            te = {
                k: q.data.view(torch.uint8) if form == "bytes" else q.dequantize() for k, q in layer.items()
            }
            norms = ("self_attention.layernorm_qkv.layer_norm_weight", "layernorm_mlp.layer_norm_weight")
            te |= dict.fromkeys(
                [*norms, *(f"self_attention.{p}_norm.weight" for p in "qk" if "3" in name)], None
            )
            for key, expected in layer_to_hf(te, config).items():
                key = f"model.layers.{number}.{key}"
                if expected is None:
                    continue
                values, scales = stored[key], stored[key.replace("weight", "weight_scale_inv")]
                # With heads of 64, a block of TE's fused weight has rows of two projections and one scale.
                mixed = config.head_dim < 128 and re.search("[qkv]_proj", key)
                if form == "bytes" and not mixed:
                    assert torch.equal(values.view(torch.uint8), expected)
                elif form == "values":
                    difference = (dequantize(values, scales, SQUARE) - expected).abs()
                    assert difference.max() <= (expected.abs().max() * tolerance if mixed else 0)


def test_modules_that_trained_in_bf16_stay_in_bf16(small, tmp_path):
    run = train(
        tmp_path / "run", f"{small()} {FLAGS} fp8 {BLOCK} --precision_map layers.1.self_attention=bf16"
    )
    stored = load_file(run / "export_fp8/model.safetensors")
    kept = {k for k, t in stored.items() if ".layers." in k and t.ndim == 2 and t.dtype == torch.bfloat16}
    assert kept == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"}
    listed = AutoConfig.from_pretrained(run / "export_fp8").quantization_config["modules_to_not_convert"]
    assert {name.removesuffix(".weight") for name in kept} < {*listed}


def test_a_finished_run_exports_and_evaluates_only_what_is_missing(small, tmp_path, capsys):
    flags = f"{small()} {FLAGS}".replace("--no_save_checkpoints ", "")
    run = train(tmp_path / "run", f"{flags} bf16")
    assert "export_loss_bf16" not in summary(run)
    train(run, f"{flags} both")
    assert "export_loss_fp8" in summary(run)
    capsys.readouterr()
    train(run, f"{flags} both")
    assert "eval loss" not in capsys.readouterr().out
    tensors = load_file(run / "export_fp8/model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, run / "export_fp8/model.safetensors", {"format": "pt"})
    values = {key: value for key, value in summary(run).items() if not key.startswith("export_loss")}
    (run / "summary.json").write_text(json.dumps(values))
    train(run, f"{flags} both", code=1)
    assert "export_fp8: transformers cannot load it" in capsys.readouterr().err
    shutil.rmtree(run / "export_fp8")
    train(run, f"{flags} both")
    assert "export_loss_fp8" in summary(run)


def test_what_cannot_be_exported_in_fp8_is_refused_before_training(tmp_path, capsys):
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=2048
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    for flags in (
        "fp4",
        f"fp8 --model_name {tmp_path / 'small'} --init pretrained --tokenizer_name demo",
    ):
        train(tmp_path / "run", f"{FLAGS} {flags}", code=2)
        assert "--export_dtype" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

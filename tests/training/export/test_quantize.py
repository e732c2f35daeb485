"""FP8 exports load in transformers with the values that were written, complete or not at all."""

import json

import pytest
import torch
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS
from fp8_suite.te_models.quantized.forms import FORMS, Quantizer
from fp8_suite.te_models.quantized.reader import ROW, SQUARE, dequantize
from fp8_suite.training.export import write
from fp8_suite.training.export.quantize import main
from fp8_suite.training.export.write import export_hf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.full_disk import disk_that_takes

pytest.importorskip("accelerate")  # transformers reads no FP8 weights without it
torch.set_num_threads(1)


def build(name="tiny-llama", **changes):
    torch.manual_seed(0)
    fields = PRESETS.get(name, {}) | changes
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def export_of(folder, model, **options):
    tied = model.config.tie_word_embeddings
    pairs = [(n, t) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")]
    return export_hf(folder, iter(pairs), config=model.config, **options)


def tensors_of(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def dequantized(folder, form):
    stored, scale_name = tensors_of(folder), FORMS[form].scale_name
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(scale_name)}
    for name, scale in scales.items():
        weight = f"{name.removesuffix(scale_name)}weight"
        stored[weight] = dequantize(stored[weight], scale, SQUARE if form == "block" else ROW)
    return stored


def load(folder, **options):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(keys for key, keys in info.items() if key.endswith("keys"))
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(LOCAL_PRESETS))
def test_transformers_reads_the_values_that_were_written(name, form, tmp_path, monkeypatch, capsys):
    if form == "channel":
        pytest.importorskip("compressed_tensors")
    source = export_of(tmp_path / "export", build(name))
    (source / "chat_template.jinja").write_text("template")
    monkeypatch.setattr(write, "MAX_SHARD_BYTES", 500_000)
    assert main([str(source), str(tmp_path / "fp8"), "--form", form]) == 0
    assert "21 linear weights are in FP8" in capsys.readouterr().out
    assert len(list((tmp_path / "fp8").glob("model-*.safetensors"))) > 2
    assert {path.name for path in source.iterdir() if path.suffix != ".safetensors"} < {
        path.name for path in (tmp_path / "fp8").iterdir()
    }
    expected, model = dequantized(tmp_path / "fp8", form), load(tmp_path / "fp8")
    with torch.no_grad():
        model(torch.arange(32)[None])  # compressed weights are decompressed by the first forward
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], values.float()) for key, values in expected.items())
    original = tensors_of(source)
    for key, values in expected.items():
        fp8 = ".layers." in key and values.ndim == 2
        assert torch.equal(values, original[key]) != fp8
        assert (values.float() - original[key].float()).abs().max() <= original[key].abs().max() / 16


def test_an_export_in_fp8_is_the_quantized_bf16_export(tmp_path):
    model = build()
    main([str(export_of(tmp_path / "export", model)), str(tmp_path / "theirs")])
    quantizer = Quantizer(FORMS["block"])
    export_of(tmp_path / "ours", model, quantizer=quantizer)
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k].float(), theirs[k].float()) for k in ours)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["quantization_config"]["weight_block_size"] == [128, 128]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_in_fp8_is_quantized_again_to_the_same_values(form, tmp_path):
    source = export_of(tmp_path / "export", build())
    for origin, folder in ((source, "first"), (tmp_path / "first", "second")):
        (origin / "hf_quant_config.json").write_text("{}")
        assert main([str(origin), str(tmp_path / folder), "--form", form]) == 0
        assert not (tmp_path / folder / "hf_quant_config.json").exists(), "it describes the source"
    first, second = (dequantized(tmp_path / folder, form) for folder in ("first", "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("source_form", ["bf16", "channel"])
def test_weights_whose_sizes_do_not_fit_are_in_bf16(source_form, tmp_path, capsys):
    source = export_of(tmp_path / "export", build(intermediate_size=192))
    if source_form == "channel":
        assert main([str(source), str(tmp_path / "channel"), "--form", "channel"]) == 0
        source = tmp_path / "channel"
    assert main([str(source), str(tmp_path / "fp8")]) == 0
    assert "12 linear weights are in FP8" in capsys.readouterr().out
    assert not (tmp_path / "fp8.json").exists()
    assert {t.dtype for n, t in tensors_of(tmp_path / "fp8").items() if "mlp" in n} == {torch.bfloat16}
    kept = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.down_proj" in kept["modules_to_not_convert"]
    load(tmp_path / "fp8")


def build_experts(size=128):
    sizes = {"hidden_size": 128, "moe_intermediate_size": size, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return build("", model_type="qwen3_moe", head_dim=128, tie_word_embeddings=False, **sizes)


def test_experts_are_in_fp8_and_their_router_is_not(tmp_path):
    model = build_experts()
    assert main([str(export_of(tmp_path / "export", model)), str(tmp_path / "fp8")]) == 0
    stored = tensors_of(tmp_path / "fp8")
    assert stored["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    load(tmp_path / "fp8")


@pytest.mark.parametrize("size", [128, 64])
def test_updates_below_the_resolution_of_bf16_survive_random_rounding(size, tmp_path):
    """Of experts too, which transformers fuses in memory; those of 64 columns stay in BF16."""
    model = build_experts(size).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "expert" in name or "q_proj" in name:
            parameter.fill_(1.125 + 1 / 512)  # next values: 1.125 and 1.1328 in BF16, 1.125 and 1.25 in E4M3
    names = {n for n in tensors_of(export_of(tmp_path / "bf16", model)) if "expert" in n or "q_proj" in n}
    export_of(tmp_path / "fp8", model, quantizer=Quantizer(FORMS["block"], at_random=names))
    exported = dequantized(tmp_path / "fp8", "block")
    assert len(names) == 2 * (1 + 3 * 4)
    for name in names:
        if size == 64 and "expert" in name:
            assert exported[name].dtype == torch.bfloat16 and (exported[name] == 1.125).all()
        else:
            steps = (exported[name] - 1.125) * 8
            assert {*steps.unique().tolist()} == {0, 1}
            assert steps.mean().item() == pytest.approx(1 / 64, abs=0.005)


def test_what_cannot_be_quantized_is_refused_and_nothing_is_written(tmp_path, capsys):
    source = export_of(tmp_path / "export", build())
    weights = load_file(source / "model.safetensors")
    bad = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {bad: weights[bad] / 0}, source / "model.safetensors", {"format": "pt"})
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([str(source), str(tmp_path / "fp8")]) == 1
    assert f"{bad} has infinite or NaN values" in capsys.readouterr().err
    assert main([str(source), str(source)]) == 2, "the source is not replaced"
    assert main([str(tmp_path / "nothing"), str(tmp_path / "fp8")]) == 2
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    changed = config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    (source / "config.json").write_text(json.dumps(changed))
    assert main([str(source), str(tmp_path / "fp8")]) == 2
    (source / "config.json").write_text(json.dumps(config))
    with disk_that_takes(100_000):
        assert main([str(source), str(tmp_path / "fp8")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before

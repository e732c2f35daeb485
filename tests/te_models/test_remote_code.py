"""Models that bring their own Python code, in every place that builds one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from te_models import build as te_models
from te_models.build import ModelPlan, build_model, count_parameters, plan_model
from te_models.options import BuildOptions
from training.checkpoint.export import export_hf
from training.checkpoint.generate import answer, generation_config

CPU = torch.device("cpu")
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
OPTIONS = BuildOptions(te_backend=None, dtype=torch.float32, device=CPU, packed=False, max_positions=64)
TINY = {
    **{"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


@pytest.fixture
def folder(tmp_path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "own"
    LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False)).save_pretrained(path)
    bring(path, CODE, "Own", model_type="own-llama")
    return path


def bring(path: Path, code: str, name: str, *, model_type: str) -> None:
    """Make the model in `path` one of the classes <name>Config and <name>ForCausalLM of `code`."""
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": model_type, "architectures": [f"{name}ForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": f"own_code.{name}Config",
        "AutoModelForCausalLM": f"own_code.{name}ForCausalLM",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "own_code.py").write_text(code)


def test_it_needs_the_flag(folder):
    with pytest.raises(ValueError, match="add --trust_remote_code"):
        plan_model(str(folder), init="auto", use_te=False)


@pytest.mark.parametrize("shard", [None, lambda model: None], ids=["whole", "sharded"])
def test_it_is_built_counted_exported_and_answers(folder, tmp_path, shard):
    plan = plan_model(str(folder), init="auto", use_te=False, trust_remote_code=True)
    options = {"dtype": torch.float32, "device": CPU, "seed": 0, "packed": False, "max_positions": 64}
    model = build_model(plan, BuildOptions(te_backend=None, shard=shard, **options))
    weights = dict(te_models.export_tensors(model))
    assert count_parameters(plan) == sum(t.numel() for t in weights.values())
    tokenizer = demo_tokenizer()
    out = export_hf(
        tmp_path / "export",
        weights.items(),
        config=plan.config,
        tokenizer=tokenizer,
        generation_config=generation_config(plan, tokenizer, turn_end=None, own_tokenizer=True),
        dtype=torch.float32,
        trust_remote_code=True,
        code_folder=plan.weights,
    )
    (folder / "own_code.py").unlink()  # the export stands on its own
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert "ANSWER" in answer(out, [("one", "two")], CPU, trust_remote_code=True)


def demo_tokenizer():
    from transformers import AutoTokenizer

    from data.demo import TOKENIZER_DIR

    return AutoTokenizer.from_pretrained(TOKENIZER_DIR)


def test_quantized_weights_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"are quantized \(quant_method fp8\).*made from"):
        plan_model(str(folder), init="auto", use_te=False, trust_remote_code=True)


def test_only_files_that_hold_the_parameters_and_nothing_else_are_read_slice_by_slice(tmp_path):
    from safetensors.torch import load_file, save_file

    config = LlamaConfig(**TINY, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    plan, file = ModelPlan("m", config, tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert te_models._streamed_source(plan, OPTIONS) is not None
    for extra, streamed in (("model.rotary_emb.inv_freq", True), ("model.layers.0.scale", False)):
        save_file(tensors | {extra: torch.ones(2)}, file, metadata={"format": "pt"})
        assert (te_models._streamed_source(plan, OPTIONS) is not None) == streamed


CAPPED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class CappedConfig(LlamaConfig):
    model_type = "llama"


class CappedForCausalLM(LlamaForCausalLM):
    config_class = CappedConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output
"""


def test_own_code_under_a_known_model_type_is_what_runs(folder):
    bring(folder, CAPPED, "Capped", model_type="llama")
    with pytest.raises(ValueError, match=r"--use_te .* drop --use_te or --trust_remote_code"):
        plan_model(str(folder), init="auto", use_te=True, trust_remote_code=True)
    plan = plan_model(str(folder), init="auto", use_te=False, trust_remote_code=True)
    options = {"dtype": torch.float32, "device": CPU, "seed": 0, "packed": False, "max_positions": 64}
    model = build_model(plan, BuildOptions(te_backend=None, **options))
    with torch.no_grad():
        model.model.get_output_embeddings().weight.mul_(100)  # so that the cap is felt
    ids = torch.arange(3, 19)[None]
    labels = ids.roll(-1, 1)
    loss = model(ids, labels).loss
    own = torch.nn.functional.cross_entropy(model.model(input_ids=ids).logits[0], labels[0], reduction="sum")
    torch.testing.assert_close(loss, own)

"""Models with Python code in their repository, and weights that can be loaded in shards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.errors import UserError
from fp8_suite.data.demo import TOKENIZER_DIR
from fp8_suite.te_models.build import _streamed_source, build_model, export_tensors
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import ModelSpec, count_parameters, find_model, on_meta
from fp8_suite.training.export.generate import generate_answers, generation_config
from fp8_suite.training.export.write import export_hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.te_models import test_packing

CPU = torch.device("cpu")
OPTIONS = BuildOptions(te_backend=None, dtype=torch.float32, device=CPU, packed=False, max_positions=64)
CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "{model_type}"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output
"""
TINY = test_packing.TINY | {"vocab_size": 2048, "num_hidden_layers": 1, "tie_word_embeddings": False}


def save_model(path: Path, *, model_type: str) -> str:
    """Save a Llama with this model type whose own Python class caps logits."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(path)
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    change_config(path, model_type=model_type, architectures=["OwnForCausalLM"], auto_map=auto_map)
    (path / "own_code.py").write_text(CODE.format(model_type=model_type))
    return str(path)


def change_config(path: Path, **fields) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.fixture
def folder(tmp_path) -> str:
    return save_model(tmp_path / "own", model_type="own-llama")


@pytest.mark.parametrize("shard", [None, lambda model: None], ids=["full", "sharded"])
def test_model_with_own_code_is_built_counted_exported_and_generates(folder, tmp_path, shard):
    with pytest.raises(UserError, match=f"--model_name {folder}: .*add --trust_remote_code"):
        find_model(folder, init="auto", use_te=False)
    spec = find_model(folder, init="auto", use_te=False, trust_remote_code=True)
    weights = dict(export_tensors(build_model(spec, replace(OPTIONS, shard=shard))))
    assert count_parameters(spec) == sum(t.numel() for t in weights.values())
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER_DIR)
    out = export_hf(
        tmp_path / "export",
        weights.items(),
        config=spec.config,
        tokenizer=tokenizer,
        generation_config=generation_config(spec, tokenizer, turn_end=None, own_tokenizer=True),
        trust_remote_code=True,
        code_folder=spec.weights,
    )
    Path(folder, "own_code.py").unlink()  # the export must not need it
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[name].bfloat16())
    assert "ANSWER" in generate_answers(out, [("one", "two")], tokenizer, CPU, trust_remote_code=True)


def test_own_code_under_a_known_model_type_computes_the_loss(tmp_path):
    folder = save_model(tmp_path, model_type="llama")
    with pytest.raises(UserError, match=r"--use_te .* drop --use_te or --trust_remote_code"):
        find_model(folder, init="auto", use_te=True, trust_remote_code=True)
    model = build_model(find_model(folder, init="auto", use_te=False, trust_remote_code=True), OPTIONS)
    with torch.no_grad():
        model.model.get_output_embeddings().weight.mul_(100)  # the cap must matter
    ids = torch.arange(3, 19)[None]
    labels = ids.roll(-1, 1)
    capped = F.cross_entropy(model.model(input_ids=ids).logits[0], labels[0], reduction="sum")
    torch.testing.assert_close(model(ids, labels).loss, capped)


@pytest.mark.parametrize(
    ("extra", "streamed"), [("model.rotary_emb.inv_freq", True), ("model.layers.0.scale", False)]
)
def test_weights_are_streamed_only_if_files_contain_exactly_the_parameters(extra, streamed, tmp_path):
    config = LlamaConfig(**TINY)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    spec, file = ModelSpec("m", config, tmp_path), tmp_path / "model.safetensors"
    assert _streamed_source(spec, OPTIONS, on_meta(spec)) is not None
    save_file(load_file(file) | {extra: torch.ones(2)}, file, metadata={"format": "pt"})
    assert (_streamed_source(spec, OPTIONS, on_meta(spec)) is not None) == streamed

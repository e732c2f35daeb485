"""Exports load in transformers as the trained model and never half replace an older export."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.te_models.spec import ModelSpec
from fp8_suite.training.export import write
from fp8_suite.training.export.generate import TOKENIZER_SAMPLE, generation_config, tokenizer_round_trips
from fp8_suite.training.export.write import check_export, export_hf
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.full_disk import disk_that_takes
from tests.te_models.test_packing import TINY

torch.set_num_threads(1)


def build(model_type: str = "llama", *, seed: int = 0, **settings):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **TINY | {"tie_word_embeddings": False} | settings)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def weights(model) -> list[tuple[str, torch.Tensor]]:
    tied = model.config.tie_word_embeddings
    return [(name, t) for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(write, "MAX_SHARD_BYTES", 6000)
    return monkeypatch


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo", family="llama")


# The exported model


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_experts_are_stored_one_by_one_as_on_the_hub(tmp_path, model_type, small_shards):
    """Other programs read them so, though transformers fuses them in memory."""
    sizes = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
    source = build(model_type, **sizes, shared_expert_intermediate_size=16).bfloat16()
    source.save_pretrained(tmp_path / "theirs")
    export_hf(tmp_path / "ours", source.state_dict().items(), config=source.config)
    saved = load_file(tmp_path / "theirs/model.safetensors")
    exported = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        exported |= load_file(path)
    assert exported.keys() == saved.keys() and any(".experts.3." in name for name in exported)
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def test_ties_are_found_in_a_part_of_a_composite_config(tmp_path):
    text = TINY | {"tie_word_embeddings": True, "head_dim": 8, "num_hidden_layers": 4}
    text |= {f"linear_{kind}": 2 for kind in ("num_key_heads", "num_value_heads")}
    text |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    config.tie_word_embeddings = False
    source = AutoModelForCausalLM.from_config(config)
    assert source.lm_head.weight is source.get_input_embeddings().weight
    folder = export_hf(tmp_path / "export", source.named_parameters(), config=config)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, source.lm_head.weight.bfloat16())


DEEPSEEK = {
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    **{"num_experts_per_tok": 2, "num_key_value_heads": 4, "moe_intermediate_size": 16},
}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("model_type", "experts", "is_buffer"), [("deepseek_v3", DEEPSEEK, True), ("ernie4_5_moe", ERNIE, False)]
)
def test_biases_that_choose_experts_stay_in_fp32(tmp_path, monkeypatch, model_type, experts, is_buffer):
    source = build(model_type, **experts)
    if is_buffer:  # then it is exact without being on transformers' list
        monkeypatch.setattr(type(source).__bases__[0], "_keep_in_fp32_modules_strict", None)
    suffix, exact = "e_score_correction_bias", 1 + torch.arange(4) / 4096  # equal in BF16
    biases = [tensor for name, tensor in source.state_dict().items() if name.endswith(suffix)]
    for bias in biases:
        bias.copy_(exact)
    folder = export_hf(tmp_path / "export", source.state_dict().items(), config=source.config)
    saved = load_file(folder / "model.safetensors")
    assert saved["lm_head.weight"].dtype == torch.bfloat16
    exported = [tensor for name, tensor in saved.items() if name.endswith(suffix)]
    assert len(exported) == len(biases) > 0 and all(torch.equal(bias.flatten(), exact) for bias in exported)


def test_shards_are_indexed_and_filled_as_hugging_face_does(tmp_path, small_shards):
    source = build()
    folder = export_hf(tmp_path / "export", weights(source), config=source.config)
    shards = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    sizes = [[tensor.nbytes for tensor in tensors.values()] for tensors in shards.values()]
    assert index["metadata"]["total_size"] == sum(map(sum, sizes)) and len(sizes) > 3
    assert all(len(size) == 1 or sum(size) <= 6000 for size in sizes), "no shard is too large"
    assert all(sum(a) + sum(b) > 6000 for a, b in pairwise(sizes)), "and none smaller than necessary"


# Settings beside the weights


def test_config_generation_settings_and_tokenizer_are_exported(tmp_path, tokenizer):
    source = build()
    source.config.architectures = ["TEDecoder"]
    generation = GenerationConfig(eos_token_id=[2, 3])
    settings = {"config": source.config, "tokenizer": tokenizer, "generation_config": generation}
    folder = export_hf(tmp_path / "export", weights(source), **settings)
    assert source.config.dtype != torch.bfloat16, "the caller's config is unchanged"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded("one two").input_ids == tokenizer("one two").input_ids
    assert loaded.chat_template == tokenizer.chat_template and loaded.chat_template
    plain = export_hf(tmp_path / "plain", weights(source), config=source.config)
    assert json.loads((plain / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(("is_own", "source_ends"), [(True, {1, 4}), (False, set())])
def test_generation_ends_at_every_end_token_of_source_tokenizer_and_template(
    is_own, source_ends, tmp_path, tokenizer
):
    """The source's ids, such as <end_of_turn>, are valid for its own tokenizer only."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    spec = ModelSpec("m", build().config, tmp_path)
    settings = generation_config(spec, tokenizer, turn_end=6, own_tokenizer=is_own)
    assert settings.eos_token_id == sorted(source_ends | {tokenizer.eos_token_id, 6})


@pytest.mark.parametrize("settings", ['{"length_penalty": 0.8}', '{"max_new_tokens": 0}', "{"])
def test_invalid_generation_settings_are_left_out_with_a_warning(settings, tmp_path, tokenizer, capsys):
    path = tmp_path / "generation_config.json"
    path.write_text(settings)
    model = build()
    spec = ModelSpec("m", model.config, tmp_path)
    generation = generation_config(spec, tokenizer, turn_end=None, own_tokenizer=True)
    export_hf(tmp_path / "export", weights(model), config=model.config, generation_config=generation)
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"WARNING: {path} is not exported")


@pytest.mark.parametrize(("family", "same"), [("llama", True), ("qwen3", True), ("qwen2", False)])
def test_export_whose_tokenizer_is_read_as_another_is_detected(family, same, tmp_path):
    """With a qwen2 configuration transformers reads any tokenizer as Qwen's own class."""
    tokenizer = load_tokenizer("demo", family=family)
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    assert tokenizer_round_trips(tmp_path, tokenizer) == same
    loaded = load_tokenizer(str(tmp_path), family=family)  # as --model_name EXPORT does
    assert loaded(TOKENIZER_SAMPLE) == tokenizer(TOKENIZER_SAMPLE)
    (tmp_path / "tokenizer.json").write_text("{")
    assert not tokenizer_round_trips(tmp_path, tokenizer)


# Refusals and replacement

UNFIT = {
    "tied head": (lambda pairs: [*pairs, ("lm_head.weight", pairs[0][1])], "lm_head.weight"),
    "missing": (lambda pairs: pairs[:-1], "missing, lm_head.weight"),
    "twice": (lambda pairs: [*pairs, pairs[0]], "embed_tokens.weight .*twice"),
    "diverged": (lambda pairs: [(n, t / 0 if "down" in n else t) for n, t in pairs], "down_proj.* NaN"),
    "transposed": (lambda pairs: [(n, t.t() if "down" in n else t) for n, t in pairs], "down_proj.*48, 32"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_do_not_fit_the_model_are_refused(tmp_path, kind):
    spoil, reason = UNFIT[kind]
    source = build(tie_word_embeddings=kind == "tied head")
    with pytest.raises(UserError, match=reason):
        export_hf(tmp_path / "export", spoil(weights(source)), config=source.config)
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_replaced_completely_or_not_at_all(tmp_path, small_shards):
    first, second = build(seed=0), build(seed=1)
    folder = export_hf(tmp_path / "export", weights(first), config=first.config)
    small_shards.undo()
    before = files(folder)

    def interrupted():
        yield from weights(second)[:9]
        raise KeyError("the model went away")

    with pytest.raises(KeyError, match="went away"):
        export_hf(folder, interrupted(), config=second.config)
    assert files(folder) == before

    failure = pytest.raises(UserError, match=r"File too large.*an earlier export is intact")
    with failure, disk_that_takes(7000):  # the model does not fit into one file
        export_hf(folder, weights(second), config=second.config)
    assert files(folder) == before

    os.rename(folder, tmp_path / ".export.replaced")  # killed between the two renames
    with pytest.raises(UserError, match="missing"):
        export_hf(folder, [], config=first.config)
    assert files(folder) == before

    export_hf(folder, weights(second), config=second.config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "export.json"]
    assert sorted(files(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in weights(second))


def test_files_that_no_export_wrote_are_kept(tmp_path, small_shards):
    source = build()
    folder = export_hf(tmp_path / "export", weights(source), config=source.config)
    small_shards.undo()
    (folder / "README.md").write_text("a model card")
    (folder / "quantized" / "4bit").mkdir(parents=True)
    (folder / "quantized" / "4bit" / "model.gguf").write_bytes(b"gguf")
    (folder / "link").symlink_to("quantized")
    user_files = ["README.md", "link", "quantized"]
    for _ in range(2):
        export_hf(folder, weights(source), config=source.config)
        names = sorted(path.name for path in folder.iterdir())
        assert names == sorted([*user_files, "config.json", "generation_config.json", "model.safetensors"])
        assert (folder / "README.md").read_text() == "a model card" and (folder / "link").is_symlink()
        assert (folder / "link" / "4bit" / "model.gguf").read_bytes() == b"gguf"


def test_what_no_export_wrote_and_the_source_model_are_not_replaced(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_text("x")
    source = build()
    with pytest.raises(UserError, match=f"^--output_dir {tmp_path}: its export/ was not exported by a run"):
        export_hf(tmp_path / "export", weights(source), config=source.config)
    assert (tmp_path / "export" / "model.safetensors").read_text() == "x"
    check_export(tmp_path / "model", source=tmp_path / "other")
    with pytest.raises(UserError, match=r"would overwrite --model_name .*model"):
        check_export(tmp_path / "model", source=tmp_path / "model" / ".." / "model")

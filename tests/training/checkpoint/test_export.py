"""Exports load in transformers as the model that was trained, and never half replace an older one."""

import json
import os
import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from te_models.build import ModelPlan
from training.checkpoint.export import check_export, export_hf
from training.checkpoint.generate import generation_config

torch.set_num_threads(1)

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
}


def build(family: str = "llama", seed: int = 0):
    model_class, config_class, settings = FAMILIES[family]
    torch.manual_seed(seed)
    return model_class(config_class(**TINY, **settings)).eval()


def weights(model) -> list[tuple[str, torch.Tensor]]:
    tied = model.config.tie_word_embeddings
    return [(name, t) for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("max_shard_bytes", [2**32, 6000], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_is_the_model(tmp_path, family, max_shard_bytes):
    source = build(family)
    assert source.config.dtype != torch.bfloat16
    folder = export_hf(
        tmp_path / "export", iter(weights(source)), config=source.config, max_shard_bytes=max_shard_bytes
    )
    assert source.config.dtype != torch.bfloat16, "the caller's config is left alone"
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: len(found) for key, found in info.items() if key.endswith("keys")} == {
        "missing_keys": 0,
        "unexpected_keys": 0,
        "mismatched_keys": 0,
    }
    assert type(loaded) is type(source) and loaded.dtype == torch.bfloat16
    tied = source.config.tie_word_embeddings
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied

    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    for parameter in source.parameters():  # alone: model.bfloat16() would round the rotary frequencies too
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, source(tokens).logits)
    answer = loaded.generate(tokens[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answer.shape == (1, 20)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_files_hold_experts_as_the_hub_has_them(tmp_path, model_type):
    """One by one, as other programs read them, though transformers joins them in memory."""
    sizes = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
    sizes |= {"shared_expert_intermediate_size": 16, "tie_word_embeddings": False}
    config = AutoConfig.for_model(model_type, **TINY | sizes)
    source = AutoModelForCausalLM.from_config(config).bfloat16()
    source.save_pretrained(tmp_path / "theirs")
    export_hf(tmp_path / "ours", source.state_dict().items(), config=config, max_shard_bytes=20_000)
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    ours = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        ours |= load_file(path)
    assert ours.keys() == theirs.keys() and any(".experts.3." in name for name in ours)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_head_is_tied_where_a_part_of_the_settings_says_so(tmp_path):
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


@pytest.mark.parametrize("model_type", ["deepseek_v3", "ernie4_5_moe"])
def test_what_transformers_keeps_in_fp32_stays_so(tmp_path, model_type):
    """Biases that choose experts, a buffer and a parameter, that BF16 could not tell apart."""
    experts = {
        "deepseek_v3": {
            **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
            **{"num_experts_per_tok": 2, "num_key_value_heads": 4, "moe_intermediate_size": 16},
        },
        "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    }
    config = AutoConfig.for_model(model_type, **TINY | experts[model_type], tie_word_embeddings=False)
    source = AutoModelForCausalLM.from_config(config)
    chosen = [(n, t) for n, t in source.state_dict().items() if n.endswith("e_score_correction_bias")]
    for _, bias in chosen:
        bias.copy_(1 + torch.arange(bias.numel()).view_as(bias) / 4096)
    folder = export_hf(tmp_path / "export", source.state_dict().items(), config=config)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert chosen and all(torch.equal(loaded[name], bias) for name, bias in chosen)
    assert loaded["lm_head.weight"].dtype == torch.bfloat16


def test_files_are_named_and_indexed_as_hugging_face_does(tmp_path):
    source = build()
    pairs = weights(source)
    folder = export_hf(tmp_path / "export", pairs, config=source.config, max_shard_bytes=6000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert index["weight_map"].keys() == dict(pairs).keys()
    held = {name: file for file in files for name in load_file(folder / file)}
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == 2 * sum(tensor.numel() for _, tensor in pairs)
    sizes = [[tensor.nbytes for tensor in load_file(folder / file).values()] for file in files]
    assert all(len(size) == 1 or sum(size) <= 6000 for size in sizes), "no shard is too large"
    assert all(sum(a) + sum(b) > 6000 for a, b in pairwise(sizes)), "and none smaller than it must be"
    one = export_hf(tmp_path / "one", pairs, config=source.config)
    assert [path.name for path in one.glob("model*")] == ["model.safetensors"]
    assert names(tmp_path) == ["export", "export.json", "one", "one.json"], "nothing written aside is left"


def test_config_generation_settings_and_tokenizer_come_along(tmp_path):
    source = build()
    source.config.architectures = ["TEDecoder"]
    folder = export_hf(
        tmp_path / "export",
        weights(source),
        config=source.config,
        tokenizer=tiny_tokenizer(),
        generation_config=GenerationConfig(eos_token_id=[2, 3], max_length=17),
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("one two").input_ids == [3, 4]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi"

    plain = export_hf(tmp_path / "plain", weights(source), config=source.config)
    assert json.loads((plain / "generation_config.json").read_text())["eos_token_id"] == 2


def test_generation_settings_that_transformers_would_not_save_again_do_not_lose_an_export(tmp_path):
    """Sampling settings without do_sample, as some published folders have them."""
    settings = {"temperature": 0.9, "top_p": 0.6, "_from_model_config": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model, tokenizer = build(), tiny_tokenizer()
    plan = ModelPlan("m", model.config, tmp_path)
    generation = generation_config(plan, tokenizer, turn_end=None, own_tokenizer=True)
    out = export_hf(tmp_path / "export", weights(model), config=model.config, generation_config=generation)
    saved = GenerationConfig.from_pretrained(out)
    assert (saved.temperature, saved.top_p, saved.do_sample) == (0.9, 0.6, True)


@pytest.mark.parametrize("settings", ['{"length_penalty": 0.8}', '{"max_new_tokens": 0}', "{"])
def test_generation_settings_that_transformers_refuses_are_left_out_and_named(settings, tmp_path, capsys):
    (tmp_path / "generation_config.json").write_text(settings)
    model, tokenizer = build(), tiny_tokenizer()
    plan = ModelPlan("m", model.config, tmp_path)
    generation = generation_config(plan, tokenizer, turn_end=None, own_tokenizer=True)
    export_hf(tmp_path / "export", weights(model), config=model.config, generation_config=generation)
    said = capsys.readouterr().out
    assert said.startswith(f"WARNING: {tmp_path / 'generation_config.json'} is not exported, transformers")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("own", "expected"), [(True, [1, 2, 4, 6]), (False, [2, 6])])
def test_generation_ends_where_the_source_the_tokenizer_and_the_chat_template_say(own, expected, tmp_path):
    """The source's own ends, such as <end_of_turn>, are those of its own tokenizer."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    plan, tokenizer = ModelPlan("m", build().config, tmp_path), tiny_tokenizer()
    assert tokenizer.eos_token_id == 2
    found = generation_config(plan, tokenizer, turn_end=6, own_tokenizer=own)
    assert found.eos_token_id == expected


def test_dtype_slices_and_strides(tmp_path):
    source = build()
    state = dict(weights(source))
    fused = torch.stack([state["model.norm.weight"] * 3, state["model.norm.weight"]]).t().contiguous().t()
    state["model.norm.weight"] = fused[0]  # strided, and part of a larger storage
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
    down = torch.cat([state[name] for name in names])
    state |= {names[0]: down[:32], names[1]: down[32:]}
    folder = export_hf(tmp_path / "export", state.items(), config=source.config, dtype=torch.float32)
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert (folder / "model.safetensors").stat().st_size < 1.1 * sum(t.nbytes for t in state.values())


def renamed(pairs):
    return [(name.replace("q_proj", "query"), tensor) for name, tensor in pairs]


def transposed(pairs):
    return [(name, tensor.t() if "down" in name else tensor) for name, tensor in pairs]


WRONG = {
    "renamed": (renamed, "query.weight is no weight of this model"),
    "missing": (lambda pairs: pairs[:-1], "1 weights of the model are missing, lm_head.weight"),
    "none": (lambda pairs: [], "weights of the model are missing"),
    "twice": (lambda pairs: [*pairs, pairs[0]], "embed_tokens.weight comes twice"),
    "transposed": (
        lambda pairs: [(name, t.t() if "down" in name else t) for name, t in pairs],
        "down_proj.*48, 32",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_weights_that_are_not_the_models_are_refused(tmp_path, kind):
    spoil, named = WRONG[kind]
    source = build()
    with pytest.raises(ValueError, match=named):
        export_hf(tmp_path / "export", spoil(weights(source)), config=source.config)
    assert list(tmp_path.iterdir()) == []


def test_a_tied_head_must_be_left_out(tmp_path):
    source = build("llama tied")
    with pytest.raises(
        ValueError, match=r"lm_head.weight is no weight of this model \(a tied one is left out\)"
    ):
        export_hf(tmp_path / "export", source.state_dict().items(), config=source.config)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_is_replaced_whole_or_not_at_all(tmp_path):
    first, second = build(seed=0), build(seed=1)
    folder = export_hf(tmp_path / "export", weights(first), config=first.config, max_shard_bytes=6000)
    before = contents(folder)

    def breaks_off():
        yield from weights(second)[:9]
        raise KeyError("the model went away")

    with pytest.raises(KeyError, match="went away"):
        export_hf(folder, breaks_off(), config=second.config, max_shard_bytes=6000)
    assert contents(folder) == before

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7000, hard))  # the whole model does not fit into one file
    try:
        with pytest.raises(RuntimeError, match=r"File too large; the earlier export there is untouched"):
            export_hf(folder, weights(second), config=second.config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(folder) == before and names(tmp_path) == ["export", "export.json"]

    export_hf(folder, weights(second), config=second.config)
    assert names(tmp_path) == ["export", "export.json"]
    assert sorted(contents(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in weights(second))


def test_an_export_that_died_while_replacing_is_put_right(tmp_path):
    source = build()
    folder = export_hf(tmp_path / "export", weights(source), config=source.config)
    before = contents(folder)
    os.rename(folder, tmp_path / ".export.replaced")  # killed between the two renames
    with pytest.raises(ValueError, match="missing"):
        export_hf(folder, [], config=source.config)
    assert contents(folder) == before
    export_hf(folder, weights(source), config=source.config)
    assert names(tmp_path) == ["export", "export.json"]


def test_files_that_no_export_wrote_stay(tmp_path):
    source = build()
    folder = export_hf(tmp_path / "export", weights(source), config=source.config, max_shard_bytes=6000)
    (folder / "README.md").write_text("a model card")
    (folder / "quantized").mkdir()
    (folder / "quantized" / "model.gguf").write_bytes(b"gguf")
    for _ in range(2):
        export_hf(folder, weights(source), config=source.config)
        assert names(folder) == [
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "quantized",
        ], "the shards of the first export are gone"
        assert (folder / "README.md").read_text() == "a model card"
        assert (folder / "quantized" / "model.gguf").read_bytes() == b"gguf"


def test_the_export_of_an_older_run_is_known_by_its_names(tmp_path):
    """From before the list of files was kept: beside a run's log."""
    source = build()
    folder = export_hf(tmp_path / "export", weights(source), config=source.config, max_shard_bytes=6000)
    (tmp_path / "export.json").unlink()
    (folder / "README.md").write_text("a model card")
    with pytest.raises(ValueError, match="holds what no run of this folder exported"):
        check_export(folder)
    (tmp_path / "metrics.jsonl").touch()
    export_hf(folder, weights(source), config=source.config)
    assert names(folder) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("names", [["thesis.tex"], ["config.json", "model.safetensors"]])
def test_a_folder_that_no_export_wrote_is_not_replaced(tmp_path, names):
    (tmp_path / "export").mkdir()
    for name in names:
        (tmp_path / "export" / name).write_text("x")
    source = build()
    with pytest.raises(ValueError, match="holds what no run of this folder exported; move that away"):
        export_hf(tmp_path / "export", weights(source), config=source.config)
    assert all((tmp_path / "export" / name).read_text() == "x" for name in names)


def test_a_model_is_not_exported_over_itself(tmp_path):
    source = build()
    folder = export_hf(tmp_path / "export", weights(source), config=source.config)
    check_export(folder, source=tmp_path / "other")
    with pytest.raises(ValueError, match=r"would export over --model_name .*export, which it trains from"):
        check_export(folder, source=tmp_path / "export" / ".." / "export")

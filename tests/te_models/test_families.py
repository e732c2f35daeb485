"""Families: TE layers match Hugging Face's, presets match published ones, others are refused."""

import importlib
import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_suite.benchmarks.plan.inputs import read_model
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.build import export_tensors
from fp8_suite.te_models.decoder import rope_angles
from fp8_suite.te_models.families import FAMILIES, head_dim
from fp8_suite.te_models.kernels.rope import rope_table, split_qkv_rope
from fp8_suite.te_models.presets import LOCAL_PRESETS, PRESETS
from fp8_suite.te_models.spec import count_parameters, find_model, refuse_te, with_special_tokens
from transformers import AutoConfig

from tests.gpu.models import batch, build, perturbed, spec

CPU = torch.device("cpu")
PADDED, PACKED = [[33], [20], [9]], [[10, 6, 17], [32], [3, 20]]
SLIDING = {"use_sliding_window": True, "sliding_window": 1024}


def config_of(family: str, **changes) -> Any:
    fields = PRESETS[f"tiny-{family}"] | changes
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@pytest.mark.parametrize(
    ("tied", "packed", "dtype", "loss", "gradients"),
    [
        (True, False, torch.float32, 8e-5, 1e-4),
        (False, True, torch.float32, 8e-5, 1e-4),
        (False, True, torch.bfloat16, 5e-3, 0.15),
    ],
    ids=["tied-padded", "untied-packed", "bf16"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_te_form_matches_hugging_face(family, tied, packed, dtype, loss, gradients, tmp_path):
    """Train both forms on one batch; `loss` and `gradients` are the largest allowed differences."""
    model_spec = perturbed(spec(family=family, tied=tied, layers=2), tmp_path)
    inputs = batch(PACKED if packed else PADDED, packed=packed, device=CPU)
    options = {"backend": "emulated", "packed": packed, "dtype": dtype, "device": CPU}
    hf, te = (build(model_spec, use_te=use_te, **options) for use_te in (False, True))
    losses = [model(**inputs).loss / (inputs["labels"] != -100).sum() for model in (hf, te)]
    sum(losses).backward()
    hf_gradients, te_gradients = (
        dict(export_tensors(model, lambda weights: [w.grad for w in weights])) for model in (hf, te)
    )
    assert abs(losses[1] - losses[0]) <= loss
    assert te_gradients.keys() == hf_gradients.keys()
    for name, gradient in hf_gradients.items():
        assert te_gradients[name].dtype == dtype
        error = (te_gradients[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert error < gradients, f"{name}: relative error {error:.1e}"


ENDS = [128001, 128008, 128009]
# Millions of parameters, norm epsilon, positions, theta and factor of RoPE, EOS tokens, tied head.
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": (1235.8, 1e-5, 131072, 5e5, 32.0, 128001, True),
    "meta-llama/Llama-3.2-3B-Instruct": (3212.7, 1e-5, 131072, 5e5, 32.0, ENDS, True),
    "meta-llama/Meta-Llama-3.1-8B": (8030.3, 1e-5, 131072, 5e5, 8.0, 128001, False),
    "meta-llama/Llama-3.1-70B": (70553.7, 1e-5, 131072, 5e5, 8.0, 128001, False),
    "meta-llama/Llama-3.1-405B": (405853.4, 1e-5, 131072, 5e5, 8.0, 128001, False),
    "meta-llama/Llama-3.3-70B-Instruct": (70553.7, 1e-5, 131072, 5e5, 8.0, ENDS, False),
    "meta-llama/Meta-Llama-3-8B": (8030.3, 1e-5, 8192, 5e5, None, 128001, False),
    "meta-llama/Meta-Llama-3-70B-Instruct": (70553.7, 1e-5, 8192, 5e5, None, 128009, False),
    "Qwen/Qwen2.5-0.5B": (494.0, 1e-6, 32768, 1e6, None, 151643, True),
    "Qwen/Qwen2.5-1.5B": (1543.7, 1e-6, 131072, 1e6, None, 151643, True),
    "Qwen/Qwen2.5-7B-Instruct": (7615.6, 1e-6, 32768, 1e6, None, 151645, False),
    "Qwen/Qwen2.5-14B": (14770.0, 1e-5, 131072, 1e6, None, 151643, False),
    "Qwen/Qwen2.5-14B-Instruct": (14770.0, 1e-6, 32768, 1e6, None, 151645, False),
    "Qwen/Qwen3-0.6B": (596.0, 1e-6, 40960, 1e6, None, 151645, True),
    "Qwen/Qwen3-4B-Base": (4022.5, 1e-6, 32768, 1e6, None, 151643, True),
    "Qwen/Qwen3-8B": (8190.7, 1e-6, 40960, 1e6, None, 151645, False),
    "Qwen/Qwen3-14B": (14768.3, 1e-6, 40960, 1e6, None, 151645, False),
    "Qwen/Qwen3-32B": (32762.1, 1e-6, 40960, 1e6, None, 151645, False),
    "mistralai/Mistral-7B-v0.3": (7248.0, 1e-5, 32768, 1e6, None, 2, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_models(name):
    model_spec = find_model(name, init="random", use_te=True)
    config, (millions, *expected) = model_spec.config, PUBLISHED[name]
    rope = config.rope_parameters
    assert count_parameters(model_spec) / 1e6 == pytest.approx(millions, abs=0.1)
    assert read_model(name).size.parameters == count_parameters(model_spec), "without torch, for plans"
    values = [config.rms_norm_eps, config.max_position_embeddings, rope["rope_theta"], rope.get("factor")]
    assert [*values, config.eos_token_id, config.tie_word_embeddings] == expected


# One preset per family and RoPE type.
@pytest.mark.parametrize(
    "name", [*sorted(LOCAL_PRESETS), "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B"]
)
def test_rope_angles_match_transformers(name):
    config = find_model(name, init="random", use_te=True).config
    kind = config.model_type
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    rotary = getattr(modeling, f"{kind.capitalize()}RotaryEmbedding")(config)
    angles = rope_angles(config, 300)[:, 0, 0]
    cos, sin = rotary(torch.zeros(1), torch.arange(300)[None])
    assert torch.allclose(angles.cos(), cos[0], atol=1e-4) and torch.allclose(angles.sin(), sin[0], atol=1e-4)
    size, rope = head_dim(config), config.rope_parameters
    slowest = rope["rope_theta"] ** (-(size - 2) / size) / rope.get("factor", 1.0)
    assert angles[1, size // 2 - 1].item() == pytest.approx(slowest, rel=1e-4)


def rope_of(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", rope_of("yarn"), "RoPE type 'yarn'"),  # it rescales attention
        ("llama", rope_of("dynamic"), "RoPE type 'dynamic'"),  # its angles depend on the length
        ("gpt2", {}, "model type 'gpt2' is not supported.*llama, qwen2, qwen3, mistral"),
    ],
)
def test_config_without_a_te_form_is_refused(family, changes, message):
    with pytest.raises(UserError, match=f"--use_te --model_name m: {message}.*without --use_te"):
        refuse_te("m", config_of(family, **changes) if family in FAMILIES else AutoConfig.for_model(family))


@pytest.mark.parametrize(
    ("family", "settings", "length", "refused"),
    [
        *(("mistral", {"sliding_window": 1024}, length, length != 1024) for length in (1024, 1025, None)),
        *(("mistral", {"sliding_window": window}, None, False) for window in (2048, None)),
        ("qwen2", SLIDING | {"max_window_layers": 2}, None, True),
        ("qwen3", SLIDING | {"max_window_layers": 3}, None, False),  # it has 3 layers
        ("qwen3", {"use_sliding_window": False, "sliding_window": 1024}, None, False),
    ],
)
def test_a_run_may_not_be_longer_than_a_sliding_window(family, settings, length, refused, tmp_path):
    """The model has 2,048 positions. A longer length is refused at every start, so also on resume."""
    config_of(family, **settings).save_pretrained(tmp_path)
    find = partial(find_model, str(tmp_path), init="random", max_seq_length=length)
    assert find(use_te=False)
    with pytest.raises(UserError) if refused else nullcontext() as error:
        find(use_te=True)
    assert not refused or error.value.flags == {"use_te", "max_seq_length"}


def test_reference_of_the_rope_kernel_matches_transformers():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = config_of("llama", hidden_size=288, num_attention_heads=6, num_key_value_heads=2, head_dim=48)
    positions = torch.tensor([[3, 0, 1, 2, 30]])
    queries, keys, values = (torch.randn(5, heads, 48).bfloat16() for heads in (6, 2, 2))
    joint = torch.cat([queries.unflatten(1, (2, 3)), keys[:, :, None], values[:, :, None]], dim=2)
    table = rope_table(rope_angles(config, 32))
    results = split_qkv_rope(joint.flatten(1), table, positions[0], 2)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    q, k = (t.float().transpose(0, 1)[None] for t in (queries, keys))
    expected = apply_rotary_pos_emb(q, k, cos.float(), sin.float())
    for result, reference in zip(results, expected, strict=False):
        torch.testing.assert_close(result, reference[0].transpose(0, 1).bfloat16())
    assert torch.equal(results[2], values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "256"}, ".*Validation error for field 'hidden_size': .*expected int, got str"),
        ({"num_attention_heads": 5, "head_dim": 64}, r".*hidden size \(256\) is not a multiple of .* \(5\)"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "KeyError: .*Missing required keys"),
    ],
)
def test_impossible_sizes_are_named(changes, reason, tmp_path):
    config = config_of("llama")
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=f"^--model_name {tmp_path}: its config.json: {reason}"):
        find_model(str(tmp_path), init="random", use_te=False)


def test_special_tokens_make_a_new_specification():
    model = find_model("tiny-llama", init="random", use_te=True)
    before = model.config.to_dict()
    tokenizer = SimpleNamespace(bos_token_id=7, eos_token_id=8, pad_token_id=8)
    config = with_special_tokens(model, tokenizer).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (7, 8, None)
    assert model.config.to_dict() == before


@pytest.mark.parametrize("model_type", ["t5", "clip", "llama"])
def test_what_is_no_causal_language_model_is_refused(model_type, tmp_path):
    AutoConfig.for_model(model_type, is_causal=False).save_pretrained(tmp_path)
    reason = "is_causal is false" if model_type == "llama" else f"model of type '{model_type}'"
    with pytest.raises(UserError, match=f"--model_name .*{reason}"):
        find_model(str(tmp_path), init="random", use_te=False)

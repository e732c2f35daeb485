"""Families: the TE form computes what Hugging Face's does, presets are as published, the rest is refused."""

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from te_models.build import export_tensors, plan_model, refuse_te
from te_models.decoder import rope_angles
from te_models.families import FAMILIES, head_dim
from te_models.kernels.rope import rope_table, split_qkv_rope
from te_models.presets import LOCAL_PRESETS, PRESETS
from tests.gpu.models import batch, build, perturbed, plan
from training.tracking.metrics import COUNTED

CPU = torch.device("cpu")
MILLION = {"rope_type": "default", "rope_theta": 1000000.0}
PADDED, PACKED = [[33], [20], [9]], [[10, 6, 17], [32], [3, 20]]


def config_of(family: str, **changes) -> Any:
    config = plan_model(f"tiny-{family}", init="auto", use_te=True).config
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def loss_and_gradients(model, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss per label token, and every weight's gradient under its Hugging Face name."""
    loss = model(**inputs).loss / (inputs["labels"] != -100).sum()
    loss.backward()
    return loss.detach(), dict(export_tensors(model, lambda weights: [w.grad for w in weights]))


@pytest.mark.parametrize("use_te", [False, True])
def test_a_model_that_sees_the_next_token_is_refused(tmp_path, use_te):
    config = config_of("llama", is_causal=False)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--model_name .*is_causal is false in its config\.json"):
        plan_model(str(tmp_path), init="random", use_te=use_te)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_te_form_computes_what_hugging_face_does(family, tied, packed, tmp_path):
    model_plan = perturbed(plan(family=family, tied=tied, layers=2), tmp_path)
    inputs = batch(PACKED if packed else PADDED, packed=packed, device=CPU)
    options = {"packed": packed, "dtype": torch.float32, "device": CPU}
    reference, expected = loss_and_gradients(build(model_plan, use_te=False, **options), inputs)
    te = build(model_plan, use_te=True, backend="emulated", **options)
    loss, found = loss_and_gradients(te, inputs)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_te_form_computes_it_in_bf16_too(family, tmp_path):
    model_plan = perturbed(plan(family=family, layers=2), tmp_path)
    inputs = batch(PACKED, packed=True, device=CPU)
    options = {"packed": True, "dtype": torch.bfloat16, "device": CPU}
    reference, expected = loss_and_gradients(build(model_plan, use_te=False, **options), inputs)
    te = build(model_plan, use_te=True, backend="emulated", **options)
    loss, found = loss_and_gradients(te, inputs)
    assert abs(loss - reference) < 5e-3
    for name, gradient in expected.items():
        assert found[name].dtype == torch.bfloat16
        error = (found[name].float() - gradient.float()).norm() / gradient.float().norm()
        assert error < 0.15, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("name", "millions"),  # parameters as published, tied heads counted once
    [
        ("meta-llama/Llama-3.2-1B", 1235.8),
        ("meta-llama/Llama-3.2-3B", 3212.7),
        ("meta-llama/Meta-Llama-3.1-8B", 8030.3),
        ("Qwen/Qwen2.5-0.5B", 494.0),
        ("Qwen/Qwen2.5-1.5B", 1543.7),
        ("Qwen/Qwen2.5-7B", 7615.6),
        ("Qwen/Qwen2.5-14B", 14770.0),
        ("Qwen/Qwen3-0.6B", 596.0),
        ("Qwen/Qwen3-4B", 4022.5),
        ("Qwen/Qwen3-8B", 8190.7),
        ("Qwen/Qwen3-14B", 14768.3),
        ("mistralai/Mistral-7B-v0.3", 7248.0),
        ("meta-llama/Llama-3.1-70B", 70553.7),
        ("meta-llama/Llama-3.3-70B-Instruct", 70553.7),
        ("meta-llama/Meta-Llama-3-8B", 8030.3),
        ("meta-llama/Meta-Llama-3-70B-Instruct", 70553.7),
        ("meta-llama/Llama-3.1-405B", 405853.4),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, millions):
    plan = plan_model(name, init="random", use_te=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


HUB = sorted(PRESETS.keys() - LOCAL_PRESETS)
LLAMA_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_ROPE["original_max_position_embeddings"] = 8192
# First part of a name -> epsilon, positions, RoPE, end of text, as the published config.json files have them.
PUBLISHED = {
    "meta-llama/Llama-3.2": (1e-5, 131072, LLAMA_ROPE | {"factor": 32.0}, 128001),
    "meta-llama/Meta-Llama-3-": (1e-5, 8192, {"rope_type": "default", "rope_theta": 500000.0}, 128001),
    "meta-llama/": (1e-5, 131072, LLAMA_ROPE | {"factor": 8.0}, 128001),
    "Qwen/Qwen2.5-14B": (1e-5, 131072, MILLION, 151643),
    "Qwen/Qwen2.5-0.5B": (1e-6, 32768, MILLION, 151643),
    "Qwen/Qwen2.5": (1e-6, 131072, MILLION, 151643),
    "Qwen/Qwen3": (1e-6, 40960, MILLION, 151645),
    "mistralai/": (1e-5, 32768, MILLION, 2),
}


@pytest.mark.parametrize("name", HUB)
def test_presets_have_the_published_rope_and_norms(name):
    config = plan_model(name, init="random", use_te=True).config
    expected = next(values for part, values in PUBLISHED.items() if name.startswith(part))
    if name.startswith("meta-llama/") and name.endswith("-Instruct"):
        ends = 128009 if "Meta-Llama-3-" in name else [128001, 128008, 128009]
        expected = (*expected[:3], ends)
    if name.startswith("Qwen/Qwen2.5") and name.endswith("-Instruct"):
        expected = (1e-6, 32768, MILLION, 151645)
    if name.startswith("Qwen/Qwen3") and name.endswith("-Base"):
        expected = (1e-6, 32768, MILLION, 151643)
    found = (config.rms_norm_eps, config.max_position_embeddings, config.rope_parameters, config.eos_token_id)
    assert found == expected
    tied = ("Llama-3.2", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen3-0.6B", "Qwen3-4B")
    assert config.tie_word_embeddings == any(part in name for part in tied)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_rope_follows_transformers(name):
    """Angles against the family's own cos and sin, so that theta and the Llama-3 scaling are not lost."""
    config = plan_model(name, init="random", use_te=True).config
    modeling = importlib.import_module(
        f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    )
    rotary = getattr(modeling, f"{config.model_type.capitalize()}RotaryEmbedding")(config)
    angles = rope_angles(config, 300)[:, 0, 0]
    cos, sin = rotary(torch.zeros(1), torch.arange(300)[None])
    assert torch.allclose(angles.cos(), cos[0], atol=1e-4) and torch.allclose(angles.sin(), sin[0], atol=1e-4)
    size, rope = head_dim(config), config.rope_parameters
    slowest = rope["rope_theta"] ** (-(size - 2) / size) / rope.get("factor", 1.0)
    assert angles[1, size // 2 - 1].item() == pytest.approx(slowest, rel=1e-4)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])  # one rescales attention, one follows the length
def test_rope_types_without_a_te_form_are_refused(kind):
    config = config_of("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ValueError, match=f"RoPE type '{kind}'"):
        refuse_te("m", config)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            "mistral",
            {"sliding_window": 1024},
            "sliding_window=1024 is less than max_position_embeddings=2048",
        ),
    ],
)
def test_settings_without_a_te_form_are_refused(family, change, message):
    with pytest.raises(ValueError, match=message) as error:
        refuse_te("some/model", config_of(family, **change))
    assert "without --use_te" in str(error.value)


def test_families_without_a_te_form_are_refused():
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(ValueError, match=r"model type 'gpt2' has no TE form.*llama, qwen2, qwen3, mistral"):
        refuse_te("some/model", config)


def test_flops_of_families_with_a_te_form_are_known():
    assert FAMILIES.keys() <= COUNTED


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, False),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, True),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, False),  # of 3 layers
        ({"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 0}, False),
    ],
)
def test_a_window_of_qwen_is_refused_where_it_cuts(family, settings, refused):
    fields = {name: value for name, value in PRESETS[f"tiny-{family}"].items() if name != "model_type"}
    config = AutoConfig.for_model(family, **fields, **settings)
    with pytest.raises(ValueError, match="sliding_window=64") if refused else nullcontext():
        refuse_te("some/model", config)


def test_a_window_of_mistral_that_holds_every_position_is_none():
    refuse_te("some/model", config_of("mistral", sliding_window=2048))
    refuse_te("some/model", config_of("mistral", sliding_window=None))


def test_the_reference_of_the_rope_kernel_is_transformers():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = config_of("llama", num_attention_heads=6, num_key_value_heads=2, head_dim=48)
    positions = torch.tensor([[3, 0, 1, 2, 30]])
    queries, keys, values = (torch.randn(5, heads, 48).bfloat16() for heads in (6, 2, 2))
    joint = torch.cat([queries.unflatten(1, (2, 3)), keys[:, :, None], values[:, :, None]], dim=2)
    table = rope_table(rope_angles(config, 32))
    found = split_qkv_rope(joint.flatten(1), table, positions[0], 2)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    expected = apply_rotary_pos_emb(
        *(t.float().transpose(0, 1)[None] for t in (queries, keys)), cos.float(), sin.float()
    )
    for mine, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(mine, theirs[0].transpose(0, 1).bfloat16())
    assert torch.equal(found[2], values)

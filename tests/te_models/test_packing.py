"""A sample's loss is the same alone, packed anywhere, beside anything and with any padding, or it is refused.

Tiny models of every kind: families, RoPE types, windows, chunks, experts, recurrences.
"""

import numpy as np
import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.data.collate import Sample, build_batch
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import ModelSpec
from transformers import AutoConfig

VOCABULARY, LENGTH = 64, 64  # tokens, and tokens of a row
TINY = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
}
WINDOW = {"sliding_window": 8}
LATENT = {  # DeepSeek's multi-head latent attention
    "num_key_value_heads": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}
LLAMA4 = EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
OLDER = {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **OLDER}


def rope(rope_type, **parameters):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4} | parameters}


def long_rope(limit):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return rope("longrope", **factors) | {"original_max_position_embeddings": limit}


PLAIN = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "granite"),
    *("olmo", "olmo2", "olmo3", "cohere", "cohere2", "glm", "glm4", "stablelm", "starcoder2", "gpt_neox"),
    *("exaone4", "smollm3", "nemotron", "arcee", "gpt2", "gpt_bigcode", "opt"),
)
WINDOWED = ("mistral", "gemma2", "gemma3_text", "cohere2", "olmo3")
GPT_NEO = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8}
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe")
SEPARATE = {
    **{name: (name, {}) for name in PLAIN},
    **{f"{name}, window": (name, WINDOW) for name in WINDOWED},
    "qwen2, window": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "gpt_neo, window": ("gpt_neo", GPT_NEO),
    **{name: (name, EXPERTS) for name in MIXTURES},
    **{name: (name, EXPERTS | LATENT) for name in ("deepseek_v2", "deepseek_v3")},
    "llama4, chunk of a row": (
        "llama4_text",
        LLAMA4 | {"attention_chunk_size": LENGTH, "floor_scale": LENGTH},
    ),
    "linear RoPE": ("llama", rope("linear", factor=4.0)),
    "yarn RoPE": ("llama", {"rope_parameters": YARN}),
    "llama3 RoPE": ("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **OLDER)),
    "dynamic RoPE": ("llama", rope("dynamic", factor=2.0)),
    "longrope": ("phi3", long_rope(LENGTH)),
    "scaled by position": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
}
LEAK, POSITIONS = "lets packed samples see each other", "ignores that positions start at 0"
REFUSED = {
    "dynamic RoPE": ("llama", rope("dynamic", factor=2.0) | {"max_position_embeddings": 32}, "dynamic RoPE"),
    "longrope": ("phi3", long_rope(32), "longrope RoPE"),
    "llama4, chunks": ("llama4_text", LLAMA4 | {"attention_chunk_size": 16}, "attention_chunk_size"),
    "llama4, scaled": ("llama4_text", LLAMA4 | {"floor_scale": 4}, "attn_temperature_tuning"),
    **{f"{name}, sinks": (name, EXPERTS | WINDOW, LEAK) for name in ("gpt_oss", "afmoe")},
    "falcon": ("falcon", {}, LEAK),
    "falcon, ALiBi": ("falcon", {"alibi": True}, LEAK),
    "bloom, ALiBi": ("bloom", {"n_head": 4, "n_layer": 2}, LEAK),
    **{name: (name, {}, LEAK) for name in ("mamba", "falcon_mamba", "rwkv", "recurrent_gemma")},
    "granitemoehybrid, recurrent": (
        "granitemoehybrid",
        EXPERTS | MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
        LEAK,
    ),
    "lfm2, convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}, LEAK),
    **{name: (name, BART, POSITIONS) for name in ("bart", "pegasus")},
}  # fmt: skip


def build(model_type, changes, *, packed, te_backend=None):
    base = {"dtype": torch.float32, "device": torch.device("cpu"), "max_positions": LENGTH}
    options = BuildOptions(te_backend=te_backend, packed=packed, **base)
    # The weights are large enough for every dependence to show.
    config = AutoConfig.for_model(model_type, **TINY | {"initializer_range": 0.3} | changes)
    return build_model(ModelSpec(model_type, config, None), options).eval()


def samples(seed, *lengths):
    rng = np.random.default_rng(seed)
    ids = (rng.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths)
    return [Sample(tokens, np.ones(len(tokens), bool), 0) for tokens in ids]


@torch.no_grad()
def loss(model, rows, sample, *, width, packed=True):
    """Return the loss of one sample of a batch."""
    rows = [[x._replace(loss=x.loss & (x is sample)) for x in row] for row in rows]
    batch = build_batch(rows, width, pad_id=7, max_seqlen=LENGTH if packed else None)
    assert batch.label_tokens == len(sample.ids) - 1
    return model(**batch.inputs).loss.item()


def assert_independent(model, padded_model):
    """Compare the packed model and the one for padded batches, both with the same weights."""
    sample, short, long, one = samples(0, 9, 3, 40, 1)
    alone = pytest.approx(loss(padded_model, [[sample]], sample, width=9, packed=False), rel=1e-6)
    for width in (9, 10, LENGTH):
        assert loss(padded_model, [[sample]], sample, width=width, packed=False) == alone
        assert loss(model, [[sample]], sample, width=width) == alone
    assert loss(padded_model, [[long], [sample]], sample, width=48, packed=False) == alone
    for row in ([sample, long], [long, sample], [short, sample, long], [one, sample, one, long]):
        assert loss(model, [row], sample, width=LENGTH) == alone
        assert loss(model, [samples(1, 5, 20), row], sample, width=LENGTH) == alone


@pytest.mark.parametrize(("model_type", "changes"), SEPARATE.values(), ids=SEPARATE)
def test_loss_of_a_sample_is_independent_of_packing(model_type, changes):
    model = build(model_type, changes, packed=True)
    assert_independent(model, model)


@pytest.mark.parametrize("changes", [{}, rope("linear", factor=4.0)], ids=["default", "linear"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_loss_of_a_sample_in_te_layers_is_independent_of_packing(model_type, changes):
    changes = changes | {"sliding_window": None}
    models = (build(model_type, changes, packed=packed, te_backend="emulated") for packed in (True, False))
    assert_independent(*models)


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_packing_that_would_change_a_loss_is_refused(model_type, changes, reason):
    with pytest.raises(UserError, match=f"{reason}.*; add --no_packing$") as refusal:
        build(model_type, changes, packed=True)
    assert refusal.value.flags == {"packing"}
    model = build(model_type, changes, packed=False)
    sample, neighbour = samples(0, 9, 25)
    alone = loss(model, [[sample]], sample, width=9, packed=False)
    for rows, width in (([[sample]], 30), ([[neighbour], [sample]], 30)):  # padded
        assert loss(model, rows, sample, width=width, packed=False) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "doge"])
@pytest.mark.parametrize("packed", [True, False])
def test_models_that_attend_to_later_tokens_are_refused(model_type, packed):
    with pytest.raises(UserError, match="attends to later tokens; use a causal language model") as refusal:
        build(model_type, {}, packed=packed)
    assert refusal.value.flags == {"model_name"}

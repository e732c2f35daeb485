"""Transformers models: any architecture, packed only if samples stay separate."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.errors import UserError
from fp8_suite.te_models import hugging_face
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.dependence import refuse_dependent_samples
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.kernels.packed_attention import ATTENTION_NAME, packed_attention
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import ModelSpec, find_model
from fp8_suite.training.export.write import export_hf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.hugging_face_models import WITH_IMAGES, save_model_with_images
from tests.te_models.test_packing import TINY

FP32 = {"te_backend": None, "dtype": torch.float32, "device": torch.device("cpu"), "max_positions": 64}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def build(model_type: str, *, packed=False, seed=0, recompute: str | None = None, convert=None, **changes):
    """Build a tiny model; `recompute` is None, "plain" or "reentrant"."""
    level = {"recompute": "layer", "reentrant": recompute == "reentrant"} if recompute else {}
    options = BuildOptions(**FP32, **level, packed=packed, seed=seed, convert=convert)
    config = AutoConfig.for_model(model_type, **TINY | changes)
    return build_model(ModelSpec(model_type, config, None), options)


def inputs(lengths: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (1, sum(lengths)))
    labels = ids.roll(-1)
    labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def borders(lengths: list[int]) -> dict:
    return {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(), "max_seqlen": 48}


def gradients(model) -> dict[str, torch.Tensor]:
    by_name = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return by_name


def test_packed_attention_matches_attention_with_a_block_diagonal_mask():
    torch.manual_seed(0)
    lengths, heads, groups, size = [3, 1, 12], 6, 2, 8
    q, k, v, grad = (torch.randn(16, n, size, dtype=torch.float64) for n in (heads, groups, groups, heads))
    sample = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    mask = (sample[:, None] == sample) & torch.ones(16, 16).tril().bool()
    results = []
    for is_packed in (True, False):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if is_packed:
            out = packed_attention(*leaves, borders(lengths)["cu_seqlens"], 12, 0.3, False)[0]
        else:
            parts = [t.transpose(0, 1)[None] for t in leaves]
            out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.3, enable_gqa=True)
            out = out[0].transpose(0, 1)
        out.backward(grad)
        results.append([out, *(leaf.grad for leaf in leaves)])
    for result, reference in zip(*results, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)  # computed in float32


def test_packed_attention_passes_opcheck():
    torch.manual_seed(0)
    shapes = ((9, 4, 8), (9, 2, 8), (9, 2, 8))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    arguments = (q, k, v, torch.tensor([0, 4, 9], dtype=torch.int32), 5, 0.5, False)
    torch.library.opcheck(packed_attention, arguments)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, "sliding window"),
        ("llama", {"attention_dropout": 0.1}, "dropout"),
        ("gpt2", {}, "dropout"),
        ("gpt_oss", {}, "sliding window"),
        ("stablelm", {}, "do not reach"),
        ("falcon", {}, "function cannot be replaced"),
    ],
)
def test_packed_attention_replaces_only_plain_causal_attention(model_type, changes, reason):
    model = build(model_type, **changes)
    if reason is None:
        assert model.attention == "packed_causal"
    else:
        assert reason in model.attention and model.model.config._attn_implementation != "packed_causal"


def graphs() -> tuple[int, int]:
    """Return the number of compiled graphs and graph breaks since the last reset."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def test_compiled_layers_share_one_graph_for_all_batches():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build("qwen3", packed=True, recompute="plain", num_hidden_layers=3)
    plain = build("qwen3", packed=True, num_hidden_layers=3)
    model.compile_blocks(backend="aot_eager")
    for lengths in ([5, 27, 16], [16, 16, 8, 8], [4] * 12):
        batch = inputs(lengths) | borders(lengths)
        losses = [m(**batch).loss for m in (model, plain)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
    assert graphs() == (1, 0)
    model(**inputs([48]), **borders([48])).loss.backward()  # one sample per row
    assert graphs() == (2, 0)
    model.eval()
    with torch.no_grad():
        for lengths in ([5, 27, 16], [24, 24]):
            model(**inputs(lengths), **borders(lengths))
    assert graphs() in ((3, 0), (4, 0))  # the first recomputed layer may differ: its input has no gradient
    torch._dynamo.reset()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_loss_matches_transformers_logits(model_type):
    """Some of these heads scale or cap their logits."""
    model, batch = build(model_type), inputs([12])
    logits = model.model(input_ids=batch["input_ids"]).logits
    loss = F.cross_entropy(logits[0], batch["labels"][0], reduction="sum")
    out = model(**batch)
    torch.testing.assert_close(out.loss, loss)
    assert out.correct == (logits.argmax(-1) == batch["labels"]).sum()


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_padding_token_in_text_is_trained(model_type):
    model, batch = build(model_type, pad_token_id=2, eos_token_id=2), inputs([8])
    batch["input_ids"][0, 3] = 2
    model(**batch).loss.backward()
    assert model.model.get_input_embeddings().weight.grad[2].any()


@pytest.mark.parametrize("model_type", [*FAMILIES, "gpt2"])
def test_known_families_use_every_parameter(model_type):
    """DDP relies on this; other models may have unused parameters, such as image encoders or experts."""
    model = build(model_type)
    assert model.uses_all_parameters == (model_type in FAMILIES)
    model(**inputs([16])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_flash_attention_4_is_installed_under_a_name_that_transformers_does_not_load():
    model = build("llama")
    model.choose_attention(torch.device("cpu"), torch.float32, flash_4=True)
    assert model.attention == ATTENTION_NAME


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_rounding_in_experts_is_not_a_leak(model_type):
    """For some seeds, the last bits of the loss change with the other sample's tokens."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}
    sizes |= {"num_local_experts": 8} if model_type == "mixtral" else {"num_experts": 16}
    for seed in range(6):
        build(model_type, packed=True, seed=seed, **sizes)


def test_damaged_weights_are_not_reported_as_leaking():
    model = build("llama")
    with torch.no_grad():
        next(model.parameters())[3, 0] = float("nan")
    with pytest.raises(UserError, match=r"its loss is nan, so its weights or config.json are damaged"):
        refuse_dependent_samples(model.eval(), "a/b", packed=True, max_length=64)


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_the_text_of_a_model_with_images_is_trained_and_exported(model_type, tmp_path):
    """Its image encoder has more layers than its decoder, and gets no gradient."""
    save_model_with_images(tmp_path / "source", model_type)
    model_spec = find_model(str(tmp_path / "source"), init="pretrained", use_te=False)
    model = build_model(model_spec, BuildOptions(**FP32, packed=True))
    assert len(model.blocks) == 2 and {type(block).__name__ for block in model.blocks} == {
        {"gemma3": "Gemma3", "mistral3": "Mistral", "qwen2_5_vl": "Qwen2_5_VL"}[model_type] + "DecoderLayer"
    }
    model(**inputs([5, 11]), **borders([5, 11])).loss.backward()
    assert all(p.grad is not None for block in model.blocks for p in block.parameters())
    with torch.no_grad():
        model.model.get_input_embeddings().weight.add_(1)
    export_hf(tmp_path / "export", export_tensors(model), config=model_spec.config)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    pairs = zip(loaded.parameters(), model.model.parameters(), strict=True)
    assert all(torch.equal(exported, trained.bfloat16()) for exported, trained in pairs)


def test_blocks_are_layers_even_if_experts_outnumber_them():
    def layer() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(8)))

    inner = torch.nn.Module()
    inner.config, inner.layers = SimpleNamespace(model_type="x"), torch.nn.ModuleList([layer(), layer()])
    assert hugging_face.HFCausalLM(inner).blocks == list(inner.layers)


def test_router_loss_is_added_in_training_as_in_transformers():
    """transformers adds coefficient times router loss to the mean loss."""
    model, batch = build("mixtral", **ROUTED), inputs([16])
    labels = int((batch["labels"] != -100).sum())
    with torch.no_grad():
        trained, evaluated = model(**batch).loss / labels, model.eval()(**batch).loss / labels
        balance = model.model(input_ids=batch["input_ids"], use_cache=False).aux_loss
    assert balance > 1
    torch.testing.assert_close(trained, evaluated + 0.5 * balance)


def test_router_loss_has_the_models_coefficient():
    """Its name differs between models, and some store it in the model instead of the configuration."""
    experts = {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.05}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "ffn_config": experts}
    dbrx = AutoConfig.for_model("dbrx", **sizes, attn_config={"kv_n_heads": 2, "rope_theta": 1e4})
    assert hugging_face.router_loss_weight(AutoModelForCausalLM.from_config(dbrx)) == 0.05
    jetmoe = build("jetmoe", aux_loss_coef=0.07, kv_channels=8)
    assert hugging_face.router_loss_weight(jetmoe.model) == 0.07


def test_unavailable_router_loss_is_refused():
    jetmoe = {"output_router_logits": True, "kv_channels": 8}
    # This model never returns a router loss in transformers, regardless of the configuration.
    with pytest.raises(UserError, match=r"JetMoeForCausalLM: .*it returns none.; set out"):
        build("jetmoe", **jetmoe)(**inputs([16]))
    build("jetmoe", **jetmoe, aux_loss_coef=0.0)(**inputs([16]))


def test_router_loss_is_trained_under_recomputation_or_refused():
    """Reentrant recomputation runs layers without a graph, so their router logits have no gradient."""

    def gate_gradient(**options) -> torch.Tensor:
        model = build("mixtral", **ROUTED, **options)
        model(**inputs([16])).loss.backward()
        return next(p.grad for name, p in model.named_parameters() if "gate.weight" in name)

    torch.testing.assert_close(gate_gradient(recompute="plain"), gate_gradient())
    with pytest.raises(UserError, match=r"--recompute layer: .*ds_zero3.*MixtralForCausalLM.*drop it"):
        build("mixtral", **ROUTED, recompute="reentrant")
    build("mixtral", recompute="reentrant")

"""Models as transformers implements them: any architecture, packed only where samples stay apart."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from te_models import ModelPlan, build_model
from te_models.hugging_face import PLAIN_HEADS, materialize, parameters_on_meta

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type: str, *, packed: bool, **options):
    config = AutoConfig.for_model(model_type, **TINY)
    return build_model(
        ModelPlan(model_type, config, None),
        te_backend=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        packed=packed,
        max_positions=64,
        **options,
    )


def inputs(lengths: list[int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (1, sum(lengths)))
    labels = ids.roll(-1)
    labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS | {"gemma2", "granite"}))
def test_packed_samples_score_as_they_do_alone(model_type):
    model = build(model_type, packed=True).eval()
    together, start, apart = inputs([5, 17, 9]), 0, 0.0
    for length in (5, 17, 9):
        alone = {name: tensor[:, start : start + length] for name, tensor in together.items()}
        apart += model(**alone).loss.item()
        start += length
    assert model(**together).loss.item() == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_loss_is_transformers_own(model_type):
    """Also where the head scales or caps its logits."""
    model = build(model_type, packed=False)
    batch = inputs([12])
    logits = model.model(input_ids=batch["input_ids"]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="sum")
    out = model(**batch)
    torch.testing.assert_close(out.loss, loss)
    assert out.correct == (logits.argmax(-1) == batch["labels"]).sum()


def test_a_model_that_leaks_between_packed_samples_is_refused(monkeypatch):
    """With transformers' own border detection switched off, any model leaks."""
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM lets packed samples see each other; add --no_packing"
    ):
        build("llama", packed=True)
    build("llama", packed=False)


def test_recomputation_that_a_model_lacks_is_refused(monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="--gradient_checkpointing: LlamaForCausalLM"):
        build("llama", packed=False, gradient_checkpointing=True)


def test_blocks_are_the_decoder_layers_and_recompute_if_asked():
    plain, recomputing = (build("llama", packed=False, gradient_checkpointing=on) for on in (False, True))
    assert [type(block).__name__ for block in plain.blocks] == ["LlamaDecoderLayer"] * 2
    assert [m.model.is_gradient_checkpointing for m in (plain, recomputing)] == [False, True]


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_on_meta_take_no_memory_and_are_tied_again_with_buffers_as_they_were(tied):
    config = AutoConfig.for_model("llama", **TINY, tie_word_embeddings=tied)
    whole = AutoModelForCausalLM.from_config(config)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == dict(whole.named_parameters()).keys()
    assert all(p.is_meta and p.requires_grad for p in parameters.values())
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(b, buffers[name]) for name, b in whole.named_buffers())
    materialize(model, torch.device("cpu"))
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.load_state_dict(whole.state_dict())
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(ids).logits, whole(ids).logits)


def test_modules_have_storage_again_outside_also_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), parameters_on_meta():
        frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        holder = torch.nn.Module()
        holder.weight = frozen
        assert holder.weight.is_meta and not holder.weight.requires_grad
        raise RuntimeError("inside")
    assert not torch.nn.Linear(2, 2).weight.is_meta

"""Adapters: initialization, losses and steps as in peft; targets; the frozen base."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.build import build_model, export_tensors
from fp8_suite.te_models.lora.adapters import hf_adapters
from fp8_suite.te_models.lora.settings import LoraConfig
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.spec import ModelSpec, from_config
from fp8_suite.training.optim.optimizer import trainable
from fp8_suite.training.precision import torchao_fp8
from fp8_suite.training.precision.recipes import build_autocast
from fp8_suite.training.precision.scaling import scaling_state
from transformers import Qwen2Config, Qwen3Config

from tests.te_models.test_recompute import BF16, CPU, LEVELS, SIZES, fp8

# With QK norms and heads wider than the hidden size, and with biases of q, k and v.
SPECS = {
    "qwen3": ModelSpec("test", Qwen3Config(**SIZES | {"head_dim": 32}), None),
    "qwen2": ModelSpec("test", Qwen2Config(**SIZES), None),
}
LORA = LoraConfig(lora_rank=4, lora_alpha=12.0)
OPTIONS = BuildOptions(
    te_backend="emulated", dtype=torch.float32, device=CPU, packed=False, max_positions=64, lora=LORA, seed=3
)
IDS = torch.randint(0, 8, (6, 2, 32), generator=torch.Generator().manual_seed(0))
SOME = "q_proj,v_proj,layers.0.mlp.up_proj,layers.1.mlp"


def train(model, loss_of, parameters):
    """Return the losses of six steps of AdamW."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01), []
    for ids in IDS:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(options, spec, precision=None):
    model = build_model(spec, options)
    # FP32 layers run without autocast.
    autocast = build_autocast(precision or BF16, device=CPU, parameter_dtype=options.dtype)

    def loss_of(model, ids):
        if precision is None:
            return model(ids, ids).loss / ids.numel()
        with autocast():
            loss = model(ids, ids).loss
        return loss / ids.numel()

    return model, train(model, loss_of, trainable(model).values())


@pytest.mark.parametrize("te_backend", [None, "emulated"])
@pytest.mark.parametrize(("family", "targets"), [("qwen3", "all"), ("qwen2", "all"), ("qwen3", SOME)])
def test_losses_and_adapters_are_those_of_peft(te_backend, family, targets):
    peft = pytest.importorskip("peft")
    spec, lora = SPECS[family], replace(LORA, lora_targets=targets)
    options = replace(OPTIONS, te_backend=te_backend, lora=lora)
    names = list(hf_adapters(build_model(spec, options)))
    reference = from_config(spec, torch.float32)
    reference.load_state_dict(dict(export_tensors(build_model(spec, replace(options, lora=LoraConfig())))))
    torch.manual_seed(options.seed)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=names, task_type="CAUSAL_LM")
    reference = peft.get_peft_model(reference, config)

    def loss_of(model, ids):
        logits = model(ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    expected_model = build_model(spec, options)
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    pairs = {f"{name}.lora_{letter}": f"lora_{letter.lower()}" for name in names for letter in "AB"}
    assert theirs.keys() == pairs.keys() and len(names) == {"all": 21, SOME: 10}[targets]
    adapters = hf_adapters(expected_model)
    for name, ours_name in pairs.items():
        assert torch.equal(theirs[name], adapters[name.rpartition(".")[0]].get_parameter(ours_name))
    expected = train(reference, loss_of, theirs.values())
    model, losses = ours(options, spec)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5
    adapters = hf_adapters(model)
    for name, ours_name in pairs.items():
        actual = adapters[name.rpartition(".")[0]].get_parameter(ours_name)
        torch.testing.assert_close(actual, theirs[name], rtol=1e-3, atol=1e-4)


@cache
def recomputed(recipe: str, recompute: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses over an FP8 base, and adapters and scales after them, with dropout."""
    lora = replace(LORA, lora_dropout=0.1)
    torch.manual_seed(5)
    options = replace(OPTIONS, dtype=torch.bfloat16, lora=lora, recompute=recompute)
    model, losses = ours(options, SPECS["qwen3"], fp8(recipe))
    return losses, [*trainable(model).values(), *scaling_state(model).values()]


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("recompute", LEVELS)
def test_recomputation_changes_nothing_over_an_fp8_base(recipe, recompute):
    """The second pass draws dropout's masks again."""
    losses, state = recomputed(recipe, "none")
    again, state_again = recomputed(recipe, recompute)
    assert losses == again and all(map(torch.equal, state, state_again))
    assert losses[-1] < losses[0] - 0.1


def test_targets_that_do_not_exist_are_named():
    with pytest.raises(UserError, match="q_proj, k_proj, v_proj") as caught:
        build_model(SPECS["qwen3"], replace(OPTIONS, lora=replace(LORA, lora_targets="q_proj,query")))
    assert caught.value.flags == {"lora_targets"}
    assert LoraConfig(lora_rank=8).alpha == 16 and LoraConfig(lora_rank=8).scaling == 2


def test_hugging_face_layers_are_compiled_and_recomputed(monkeypatch):
    # Graphs and their gradients as on a GPU, but no C++ for them, which takes half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    convert = partial(torchao_fp8.convert, recipe_of=lambda name: "tensorwise", emulated=True)
    options = replace(OPTIONS, te_backend=None, convert=convert)
    expected, losses = ours(options, SPECS["qwen3"])
    model, again = ours(replace(options, recompute="mlp", compile_layers=True), SPECS["qwen3"])
    assert again == pytest.approx(losses, rel=1e-4) and losses[-1] < losses[0] - 0.5
    for name, parameter in trainable(model).items():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=1e-2, atol=1e-3)

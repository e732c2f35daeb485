"""Levels of recomputation: emulated TE layers, Hugging Face layers, and --recompute's values."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from fp8_suite.core.errors import UserError
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.emulation import gemm
from fp8_suite.te_models.emulation.transformer import MultiheadAttention
from fp8_suite.te_models.lora.settings import LoraConfig
from fp8_suite.te_models.options import BuildOptions
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS, recompute_levels
from fp8_suite.te_models.spec import ModelSpec
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.optim.optimizer import trainable
from fp8_suite.training.precision import precision_map
from fp8_suite.training.precision.recipes import Precision, build_autocast, resolve_precision
from fp8_suite.training.precision.scaling import scaling_state
from transformers import MixtralConfig, Qwen3Config

CPU = torch.device("cpu")
LEVELS = RECOMPUTE_LEVELS[1:]
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "initializer_range": 0.1},
}
SPEC = ModelSpec("test", Qwen3Config(**SIZES), None)
SHAPE = {"packed": False, "max_positions": 64}
OPTIONS = BuildOptions(te_backend="emulated", dtype=torch.bfloat16, device=CPU, **SHAPE)
BF16 = Precision("bf16", "bf16", te_backend="emulated")


def fp8(recipe: str) -> Precision:
    flags = {"use_te": True, "te_backend": "emulated", "mixed_precision": "fp8", "fp8_scenario": recipe}
    return resolve_precision(config_from_dict(flags))


def train(
    options: BuildOptions, precision: Precision = BF16, spec: ModelSpec = SPEC, steps: int = 3
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Return a model after some steps, and their losses and gradients."""
    model, computed = build_model(spec, options), []
    precision_map.apply(model, precision)
    autocast = build_autocast(precision, device=CPU, parameter_dtype=options.dtype)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        with autocast():
            loss = model(ids, ids).loss
        loss.backward()
        computed += [loss.detach(), *(p.grad.clone() for p in trainable(model).values())]
        with torch.no_grad():
            for p in trainable(model).values():
                p -= 1e-4 * p.grad
                p.grad = None
    return model, computed


@cache
def results(options: BuildOptions, recipe: str = "bf16") -> list[torch.Tensor]:
    """Return losses and gradients of three steps, and the scales after them."""
    model, computed = train(options, BF16 if recipe == "bf16" else fp8(recipe))
    return [*computed, *(scaling_state(model) if options.te_backend else {}).values()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("recompute", [*LEVELS, "cheap:1+full:1"])
def test_every_level_equals_no_recomputation_bit_for_bit(recompute, recipe):
    expected = results(OPTIONS, recipe)
    assert equal(results(replace(OPTIONS, recompute=recompute), recipe), expected)
    if recompute in ("layer", "full"):
        assert equal(results(replace(OPTIONS, recompute=recompute, reentrant=True), recipe), expected)


@pytest.mark.parametrize(("level", "again"), [("cheap", 0), ("mlp", 1), ("layer", 3), ("full", 3)])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_level_runs_only_its_gemms_again(monkeypatch, level, again, rank):
    products, multiply = Counter(), gemm.multiply

    def count(*args, **transposed):
        products[tuple(sorted(transposed))] += 1
        return multiply(*args, **transposed)

    monkeypatch.setattr(gemm, "multiply", count)
    train(replace(OPTIONS, recompute=f"{level}:2", lora=LoraConfig(lora_rank=rank)))
    assert products[("transpose_b",)] == 3 * (3 * 4 + 2 * again)  # steps, layers, GEMMs of forward
    assert products[()] == 3 * 3 * 4  # gradients of inputs
    assert products[("transpose_a",)] == (0 if rank else 3 * 3 * 4)  # gradients of weights


def repeat_attention(times: Callable[[], int], options: BuildOptions) -> list[torch.Tensor]:
    """Return losses and gradients of a model whose first layer runs its attention several times in a pass."""

    class Repeated(MultiheadAttention):
        def forward(self, x, *arguments):
            for _ in range(times()):
                x = super().forward(x, *arguments)
            return x

    model = build_model(SPEC, options)
    model.layers[0].self_attention.__class__ = Repeated
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    loss = model(ids, ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("level", LEVELS)
def test_a_module_may_run_several_times_in_a_layer(level):
    expected = repeat_attention(lambda: 2, OPTIONS)
    assert equal(repeat_attention(lambda: 2, replace(OPTIONS, recompute=level)), expected)


def test_a_result_that_recomputation_does_not_use_is_an_error():
    runs = iter([2, 1])  # times in the first pass, and when it is recomputed
    with pytest.raises(AssertionError, match=r"did not use .*'qkv', 2"):
        repeat_attention(lambda: next(runs), replace(OPTIONS, recompute="cheap"))


@pytest.mark.parametrize("recompute", ["mlp", "layer", "full", "mlp:1+layer:1"])
@pytest.mark.parametrize("compiled", [False, True])
def test_hugging_face_layers_have_the_same_gradients(recompute, compiled, monkeypatch):
    # Graphs and their gradients as on a GPU, but no C++ for them, which takes half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    options = replace(OPTIONS, te_backend=None, dtype=torch.float32)
    recomputed = results(replace(options, recompute=recompute, compile_layers=compiled))
    torch.testing.assert_close(recomputed, results(options))


def test_a_level_that_a_model_lacks_is_refused():
    experts = ModelSpec("test", MixtralConfig(**SIZES, num_local_experts=2), None)
    with pytest.raises(UserError, match="--recompute mlp: the MLP of MixtralForCausalLM is unknown"):
        build_model(experts, replace(OPTIONS, te_backend=None, recompute="mlp"))


def test_levels_are_given_for_all_layers_or_by_number():
    assert recompute_levels("none", 2) == ["none", "none"]
    assert recompute_levels("mlp", 2) == ["mlp", "mlp"]
    assert recompute_levels("layer:1+cheap:2", 4) == ["layer", "cheap", "cheap", "none"]
    assert recompute_levels("layer:1 + mlp", 3) == ["layer", "mlp", "mlp"]
    with pytest.raises(UserError, match="--recompute mlp:5: for 5 layers, but the model has 4; give fewer"):
        recompute_levels("mlp:5", 4)
    for text in ("", "all", "mlp:", "mlp:-1", "mlp:x", "mlp,layer", "3", "layer+mlp"):
        with pytest.raises(UserError, match="--recompute"):
            config_from_dict({"recompute": text})
    assert config_from_dict({"gradient_checkpointing": True}).model.recomputation == "layer"

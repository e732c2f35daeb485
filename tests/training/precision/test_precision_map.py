"""Precision by module: patterns, rules that disagree, sizes, and modules that run in their own recipe."""

from dataclasses import replace

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.te_models.spec import ModelSpec
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.precision import precision_map
from fp8_suite.training.precision.checks import check_sizes
from fp8_suite.training.precision.coverage import coverage
from fp8_suite.training.precision.precision_map import assign, matches, te_names
from fp8_suite.training.precision.recipes import Precision, resolve_precision
from fp8_suite.training.precision.scaling import scaling_state
from transformers import LlamaConfig

from tests.te_models.test_recompute import BF16, OPTIONS, SIZES, equal, train
from tests.training.parallel.jobs import same_bits

TE = {"use_te": True, "mixed_precision": "fp8"}
HF = {"mixed_precision": "fp8"}
HF_NAMES = [f"model.layers.{i}.{m}" for i in range(4) for m in ("self_attn.q_proj", "mlp.down_proj")]
SPEC = ModelSpec("test", LlamaConfig(**SIZES | {"num_hidden_layers": 2}), None)


def te(layers: int = 4, **values) -> dict[str, str]:
    return assign(config_from_dict(TE | values), te_names(layers), layers)


def resolve(**values) -> Precision:
    cfg = config_from_dict({"te_backend": "emulated", **TE, **values})
    return precision_map.resolve_map(cfg, resolve_precision(cfg), SPEC.config)


def native(**by_module: str) -> Precision:
    """Delayed scaling in all modules but those given by the last part of their names."""
    names = {n: by_module.get(n.rpartition(".")[2], "delayed") for n in te_names(2)}
    return Precision("delayed", "delayed", te_recipe=object(), te_backend="native", by_module=names)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.0", "layers.0.self_attention.proj", True),
        ("layers.0", "layers.10.self_attention.proj", False),
        ("layers.*.self_attention", "layers.3.self_attention.proj", True),
        ("layers.[0-3]", "layers.3.layernorm_mlp", True),
        ("proj", "layers.3.self_attention.layernorm_proj", False),
        ("mlp.down_proj", "model.layers.3.mlp.down_proj", True),
        ("mlp.proj", "model.mlp.layers.3.proj", False),  # parts must be consecutive
    ],
)
def test_a_pattern_matches_a_run_of_parts(pattern, name, expected):
    assert matches(pattern, name) == expected


def test_settings_reach_exactly_their_modules():
    assert set(te().values()) == {"delayed"}
    text = "layers.0=bf16, layers.1.*.proj = current"
    assigned = te(layers=3, precision_map=text, fp8_scenario="block", bf16_last_layers=1)
    expected = ["bf16"] * 3 + ["block", "current", "block"] + ["bf16"] * 3
    assert assigned == dict(zip(te_names(3), expected, strict=True))
    assigned = te(bf16_first_layers=2, bf16_last_layers=1, precision_map="layers.0.layernorm_mlp=bf16")
    assert list(assigned.values()) == ["bf16"] * 6 + ["delayed"] * 3 + ["bf16"] * 3
    of_torchao = config_from_dict(HF | {"precision_map": "mlp.down_proj=rowwise"})
    assert list(assign(of_torchao, HF_NAMES, 4).values()) == ["tensorwise", "rowwise"] * 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"precision_map": "layers.0=bf16,"}, r"'' is not PATTERN=RECIPE"),
        ({"precision_map": "layers..proj=bf16"}, r"'layers..proj=bf16' is not PATTERN=RECIPE"),
        ({"precision_map": "a=b=bf16"}, r"'a=b=bf16' is not PATTERN=RECIPE"),
        ({"precision_map": "proj=mxfp9"}, r"mxfp9: .*'mxfp8'"),
        ({"precision_map": "layers.9=bf16"}, r"layers.9=bf16: no GEMM module .*layers\.\*\..*layers 0 to 3"),
        ({"precision_map": "layers.1=bf16,proj=current"}, r"layers.1=bf16 and proj=current conflict on"),
        ({"precision_map": "proj=current", "bf16_last_layers": 1}, r"--bf16_last_layers 1 conflict on"),
        ({"bf16_first_layers": 2, "bf16_last_layers": 2}, r"all of the model's 4 layers; use --mixed_precis"),
        ({"precision_map": "layers.*=bf16"}, r"no module is left in FP8; use --mixed_precision bf16"),
    ],
)
def test_a_map_that_cannot_be_followed_is_a_bad_setting(values, words):
    with pytest.raises(UserError, match=words) as error:
        te(**values)
    assert "\n" not in str(error.value) and error.value.exit_code == EXIT_BAD_SETTING


def test_tokens_sizes_and_calibration_follow_every_recipe_in_use():
    everywhere = {"layernorm_qkv": "current", "proj": "current", "layernorm_mlp": "current"}
    assert native().needs_calibration and not native(**everywhere).needs_calibration
    assert native(**everywhere | {"proj": "delayed"}).needs_calibration and not BF16.needs_calibration
    sizes = {"hidden_size": 256, "intermediate_size": 640, "query width": 256, "key/value width": 32}
    assert native().token_multiple == 16 and native(layernorm_mlp="block").token_multiple == 128
    assert native(layernorm_qkv="bf16", proj="bf16", layernorm_mlp="mxfp8").token_multiple == 32
    check_sizes(native(layernorm_mlp="block", proj="block"), "m", sizes)
    with pytest.raises(UserError, match=r"key/value width 32 .*layernorm_qkv"):
        check_sizes(native(layernorm_qkv="block"), "m", sizes)
    odd = sizes | {"intermediate_size": 650}
    check_sizes(native(layernorm_mlp="bf16"), "m", odd)


def test_recipes_that_te_cannot_mix_are_refused():
    gather = {"fp8_all_gather": True, "sharding_mode": "fsdp_full", "fp8_scenario": "current"}
    with pytest.raises(UserError, match=r"--fp8_all_gather.*: .*all in current; drop it, or bf16, delayed"):
        resolve(**gather, precision_map="layers.0.*.proj=bf16,layers.1.*.proj=delayed")


def test_a_recipe_of_the_map_that_cannot_run_here_is_refused():
    with pytest.raises(UserError, match=r"--precision_map ...=nvfp4 cannot run here") as refused:
        resolve(precision_map="proj=nvfp4")  # which is not emulated
    assert refused.value.flags == {"precision_map"}
    replaced = resolve(precision_map="proj=current", fp8_scenario="nvfp4")
    assert replaced.in_use == {"current", "delayed"} and replaced.effective == "delayed"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("around", "inside"), [("current", "delayed"), ("delayed", "current"), ("block", "mxfp8")]
)
def test_a_map_of_one_recipe_for_all_is_that_recipe(around, inside, recompute):
    options = replace(OPTIONS, recompute="layer" if recompute else "none")
    everywhere = resolve(fp8_scenario=around, precision_map=f"layers.*={inside}")
    mapped, computed = train(options, everywhere, SPEC)
    alone, expected = train(options, resolve(fp8_scenario=inside), SPEC)
    assert equal(computed, expected)
    states = [
        {name: t for name, t in scaling_state(model).items() if "core_attention" not in name}
        for model in (mapped, alone)
    ]
    assert same_bits(*states)
    assert bool(states[0]) == (inside == "delayed")


def test_every_module_runs_in_what_it_was_given():
    text = "layers.1.self_attention.proj=current,layers.1.layernorm_mlp=bf16,layers.1.*.layernorm_qkv=mxfp8"
    resolved = resolve(precision_map=text, bf16_first_layers=1, fp8_scenario="block")
    assert resolved.describe() == "by module (bf16, current, mxfp8)" and BF16.describe() == "bf16"
    model, computed = train(OPTIONS, resolved, SPEC, steps=1)
    table = coverage(model)
    rows = {(row.modules, row.precision): row.count for row in table.rows}
    attention = "layers.*.self_attention"
    assert rows == {
        (f"{attention}.layernorm_qkv", "bf16"): 1,
        (f"{attention}.layernorm_qkv", "fp8 mxfp8"): 1,
        (f"{attention}.proj", "bf16"): 1,
        (f"{attention}.proj", "fp8 current"): 1,
        ("layers.*.layernorm_mlp", "bf16"): 2,
        (f"{attention}.core_attention", "bf16"): 2,
        ("lm_head", "bf16"): 1,
    }
    _, in_bf16 = train(OPTIONS, BF16, SPEC, steps=1)
    assert not torch.equal(computed[0], in_bf16[0])
    assert computed[0].item() == pytest.approx(in_bf16[0].item(), rel=0.02)

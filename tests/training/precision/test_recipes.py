"""The table of recipes, and what a run's precision is resolved to, without a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_FAILED, UserError
from fp8_suite.core.recipes import FALLBACK_RECIPE, RECIPES, TE_RECIPES, TORCHAO_RECIPES
from fp8_suite.te_models.emulation import recipes as emulated
from fp8_suite.te_models.kernels.packed_attention import why_no_kernel
from fp8_suite.te_models.spec import inference_dtype
from fp8_suite.training.config import Config, all_settings, config_from_dict
from fp8_suite.training.precision import checks, te_runtime
from fp8_suite.training.precision import recipes as precision
from fp8_suite.training.precision import recipes as te
from fp8_suite.training.precision.recipes import Precision
from fp8_suite.training.precision.settings import RECIPE_SETTINGS

TE_FP8 = {"use_te": True, "mixed_precision": "fp8"}
EMULATED = tuple(name for name in TE_RECIPES if hasattr(emulated, RECIPES[name].te_class))


def settings(**values) -> Config:
    return config_from_dict(values)


def test_the_table_is_complete():
    assert get_args(all_settings()["fp8_scenario"][2]) == ("default", *TE_RECIPES, *TORCHAO_RECIPES)
    flags = {name for name in all_settings() if name.startswith("fp8_")}
    assert set(VALUES) == RECIPE_SETTINGS
    for name, spec in RECIPES.items():
        assert spec.settings <= flags, name
        assert bool(spec.make and spec.probe) == bool(spec.te_class), name
        assert spec.costs.gemm_share > 0 and spec.costs.cast_bytes > 0, name
    assert not RECIPES[FALLBACK_RECIPE].may_fall_back


@pytest.mark.parametrize("name", TE_RECIPES)
def test_a_te_recipe_is_made_emulated_or_refused_with_a_reason(name):
    if name in EMULATED:
        assert te.why_not(name, "emulated") is None
        assert te.recipe_name(te.make_recipe(name, settings().precision, "emulated")) == name
    else:
        assert te.why_not(name, "emulated")


def test_every_setting_reaches_the_recipe():
    cfg = settings(fp8_amax_history_len=7, fp8_format="e4m3", fp8_fp32_scales=True).precision
    names = ("delayed", "current", "block")
    delayed, current, block = (te.make_recipe(name, cfg, "emulated") for name in names)
    assert delayed.amax_history_len == 7 and block.use_f32_scales
    assert delayed.fp8_format == current.fp8_format == emulated.Format.E4M3


@pytest.mark.parametrize("fast", [True, False])
def test_fast_accumulation_reaches_both_gemms_of_backward(fast, monkeypatch):
    """The emulation has no such setting, so TE's recipe module is replaced."""
    library = SimpleNamespace(Format={"HYBRID": "hybrid"}, MMParams=SimpleNamespace)
    library.Float8CurrentScaling = SimpleNamespace
    monkeypatch.setattr(te, "te_recipes", lambda backend: library)
    recipe = te.make_recipe("current", settings(fp8_fast_accumulation=fast).precision)
    quick = SimpleNamespace(use_split_accumulator=False)
    gemms = {"fp8_gemm_dgrad": quick, "fp8_gemm_wgrad": quick} if fast else {}
    assert vars(recipe) == {"fp8_format": "hybrid"} | gemms


@pytest.mark.skipif(torch.cuda.is_available(), reason="expects a machine without a GPU")
def test_without_a_gpu_te_and_fp8_are_emulated_and_native_te_is_refused():
    emulation = precision.resolve_precision(settings(use_te=True, mixed_precision="bf16"))
    assert (emulation.te_backend, emulation.emulated, emulation.effective) == ("emulated", True, "bf16")
    torchao = precision.resolve_precision(settings(mixed_precision="fp8"))
    assert (torchao.te_backend, torchao.emulated, torchao.effective) == (None, True, "tensorwise")
    assert "needs a CUDA GPU" in te.why_not("delayed")
    with pytest.raises(UserError, match=r"--te_backend native cannot run here") as error:
        precision.resolve_precision(settings(use_te=True, te_backend="native", mixed_precision="bf16"))
    assert error.value.exit_code == EXIT_FAILED


@pytest.fixture
def has_gpu(monkeypatch) -> Callable[..., None]:
    """Let this machine have a GPU with the capability that is passed to the fixture."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "test GPU")
    return lambda *version: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: version)


def test_a_gpu_without_fp8_or_without_te_is_refused_with_the_way_out(has_gpu, monkeypatch):
    has_gpu(8, 6)
    with pytest.raises(UserError, match=r"8\.9.*bf16") as refused:
        precision.resolve_precision(settings(mixed_precision="fp8"))
    assert refused.value.flags == {"mixed_precision"}
    has_gpu(8, 9)
    assert not precision.resolve_precision(settings(mixed_precision="fp8")).emulated
    monkeypatch.setattr(te_runtime, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-build-isolation -r requirements-gpu\.txt"):
        precision.resolve_precision(settings(**TE_FP8))


def test_a_gpu_without_bf16_is_told_to_use_fp16(has_gpu):
    has_gpu(7, 5)
    with pytest.raises(UserError, match=r"8\.0.*fp16") as refused:
        precision.resolve_precision(settings())
    assert refused.value.flags == {"mixed_precision"}
    resolved = precision.resolve_precision(settings(mixed_precision="fp16"))
    assert (resolved.effective, resolved.compute_dtype) == ("fp16", torch.float16)
    query = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, shape=(1, 64))
    assert "Ampere" in why_no_kernel(query), "FlashAttention 2 needs it too"
    assert inference_dtype(query.device) == torch.float16
    assert inference_dtype(torch.device("cpu")) == torch.float32
    has_gpu(8, 0)
    assert why_no_kernel(query) is None and precision.resolve_precision(settings()).effective == "bf16"
    assert inference_dtype(query.device) == torch.bfloat16


def test_a_recipe_falls_back_with_a_reason_or_stops(monkeypatch):
    nvfp4 = TE_FP8 | {"te_backend": "emulated", "fp8_scenario": "nvfp4"}  # which is not emulated
    resolved = precision.resolve_precision(settings(**nvfp4))
    assert (resolved.requested, resolved.effective) == ("nvfp4", "delayed")
    assert te.recipe_name(resolved.te_recipe) == "delayed"
    assert "nvfp4 cannot run here" in resolved.fallback_reason == resolved.as_dict()["fallback_reason"]
    with pytest.raises(UserError, match="This machine runs: delayed, current, block, mxfp8"):
        precision.resolve_precision(settings(**nvfp4, fp8_fallback="error"))
    monkeypatch.setattr(precision, "why_not", lambda name, _: None if name == "current" else "too old")
    for name in ("nvfp4", "block"):  # neither the fallback runs here, nor may block fall back
        with pytest.raises(UserError, match=rf"{name} cannot run here: too old. This machine runs: current"):
            precision.resolve_precision(settings(**nvfp4 | {"fp8_scenario": name}))


@pytest.mark.parametrize("setting", precision.NATIVE_ONLY_SETTINGS)
def test_what_emulated_layers_lack_is_refused(setting):
    cfg = settings(**TE_FP8, te_backend="emulated", offload_optimizer=True, **{setting: True})
    with pytest.raises(UserError) as refused:
        precision.resolve_precision(cfg)
    assert refused.value.flags == {setting} and refused.value.exit_code == EXIT_BAD_SETTING


VALUES = {
    "fp8_amax_history_len": 16,
    "fp8_format": "e4m3",
    "fp8_fast_accumulation": True,
    "fp8_fp32_scales": True,
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_flag_that_no_recipe_in_use_reads_is_refused(name, recipe):
    cfg, is_read = settings(**{name: VALUES[name]}), name in RECIPES[recipe].settings
    for resolved in (Precision(recipe, recipe), Precision("x", "delayed", by_module={"layers.0.x": recipe})):
        with nullcontext() if is_read else pytest.raises(UserError) as refused:
            checks.check_settings(cfg, resolved)
        assert is_read or refused.value.flags == {name}


def test_fp8_flags_in_a_bf16_run_are_warned_about():
    bf16, delayed = Precision("bf16", "bf16"), Precision("delayed", "delayed")
    cfg = settings(fp8_scenario="delayed", fp8_amax_history_len=2)
    checks.check_settings(cfg, bf16)
    warning = checks.unused_fp8_flags(cfg, bf16)
    assert warning.startswith("--fp8_scenario delayed, --fp8_amax_history_len 2: not used in bf16;")
    assert checks.unused_fp8_flags(cfg, delayed) is None and checks.unused_fp8_flags(settings(), bf16) is None


def test_fp32_scales_of_blocks_are_refused_on_blackwell(has_gpu):
    has_gpu(10, 0)
    block = Precision("block", "block", te_backend="native")
    with pytest.raises(UserError, match=r"--fp8_fp32_scales: .* powers of two; drop it"):
        checks.check_settings(settings(fp8_fp32_scales=True), block)


@pytest.mark.parametrize("name", TE_RECIPES)
def test_tokens_and_sizes_are_multiples_of_what_the_kernels_take(name):
    resolved = Precision("mxfp8", name, te_recipe=object())
    tokens, features = {"block": (128, 128), "mxfp8": (32, 32), "nvfp4": (128, 32)}.get(name, (16, 16))
    assert resolved.token_multiple == tokens
    checks.check_sizes(resolved, "m", {"hidden_size": features * 3})
    odd = features * 3 + 8
    message = rf"--fp8_scenario {name} --model_name m: hidden_size {odd} not a multiple of {features}, .*bf16"
    with pytest.raises(UserError, match=message):
        checks.check_sizes(resolved, "m", {"hidden_size": odd, "fine": features})
    bf16 = Precision("bf16", "bf16")
    checks.check_sizes(bf16, "m", {"hidden_size": 7})
    assert bf16.token_multiple == 8 and Precision("rowwise", "rowwise").token_multiple == 16


def test_bf16_over_fp32_weights_is_torch_autocast():
    cpu = torch.device("cpu")
    for effective, dtype, expected in (
        ("bf16", torch.float32, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ):
        layer = torch.nn.Linear(4, 4).to(dtype)
        with precision.build_autocast(Precision(effective, effective), device=cpu, parameter_dtype=dtype)():
            assert layer(torch.ones(1, 4, dtype=dtype)).dtype == expected
            assert torch.is_autocast_enabled("cpu") == (dtype != expected)

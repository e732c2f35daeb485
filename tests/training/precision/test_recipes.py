"""Precision decisions that need no GPU: recipes, reasons, sizes."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from core.recipes import RECIPES
from training.config import Config, all_settings, config_from_dict
from training.precision import recipes as precision
from training.precision import te_runtime
from training.precision.coverage import coverage
from training.precision.recipes import (
    Precision,
    build_autocast,
    check_sizes,
    resolve_precision,
    why_not,
)
from training.precision.te_runtime import why_not_te

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")


def settings(**values) -> Config:
    return config_from_dict(values)


def test_the_table_and_the_command_line_know_the_same_recipes():
    assert set(get_args(all_settings()["fp8_scenario"][2])) == {"default", *RECIPES}


@NO_GPU
def test_without_a_gpu_native_te_says_why_and_what_runs():
    assert "needs a CUDA GPU" in why_not_te() and "needs a CUDA GPU" in why_not("delayed")
    native = {"use_te": True, "te_backend": "native"}
    with pytest.raises(RuntimeError, match=r"--te_backend native cannot run here.*--te_backend emulated"):
        resolve_precision(settings(**native, mixed_precision="bf16"))


@NO_GPU
def test_without_a_gpu_fp8_is_emulated_and_says_so():
    te = resolve_precision(settings(use_te=True, mixed_precision="bf16"))
    assert (te.te_backend, te.emulated, te.effective) == ("emulated", True, "bf16")
    torchao = resolve_precision(settings(mixed_precision="fp8"))
    assert (torchao.te_backend, torchao.emulated, torchao.effective) == (None, True, "tensorwise")
    assert torchao.fp8 and torchao.token_multiple == 16


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_fp8_without_te_on_a_gpu_without_fp8_is_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "old")
    with pytest.raises(RuntimeError, match=r"--mixed_precision fp8 cannot run here.*8\.9.*bf16"):
        resolve_precision(settings(mixed_precision="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert not resolve_precision(settings(mixed_precision="fp8")).emulated


def test_missing_te_names_the_install_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(te_runtime, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-build-isolation -r requirements-gpu\.txt"):
        resolve_precision(settings(use_te=True, mixed_precision="fp8"))


def on_hopper(monkeypatch):
    """A machine whose TE runs everything but the Blackwell recipes, as an H200 does."""
    reason = "Device compute capability 10.0 or higher required"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(precision, "why_not_te", lambda: None)
    monkeypatch.setattr(
        precision, "why_not", lambda name, backend: reason if RECIPES[name].may_fall_back else None
    )
    monkeypatch.setattr(precision, "make_recipe", lambda name, cfg, backend: name)


def test_mxfp8_falls_back_loudly_or_stops(monkeypatch):
    on_hopper(monkeypatch)
    cfg = {"use_te": True, "mixed_precision": "fp8", "fp8_scenario": "mxfp8"}
    resolved = resolve_precision(settings(**cfg))
    assert (resolved.requested, resolved.effective, resolved.recipe) == ("mxfp8", "delayed", "delayed")
    assert "capability 10.0" in resolved.fallback_reason
    assert "This machine runs: delayed, current, block" in resolved.fallback_reason
    with pytest.raises(RuntimeError, match=r"--fp8_scenario mxfp8 cannot run here.*delayed, current, block"):
        resolve_precision(settings(**cfg, fp8_fallback="error"))
    monkeypatch.setattr(precision, "why_not", lambda name, backend: None if name == "current" else "too old")
    with pytest.raises(
        RuntimeError, match=r"--fp8_scenario mxfp8 cannot run here.*This machine runs: current;"
    ):
        resolve_precision(settings(**cfg))


def test_every_setting_reaches_the_recipe():
    te = SimpleNamespace(DelayedScaling=dict, Float8CurrentScaling=dict, Format={"E4M3": 1, "HYBRID": 2})
    cfg = settings(
        fp8_margin=3,
        fp8_format="e4m3",
        fp8_amax_history_len=7,
        fp8_amax_compute_algo="most_recent",
        fp8_attention=True,
    ).precision
    shared = {"fp8_format": 1, "fp8_dpa": True}
    assert RECIPES["current"].make(cfg, te) == shared
    assert RECIPES["delayed"].make(cfg, te) == shared | {
        "margin": 3,
        "amax_history_len": 7,
        "amax_compute_algo": "most_recent",
    }


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fast_accumulation_reaches_the_gemms_of_backward(monkeypatch, name):
    own = SimpleNamespace
    te = own(DelayedScaling=own, Float8CurrentScaling=own, Format={"HYBRID": 2}, MMParams=own)
    monkeypatch.setattr(precision, "recipes", lambda backend: te)
    recipe = precision.make_recipe(name, settings(fp8_fast_accumulation=True).precision)
    assert recipe.fp8_gemm_dgrad.use_split_accumulator is False
    assert recipe.fp8_gemm_wgrad.use_split_accumulator is False
    assert not hasattr(precision.make_recipe(name, settings().precision), "fp8_gemm_dgrad")


def test_default_is_delayed_scaling_and_bf16_has_no_recipe(monkeypatch):
    on_hopper(monkeypatch)
    resolved = resolve_precision(settings(use_te=True, mixed_precision="fp8"))
    assert (resolved.requested, resolved.effective, resolved.fallback_reason) == ("delayed", "delayed", None)
    assert resolve_precision(settings(use_te=True, mixed_precision="bf16")).recipe is None


@pytest.mark.parametrize(
    ("name", "multiple"), [("delayed", 16), ("block", 128), ("mxfp8", 32), ("nvfp4", 32)]
)
def test_sizes_that_a_recipe_cannot_run_are_named(name, multiple):
    resolved = Precision(name, name, recipe=object())
    check_sizes(resolved, "m", {"hidden_size": multiple * 3})
    with pytest.raises(
        ValueError, match=rf"--fp8_scenario {name}.*hidden_size {multiple * 3 + 8}.*{multiple}"
    ):
        check_sizes(resolved, "m", {"hidden_size": multiple * 3 + 8, "fine": multiple})
    check_sizes(Precision("bf16", "bf16"), "m", {"hidden_size": 7})


def test_bf16_over_fp32_weights_is_torch_autocast():
    cpu = torch.device("cpu")
    for effective, dtype, expected in (
        ("bf16", torch.float32, torch.bfloat16),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
    ):
        layer = torch.nn.Linear(4, 4).to(dtype)
        with build_autocast(Precision(effective, effective), device=cpu, parameter_dtype=dtype)():
            assert layer(torch.ones(1, 4, dtype=dtype)).dtype == expected
            assert torch.is_autocast_enabled("cpu") == (dtype != expected)


def test_coverage_counts_gemms_by_their_weights():
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(100, 8),
            "layers": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)),
            "lm_head": torch.nn.Linear(8, 100, bias=False),
        }
    )
    found = coverage(model, Precision("bf16", "bf16"))
    shares = {row.modules: (row.count, row.precision, row.gemm_share) for row in found.rows}
    head = 800 / (800 + 3 * 64)
    assert shares == {
        "layers.*": (3, "bf16", pytest.approx(1 - head)),
        "lm_head": (1, "bf16", pytest.approx(head)),
    }
    assert found.fp8_modules == 0 and found.fp8_gemm_share == 0


@pytest.mark.parametrize(
    "resolved",
    [
        precision.Precision("block", "block", te_backend="native"),
        precision.Precision("delayed", "delayed", te_backend="emulated"),
        precision.Precision("tensorwise", "tensorwise"),
        precision.Precision("delayed", "delayed", te_backend="native", by_module={"layers.0.x": "block"}),
    ],
)
def test_fast_accumulation_where_no_gemm_has_the_choice_is_refused(resolved):
    precision.check_settings(settings(), resolved)
    lacking = resolved.te_backend == "emulated"  # the machine is: the layers were not asked for
    with pytest.raises(RuntimeError if lacking else ValueError, match=r"--fp8_fast_accumulation: .*drop it"):
        precision.check_settings(settings(fp8_fast_accumulation=True), resolved)


@pytest.mark.parametrize(("te_backend", "kind"), [("auto", RuntimeError), ("emulated", ValueError)])
def test_attention_is_not_emulated(monkeypatch, te_backend, kind):
    """A bad setting only beside the flag that asks for emulated layers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fp8 = {"mixed_precision": "fp8", "fp8_scenario": "current", "fp8_attention": True}
    cfg = settings(use_te=True, te_backend=te_backend, **fp8)
    with pytest.raises(
        kind, match=r"^--fp8_attention: emulated TE layers compute .* drop it, or use TE's on"
    ):
        resolve_precision(cfg)


@pytest.mark.parametrize(
    ("name", "value", "readers"),
    [
        ("fp8_margin", 3, {"delayed"}),
        ("fp8_amax_history_len", 16, {"delayed"}),
        ("fp8_amax_compute_algo", "most_recent", {"delayed"}),
        ("fp8_format", "e4m3", {"delayed", "current"}),
        ("fp8_attention", True, {"delayed", "current"}),
        ("fp8_fp32_scales", True, {"block"}),
    ],
)
def test_a_setting_that_no_recipe_reads_is_refused(name, value, readers):
    flag = name if value is True else f"{name} {value}"
    for recipe in ("delayed", "current", "block", "tensorwise"):
        resolved = precision.Precision(recipe, recipe)
        if recipe in readers:
            precision.check_settings(settings(**{name: value}), resolved)
            continue
        with pytest.raises(ValueError, match=rf"--{flag}: is read under .*, not under {recipe}; drop it"):
            precision.check_settings(settings(**{name: value}), resolved)
    in_bf16 = precision.Precision("bf16", "bf16")
    precision.check_settings(settings(**{name: value}), in_bf16)
    assert precision.unread(settings(**{name: value}), precision.Precision("delayed", "delayed")) is None
    assert precision.unread(settings(**{name: value}), in_bf16) == (
        f"--{flag}: not read in bf16; FP8 needs --mixed_precision fp8"
    )


def test_a_recipe_asked_for_in_bf16_is_told():
    in_bf16 = precision.Precision("bf16", "bf16")
    assert precision.unread(settings(), in_bf16) is None
    said = precision.unread(settings(fp8_scenario="delayed", fp8_margin=2), in_bf16)
    assert said.startswith("--fp8_scenario delayed, --fp8_margin 2: not read in bf16")


def test_scales_of_blocks_in_fp32_reach_the_recipe():
    for fp32 in (False, True):
        recipe = precision.make_recipe("block", settings(fp8_fp32_scales=fp32).precision, "emulated")
        assert recipe.use_f32_scales is fp32


def test_scales_in_fp32_are_hopper_s(monkeypatch):
    resolved = precision.Precision("block", "block", te_backend="native")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    precision.check_settings(settings(fp8_fp32_scales=True), resolved)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(RuntimeError, match=r"--fp8_fp32_scales .*capability 10\.0.* powers of two; drop it"):
        precision.check_settings(settings(fp8_fp32_scales=True), resolved)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fast_accumulation_is_of_delayed_and_current_scaling(name):
    resolved = precision.Precision(name, name, te_backend="native")
    precision.check_settings(settings(fp8_fast_accumulation=True), resolved)


def test_fp8_attention_names_everything_it_lacks(monkeypatch):
    resolved = Precision("current", "current", recipe=object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91800)
    cfg = settings(fp8_attention=True, mixed_precision="fp8", use_te=True, deterministic=True)
    with pytest.raises(RuntimeError) as error:
        precision.check_fp8_attention(cfg, resolved, 64)
    for reason in ("--fp8_scenario current", "head size 64", "--no_packing", "--deterministic needs cuDNN"):
        assert reason in str(error.value)
    precision.check_fp8_attention(settings(mixed_precision="fp8", use_te=True), resolved, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    precision.check_fp8_attention(cfg, resolved, 64)


def test_tokens_are_padded_to_what_the_recipe_that_runs_needs():
    assert Precision("bf16", "bf16").token_multiple == 8
    for name, multiple in (("delayed", 16), ("current", 16), ("block", 128), ("mxfp8", 32)):
        assert Precision(name, name, recipe=object()).token_multiple == multiple
    assert Precision("mxfp8", "delayed", recipe=object()).token_multiple == 16

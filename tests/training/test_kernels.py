"""Selection of kernels: used where they apply and pass their self-test on every rank, and undone again."""

import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.te_models.kernels import flash_attention
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training import kernels
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.kernels import KERNELS, KernelInputs, OptionalKernel, enable_kernels
from fp8_suite.training.precision.recipes import Precision

cleanup = ExitStack()
OF_TE = {"qkv_rope"}


def plain_act_func(activation, recipe=None):
    return lambda x, quantizer: ("forward", quantizer), lambda grad, x, quantizer: "backward", None


@pytest.fixture(autouse=True)
def te(monkeypatch, tmp_path):
    """TE's modules that kernels patch, on a Hopper, with no kernel found wrong."""
    mlp = SimpleNamespace(_act_func=plain_act_func)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.layernorm_mlp", mlp)
    for module in (flash_attention, kernels):
        monkeypatch.setattr(module, "on_hopper", lambda: True)
    monkeypatch.setattr(flash_attention, "installed", lambda: "4.0.0b99")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "passed"))
    monkeypatch.setattr(kernels, "_machine", lambda: ("H100", "torch 2.13"))
    for name in flash_attention.TE_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    yield SimpleNamespace(mlp=mlp)
    cleanup.close()


class SelfTests:
    """Self-tests that find these problems, by kernel, and record the arguments of their calls."""

    def __init__(self) -> None:
        self.problems, self.calls = {}, {kernel.name: [] for kernel in KERNELS}

    def run(self, name, *arguments):
        self.calls[name].append(arguments)
        return self.problems.get(name)


def choose(tests=None, backend="native", recipe="delayed", device="cpu", *, warm=False, **settings):
    """Return the names of the kernels that such a run enables."""
    tests, enabled = tests or SelfTests(), set()

    def with_fake_test(kernel: OptionalKernel) -> OptionalKernel:
        def on(run):
            enabled.add(kernel.name)
            return kernel.on(run)

        return replace(kernel, self_test=lambda *arguments: tests.run(kernel.name, *arguments), on=on)

    if not warm:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    settings |= {"use_te": backend is not None, "mixed_precision": settings.get("mixed_precision", "fp8")}
    precision = Precision(recipe, recipe, te_backend=backend)
    run = KernelInputs(config_from_dict(settings), precision, ModelShape(*[64] * 7), torch.device(device))
    cleanup.close()  # the run before has ended
    selected = vars(enable_kernels(run, cleanup, [with_fake_test(kernel) for kernel in KERNELS]))
    assert {name for name, used in selected.items() if used} == enabled & selected.keys()
    return enabled


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, OF_TE | {"flash_attention", "swiglu"}),
        ({"recipe": "current"}, OF_TE | {"flash_attention"}),
        ({"flash_attention": False}, OF_TE | {"swiglu"}),
        ({"backend": "emulated", "te_backend": "emulated"}, set()),
        ({"backend": None, "recipe": "tensorwise"}, {"flash_attention"}),
        ({"backend": None, "recipe": "fp32", "mixed_precision": "fp32"}, set()),
        ({"backend": None, "recipe": "fp16", "mixed_precision": "fp16"}, set()),
        ({"grad_reduce_dtype": "fp8"}, OF_TE | {"flash_attention", "swiglu"}),
        ({"fp8_lm_head": True, "device": "cuda"}, OF_TE | {"flash_attention", "swiglu", "fp8_lm_head"}),
    ],
)
def test_kernels_are_used_where_they_apply(how, expected, capsys):
    assert choose(**how) == expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.fallback], ids=lambda k: k.name)
def test_a_kernel_that_fails_its_self_test_is_replaced_with_a_warning(kernel, capsys):
    tests = SelfTests()
    tests.problems[kernel.name] = "it computes zeros"
    enabled = choose(tests, grad_reduce_dtype="fp8", device="cuda")
    assert enabled == (OF_TE | {"flash_attention", "swiglu", "fp8_exchange"}) - {kernel.name}
    assert f"WARNING: {kernel.fallback}: it computes zeros\n" in capsys.readouterr().out


def test_a_wrong_fp8_lm_head_is_refused_since_nothing_replaces_it():
    tests = SelfTests()
    tests.problems["fp8_lm_head"] = "the GEMM differs from the reference"
    with pytest.raises(UserError, match="the GEMM differs") as refused:
        choose(tests, fp8_lm_head=True, device="cuda")
    assert refused.value.flags == {"fp8_lm_head"} and refused.value.exit_code == EXIT_BAD_SETTING


@pytest.mark.parametrize("result", [(True, "its cache is locked"), (False, None)], ids=["fails", "missing"])
def test_a_kernel_that_fails_or_is_missing_on_one_rank_is_used_on_none(result, monkeypatch, capsys):
    def with_another_rank(test):
        this_rank = test()
        return [this_rank, result if this_rank[0] else this_rank]

    monkeypatch.setattr(kernels.ranks, "run_on_all_ranks", with_another_rank)
    assert choose() == set() and os.environ["NVTE_FLASH_ATTN_V4"] == "0"
    assert ("its cache is locked" in capsys.readouterr().out) == (result[1] is not None)


def test_a_passed_self_test_is_remembered_for_its_software_gpu_and_sizes(monkeypatch):
    tests = SelfTests()
    tested = tests.calls["qkv_rope"]
    tests.problems["qkv_rope"] = "it computes zeros"
    for _ in range(2):
        assert "qkv_rope" not in choose(tests, warm=True)
    del tests.problems["qkv_rope"]
    for _ in range(2):
        assert "qkv_rope" in choose(tests, warm=True)
    assert len(tested) == 3, "a failure is not remembered, a pass is"
    for machine in (("H200", "torch 2.13"), ("H100", "torch 2.14")):
        monkeypatch.setattr(kernels, "_machine", lambda machine=machine: machine)
        assert "qkv_rope" in choose(tests, warm=True)
    monkeypatch.setattr(kernels.KernelInputs, "heads", (8, 8, 8))
    assert "qkv_rope" in choose(tests, warm=True) and tested[3:] == [(64, 64, 64)] * 2 + [(8, 8, 8)]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    for _ in range(2):
        assert "qkv_rope" in choose(tests, warm=True)
    assert len(tested) == 8, "tested at every start"


def test_cleanup_restores_the_libraries(te):
    choose()
    assert te.mlp._act_func is not plain_act_func
    cleanup.close()
    assert te.mlp._act_func is plain_act_func


def switches() -> set[str]:
    return {name for name in flash_attention.TE_SWITCHES if os.environ.get(name) == "0"}


def test_te_uses_flash_attention_4_only_if_it_passed():
    tests = SelfTests()
    choose()
    assert switches() == {"NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN_V3"}
    choose(flash_attention=False)
    assert switches() == {"NVTE_FLASH_ATTN_V4"}, "TE would choose it untested"
    tests.problems["flash_attention"] = "it computes zeros"
    choose(tests)
    assert switches() == {"NVTE_FLASH_ATTN_V4"}
    choose(backend=None, recipe="tensorwise")
    assert switches() == set()


def test_the_users_own_switches_of_te_win(monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert "flash_attention" not in choose() and switches() == {"NVTE_FLASH_ATTN"}

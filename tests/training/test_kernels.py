"""Selection of kernels: used where they apply and pass their self-test on every rank, and undone again."""

import os
import shutil
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.te_models.kernels import flash_attention, fused_swiglu, loss_fp8, rope
from fp8_suite.te_models.kernels.selection import Kernels
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training import kernels
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.kernels import KernelInputs, enable_kernels
from fp8_suite.training.precision.recipes import Precision

cleanup = ExitStack()


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
    (tmp_path / "version" / "fwd").mkdir(parents=True)
    (tmp_path / "version" / "fwd" / "kernel.o").touch()
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "passed"))
    monkeypatch.setattr(kernels, "_machine", lambda: ("H100", "torch 2.13"))
    for name in flash_attention.TE_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    yield SimpleNamespace(mlp=mlp)
    cleanup.close()


@pytest.fixture
def problems(monkeypatch):
    """Problem that each kernel's self-test finds, by its field of `Kernels`; none unless set."""
    problems = dict.fromkeys(Kernels.__dataclass_fields__)
    monkeypatch.setattr(loss_fp8, "self_test", lambda: problems["fp8_lm_head"])
    monkeypatch.setattr(flash_attention, "self_test", lambda *_: problems["flash_attention"])
    monkeypatch.setattr(rope, "self_test", lambda *heads: problems["qkv_rope"])
    monkeypatch.setattr(fused_swiglu, "self_test", lambda: problems["swiglu"])
    return problems


def choose(backend="native", recipe="delayed", device="cpu", *, warm=False, **settings):
    if not warm:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    settings |= {"use_te": backend is not None, "mixed_precision": settings.get("mixed_precision", "fp8")}
    precision = Precision(recipe, recipe, te_backend=backend)
    run = KernelInputs(config_from_dict(settings), precision, ModelShape(*[64] * 7), torch.device(device))
    cleanup.close()  # the run before has ended
    return enable_kernels(run, cleanup)


def used(selected: Kernels) -> set[str]:
    return {name for name, on in vars(selected).items() if on}


OF_TE = {"qkv_rope"}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, OF_TE | {"flash_attention", "swiglu"}),
        ({"recipe": "current"}, OF_TE | {"flash_attention"}),
        ({"flash_attention": False}, OF_TE | {"swiglu"}),
        ({"backend": "emulated", "te_backend": "emulated"}, set()),
        ({"backend": None, "recipe": "tensorwise"}, {"flash_attention"}),
        ({"backend": None, "recipe": "fp32", "mixed_precision": "fp32"}, set()),
        ({"fp8_lm_head": True, "device": "cuda"}, OF_TE | {"flash_attention", "swiglu", "fp8_lm_head"}),
    ],
)
def test_kernels_are_used_where_they_apply(how, expected, problems, capsys):
    assert used(choose(**how)) == expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kernel", [k for k in kernels.KERNELS if k.fallback], ids=lambda k: k.name)
def test_a_kernel_that_fails_its_self_test_is_replaced_with_a_warning(kernel, problems, capsys):
    problems[kernel.name] = "it computes zeros"
    assert used(choose()) == (OF_TE | {"flash_attention", "swiglu"}) - {kernel.name}
    assert f"WARNING: {kernel.fallback}: it computes zeros\n" in capsys.readouterr().out


def test_a_wrong_fp8_lm_head_is_refused_since_nothing_replaces_it(problems):
    problems["fp8_lm_head"] = "the GEMM differs from the reference"
    with pytest.raises(UserError, match="the GEMM differs") as refused:
        choose(fp8_lm_head=True, device="cuda")
    assert refused.value.flags == {"fp8_lm_head"} and refused.value.exit_code == EXIT_BAD_SETTING


@pytest.mark.parametrize("result", [(True, "its cache is locked"), (False, None)], ids=["fails", "missing"])
def test_a_kernel_that_fails_or_is_missing_on_one_rank_is_used_on_none(result, problems, monkeypatch, capsys):
    def with_another_rank(test):
        this_rank = test()
        return [this_rank, result if this_rank[0] else this_rank]

    monkeypatch.setattr(kernels.ranks, "run_on_all_ranks", with_another_rank)
    assert used(choose()) == set() and os.environ["NVTE_FLASH_ATTN_V4"] == "0"
    assert ("its cache is locked" in capsys.readouterr().out) == (result[1] is not None)


def test_a_passed_self_test_is_remembered_for_its_software_gpu_and_sizes(problems, monkeypatch):
    tested = []
    monkeypatch.setattr(rope, "self_test", lambda *heads: tested.append(heads) or problems["qkv_rope"])
    problems["qkv_rope"] = "it computes zeros"
    for _ in range(2):
        assert not choose(warm=True).qkv_rope
    problems["qkv_rope"] = None
    for _ in range(2):
        assert choose(warm=True).qkv_rope
    assert len(tested) == 3, "a failure is not remembered, a pass is"
    for machine in (("H200", "torch 2.13"), ("H100", "torch 2.14")):
        monkeypatch.setattr(kernels, "_machine", lambda machine=machine: machine)
        assert choose(warm=True).qkv_rope
    monkeypatch.setattr(kernels.KernelInputs, "heads", (8, 8, 8))
    assert choose(warm=True).qkv_rope and tested[3:] == [(64, 64, 64)] * 2 + [(8, 8, 8)]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert choose(warm=True).qkv_rope and choose(warm=True).qkv_rope, "tested at every start"
    assert len(tested) == 8


def test_cleanup_restores_the_libraries(problems, te):
    choose()
    assert te.mlp._act_func is not plain_act_func
    cleanup.close()
    assert te.mlp._act_func is plain_act_func


def switches() -> set[str]:
    return {name for name in flash_attention.TE_SWITCHES if os.environ.get(name) == "0"}


def test_te_uses_flash_attention_4_only_if_it_passed(problems):
    choose()
    assert switches() == {"NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN_V3"}
    choose(flash_attention=False)
    assert switches() == {"NVTE_FLASH_ATTN_V4"}, "TE would choose it untested"
    problems["flash_attention"] = "it computes zeros"
    choose()
    assert switches() == {"NVTE_FLASH_ATTN_V4"}
    choose(backend=None, recipe="tensorwise")
    assert switches() == set()


def test_the_users_own_switches_of_te_win(problems, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert not choose().flash_attention and switches() == {"NVTE_FLASH_ATTN"}
